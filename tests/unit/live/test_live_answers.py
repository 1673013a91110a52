"""Answers with a live store, in process: an event changes the very next answer, and without a store nothing changes."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest

from perf.live.reads import make_empty_state
from serving.contract.artifacts import find_stage_folder
from serving.contract.tensors import FROM_STORE, NO_SEQUENCE, OBSERVE, PAD_ID, Degraded
from serving.live.admission import EventAdmission
from serving.live.events import EventBatch, EventKinds
from serving.live.layout import Layout
from serving.live.reader import Reader
from serving.live.seeds import GenerationSeeds
from serving.live.store import find_live_folder
from serving.live.writer import Writer, WriterSettings
from serving.pipeline import Pipeline
from serving.stages.features.ids import ItemIndex
from serving.stages.features.user_state import UserState
from serving.stages.features.user_store import UserStore
from serving.stages.live.content import compute_tokens
from serving.stages.live.models import Observe
from serving.stages.live.users.live_users import LiveUsers
from serving.stages.preprocess import Preprocess
from tests.unit.live.answers import answer, change_stage, event_inputs, last_event_ms, upserted
from tests.unit.live.batches import KINDS, START_MS, purchase
from tests.unit.small_shops import shop
from training.features.build import make_event_log
from training.features.items import Codes
from training.features.schema import FeatureSettings
from training.features.store import write_store


def test_without_a_store_answers_are_those_of_the_generation(repository, reader):
    users = [*range(1, 31), 99, -5]
    frozen, live = Pipeline.load(repository), Pipeline.load(repository, live=reader)
    expected = answer(frozen, users)
    assert {name: values.tolist() for name, values in answer(live, users).items()} == {
        name: values.tolist() for name, values in expected.items()
    }
    assert not reader.exists()


def test_an_empty_store_changes_no_answer(repository, observe, reader):
    users = [*range(1, 31), 99, -5]
    expected, found = (answer(Pipeline.load(repository, live=live), users) for live in (None, reader))
    assert reader.exists()
    assert found["item_ids"].tolist() == expected["item_ids"].tolist()
    np.testing.assert_allclose(found["scores"], expected["scores"], atol=1e-6)


def test_a_purchase_changes_the_next_answer_of_its_user_and_nobody_elses_history(repository, observe, pipeline):
    at_ms = last_event_ms(repository)
    before, other = answer(pipeline, [7, 8]), pipeline.trace({"user_id": np.array([[8]])})
    bought = int(before["item_ids"][0, 0])
    sequence = observe(event_inputs(user_id=[7], item_id=[bought], timestamp_ms=[at_ms]))["sequence"]
    after = answer(pipeline, [7, 8], after=[int(sequence[0, 0]), -1])
    assert bought not in after["item_ids"][0]
    for name in ("history_ids", "history_age_days", "user_categorical", "user_continuous"):
        assert pipeline.trace({"user_id": np.array([[8]])})[name].tolist() == other[name].tolist()
    assert (after["degraded"] & Degraded.LIVE).tolist() == [[0], [0]]
    trace = pipeline.trace({"user_id": np.array([[7]])})
    assert (trace["history_ids"][0, 0], trace["history_age_days"][0, 0]) == (bought, 0.0)


def test_no_item_that_a_user_had_is_recommended_however_many_there_are(repository, observe, pipeline):
    at_ms = last_event_ms(repository)
    bought = np.arange(1, 61)[::2]
    observe(event_inputs(user_id=[7] * 30, item_id=bought.tolist(), timestamp_ms=[at_ms + n for n in range(30)]))
    batch = answer(pipeline, [7, 8, 7, 7])
    for row in (0, 2, 3):
        assert not np.isin(batch["item_ids"][row], bought).any()
        assert batch["item_ids"][row].tolist() == answer(pipeline, [7])["item_ids"][0].tolist()


def test_a_user_nobody_knew_is_served_by_what_they_did(repository, observe, pipeline):
    at_ms = last_event_ms(repository)
    observe(event_inputs(user_id=[-77, -77], item_id=[3, 5], timestamp_ms=[at_ms, at_ms + 1000]))
    by_event = pipeline.trace({"user_id": np.array([[-77]])})
    assert by_event["history_ids"][0, :3].tolist() == [5, 3, PAD_ID]
    assert by_event["item_ids"].tolist() != answer(pipeline, [-78])["item_ids"].tolist()


def test_an_event_of_today_on_an_old_log_makes_nobody_look_old(repository, observe, reader):
    users = list(range(1, 31))
    expected = Pipeline.load(repository).trace({"user_id": np.array(users).reshape(-1, 1)})
    observe(event_inputs(user_id=[99], item_id=[1]))  # without a time it happens now, years after the log's end
    found = Pipeline.load(repository, live=reader).trace({"user_id": np.array(users).reshape(-1, 1)})
    for name in ("history_ids", "history_age_days", "user_categorical", "user_continuous"):
        assert found[name].tolist() == expected[name].tolist()
    observe(event_inputs(user_id=[7], item_id=[1]))
    ages = Pipeline.load(repository, live=reader).trace({"user_id": np.array([[7]])})["history_age_days"][0]
    assert ages[0] == 0.0
    assert ages[1] == pytest.approx(expected["history_age_days"][6, 0], abs=0.01)


def test_a_view_that_is_newer_than_the_clock_has_no_negative_age(repository, reader):
    change_stage(repository, "preprocess", {"interests": list(KINDS.interests)})
    at_ms = last_event_ms(repository) + 60_000
    with closing(Writer(reader.folder, Layout(), KINDS.names)) as writer:
        writer.append(event(b"view", 3, at_ms))
    stage = Preprocess.load(find_stage_folder(repository, "preprocess", 1)).with_live(reader)
    inputs = {"user_id": np.array([[1]]), "after": np.array([[NO_SEQUENCE]])}
    features = stage(inputs | {"history": np.full((1, stage.info.axes.history), FROM_STORE)})
    assert features["history_ids"][0, 0] == 3
    assert features["history_age_days"][0, 0] == 0.0
    assert (features["history_age_days"] >= 0).all()


def test_an_event_that_is_missing_is_waited_for_and_then_the_answer_is_degraded(repository, observe, pipeline):
    sequence = observe(event_inputs(user_id=[7], item_id=[1], timestamp_ms=[last_event_ms(repository)]))["sequence"][0, 0]
    degraded = answer(pipeline, [7, 7, 7], after=[sequence, sequence + 1, -1])["degraded"]
    assert degraded[:, 0].tolist() == [0, Degraded.LIVE, 0]


def test_an_answer_after_an_event_of_another_machine_is_degraded(repository, observe, pipeline, tmp_path):
    at_ms = last_event_ms(repository)
    observe(event_inputs(user_id=[7, 8], item_id=[1, 2], timestamp_ms=[at_ms, at_ms]))
    with closing(Observe.load(repository / OBSERVE / "1", tmp_path / "store of another machine")) as other:
        sequence = other(event_inputs(user_id=[7], item_id=[1], timestamp_ms=[at_ms]))["sequence"][0, 0]
    assert answer(pipeline, [7], after=[sequence])["degraded"].tolist() == [[Degraded.LIVE]]


def test_an_answer_after_an_event_is_degraded_without_a_store(pipeline):
    degraded = answer(pipeline, [7, 7], after=[1, -1])["degraded"]
    assert degraded[:, 0].tolist() == [Degraded.LIVE, 0]


def test_a_store_that_cannot_be_read_leaves_the_generations_answers_and_says_so(repository, reader):
    expected = answer(Pipeline.load(repository), [7, 8])
    reader.folder.mkdir(mode=0o700)
    (reader.folder / "data.mdb").write_bytes(b"no database" * 1000)
    found = answer(Pipeline.load(repository, live=reader), [7, 8])
    assert found["item_ids"].tolist() == expected["item_ids"].tolist()
    assert (found["degraded"] & Degraded.LIVE).all()


def test_state_from_events_equals_state_from_an_export_of_the_same_log(tmp_path, reader):
    dataset = shop(tmp_path / "shop", users=12, items=30, events=400)
    log, items = dataset.interactions, ItemIndex(dataset.items["item_id"].to_numpy())
    categories = Codes.of(dataset.items["category"])
    stores = []
    for name, events in (("part", log.iloc[:300]), ("whole", log)):
        part = make_event_log(dataset, events, items, categories, FeatureSettings())
        write_store(tmp_path / name, part, part.profiles.user_ids)
        stores.append(UserStore(tmp_path / name))
    rest, kinds = log.iloc[300:], EventKinds()
    writer = Writer(reader.folder, Layout(), kinds.names, GenerationSeeds(stores[0]), settings=WriterSettings(lateness_s=0))
    times_ms = (rest["timestamp"] * 1000).tolist()
    inputs = event_inputs(user_id=rest["user_id"].tolist(), item_id=rest["item_id"].tolist(), timestamp_ms=times_ms)
    writer.append(EventAdmission(kinds).make_events(inputs, writer.codes, now_ms=0))
    user_ids = np.append(log["user_id"].unique(), 99)
    live, exported = (store.lookup(user_ids) for store in stores)
    users = LiveUsers(reader, items, categories.codes)
    clock_s, _ = users.update(live, np.full(len(user_ids), NO_SEQUENCE), stores[0].as_of_s)
    assert clock_s == stores[1].as_of_s
    for name in ("history_ids", "history_times", "event_count", "first_time", "last_time"):
        assert getattr(live, name).tolist() == getattr(exported, name).tolist(), name
    for name in ("sum_weight", "sum_label"):
        np.testing.assert_allclose(getattr(live, name), getattr(exported, name), atol=1e-6)
    writer.close()


def event(name: bytes, item: int, time_ms: int) -> EventBatch:
    """Return an event of user 1."""
    batch = purchase(1, item, time_ms)
    batch.headers["kind"], batch.headers["flags"] = KINDS.find_code(name), 0
    KINDS.decide(batch.headers)
    return batch


def test_what_a_visitor_viewed_is_the_history_until_the_first_purchase(reader):
    views = EventBatch.join([event(b"view", item, START_MS + 1_000 * place) for place, item in enumerate((3, 5, 3, 4))])
    with closing(Writer(reader.folder, Layout(), KINDS.names)) as writer:
        histories = []
        for batch in (views, purchase(1, 7, START_MS + 9_000)):
            writer.append(batch)
            histories.append(read_history(reader))
    assert histories == [[4, 3, 5], [7]]


def read_history(reader, repeats: bool = False) -> list[int]:
    """Return the history of user 1."""
    state = read_state(reader, repeats)
    n_known = int(np.count_nonzero(state.history_ids[0] != PAD_ID))
    assert (state.history_ids[0, n_known:] == PAD_ID).all()
    assert (np.diff(state.history_times[0, :n_known]) <= 0).all()
    return state.history_ids[0, :n_known].tolist()


def read_state(reader, repeats: bool = False) -> UserState:
    """Return the live state of user 1."""
    users = LiveUsers(reader, ItemIndex(np.arange(100)), np.zeros(101, np.int32), KINDS.interests, repeats)
    state = make_empty_state(np.ones(1, np.int64))
    users.update(state, np.full(1, NO_SEQUENCE), START_MS // 1000)
    return state


def test_what_a_known_user_looks_at_since_the_last_purchase_leads_the_history(reader):
    """Not what is hidden, was viewed before the purchase, or is of a session before this one."""
    with closing(Writer(reader.folder, Layout(), KINDS.names)) as writer:

        def post(name: bytes, item: int, minutes: int) -> None:
            writer.append(event(name, item, START_MS + minutes * 60_000))

        for place, (name, item) in enumerate(((b"purchase", 7), (b"view", 3), (b"purchase", 8), (b"hide", 4), (b"view", 5))):
            post(name, item, place)
        assert read_history(reader) == [5, 8, 7]
        post(b"view", 7, 5)
        post(b"view", 6, 6)
        assert read_history(reader) == [6, 7, 5, 8]
        assert read_history(reader, repeats=True) == [6, 7, 5, 8, 7]
        assert read_state(reader, repeats=True).history_interests.tolist() == [3]
        post(b"view", 9, 35)
        assert read_history(reader) == [9, 6, 7, 8]
        post(b"view", 9, 90)
        assert read_history(reader) == [9, 8, 7]
        post(b"purchase", 9, 91)
        assert read_history(reader) == [9, 8, 7]
        assert read_state(reader).history_interests.tolist() == [0]


def test_an_item_that_is_sold_out_is_in_no_answer_until_it_is_back(pipeline, upsert):
    users = list(range(1, 31))
    shown, counts = np.unique(answer(pipeline, users)["item_ids"], return_counts=True)
    item = int(shown[counts.argmax()])
    upserted(upsert, item, available=False)
    assert item not in answer(pipeline, users)["item_ids"]
    upserted(upsert, item, available=True)
    assert item in answer(pipeline, users)["item_ids"]


def test_an_item_that_was_unavailable_at_export_is_recommended_when_it_arrives(pipeline, upsert):
    """This shop has no such item, so one is withdrawn before the first search."""
    upserted(upsert, 5, available=False)
    upserted(upsert, 5, available=None)
    assert 5 in answer(pipeline, list(range(100, 103)))["item_ids"]


def rank_scores_of(pipeline, users):
    """Return for each user the rank score of each candidate."""
    tensors = pipeline.trace({"user_id": np.array(users).reshape(-1, 1)})
    rows = zip(tensors["candidate_ids"].tolist(), tensors["rank_scores"].tolist(), strict=True)
    return [{item: score for item, score in zip(*row, strict=True) if item != PAD_ID} for row in rows]


def standardise(scores):
    return (scores - scores.mean()) / scores.std()


def test_a_new_item_is_recommended_at_once_and_looks_like_those_of_its_kind(pipeline, upsert, repository):
    users = list(range(1, 31))
    before = rank_scores_of(pipeline, users)
    upserted(upsert, 1_000, title="game number 7", kind="game", category="game", price=3.0)
    after = answer(pipeline, users)
    assert (after["item_ids"][:, :10] == 1_000).any(axis=1).all()
    for row, scores in enumerate(rank_scores_of(pipeline, users)):
        assert len(set(after["item_ids"][row])) == len(after["item_ids"][row])
        assert 1_000 in scores
        old, new = np.array([(before[row][item], score) for item, score in scores.items() if item in before[row]]).T
        # Features are standardised over all candidates, the new one too, which stretches the scores of the others a little.
        assert new.mean() == pytest.approx(old.mean(), abs=0.01)
        assert standardise(new) == pytest.approx(standardise(old), abs=0.01)
    assert np.isfinite(after["scores"]).all()
    assert not (after["degraded"] & (Degraded.RANK | Degraded.RERANK)).any()
    tokens = compute_tokens({"title": "game number 7", "kind": "game", "category": "game"})
    alike = pipeline.stages["retrieve"].content.find_most_alike(tokens, 3)
    assert all((position + 1) % 3 == 2 for position in alike[1:])


def test_a_user_who_bought_the_new_item_is_not_shown_it_again(pipeline, upsert, observe, repository):
    upserted(upsert, 1_000, kind="game", price=3.0)
    assert 1_000 in answer(pipeline, [7])["item_ids"]
    observe(event_inputs(user_id=[7], item_id=[1_000], timestamp_ms=[last_event_ms(repository)]))
    assert 1_000 not in answer(pipeline, [7])["item_ids"]
    assert 1_000 in answer(pipeline, [8])["item_ids"]
    assert pipeline.trace({"user_id": np.array([[7]])})["history_ids"][0, 0] == 1_000


def test_a_new_item_that_is_excluded_or_unavailable_is_not_shown(pipeline, upsert):
    upserted(upsert, 1_000, kind="game", price=3.0)
    exclude = np.full((2, 64), PAD_ID)
    exclude[0, 0] = 1_000
    shown = answer(pipeline, [7, 8], exclude=exclude)["item_ids"]
    assert [1_000 in row for row in shown] == [False, True]
    upserted(upsert, 1_000, available=False)
    assert 1_000 not in answer(pipeline, [7, 8])["item_ids"]


def test_a_price_over_the_cap_moves_an_item_behind_all_others(pipeline, upsert):
    ids = answer(pipeline, [7])["item_ids"][0]
    upserted(upsert, int(ids[0]), price=50.5)
    assert answer(pipeline, [7])["item_ids"][0].tolist()[:3] == ids[1:4].tolist()
    upserted(upsert, int(ids[0]), price=float(ids[0]))  # as in the catalogue
    assert answer(pipeline, [7])["item_ids"][0].tolist() == ids.tolist()


def test_more_new_items_than_free_rows_leave_the_others_as_they_were(pipeline, upsert):
    retrieve = pipeline.stages["retrieve"]
    assert [measurement.value for measurement in retrieve.list_measurements()] == [8]
    for item in range(1_000, 1_012):
        upserted(upsert, item, kind="game", price=3.0)
    shown = set(answer(pipeline, list(range(1, 31)))["item_ids"].ravel().tolist())
    assert shown & set(range(1_000, 1_008))
    assert not shown & set(range(1_008, 1_012))
    assert [measurement.value for measurement in retrieve.list_measurements()] == [0]


def test_an_export_that_keeps_no_rows_free_publishes_no_count_that_would_raise_the_alert(pipeline):
    retrieve = pipeline.stages["retrieve"]
    assert list(replace(retrieve, items=ItemIndex(retrieve.items.ids)).list_measurements()) == []


def test_new_and_changed_items_are_there_after_a_restart(pipeline, upsert, repository):
    upserted(upsert, 1_000, kind="game", price=3.0)
    upserted(upsert, 5, available=False)
    expected = answer(pipeline, [7, 8, 999])
    reader = Reader(find_live_folder(repository))
    again = answer(Pipeline.load(repository, live=reader), [7, 8, 999])
    assert again["item_ids"].tolist() == expected["item_ids"].tolist()
    reader.close()
