"""Aggregations of users follow live events: they equal those of training on the longer log."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import numpy as np
import pandas as pd

from live.erase import erase_user
from serving.contract.artifacts import StageInfo
from serving.contract.tensors import FROM_STORE, NO_SEQUENCE, Axes, Degraded
from serving.live.aggregations import Aggregation
from serving.live.events import Flags
from serving.live.layout import Layout
from serving.live.reader import Reader
from serving.live.writer import Writer
from serving.stages.features.ids import ItemIndex
from serving.stages.features.user_store import UserStore
from serving.stages.live.content import Content
from serving.stages.live.users.user_trends import UserTrends
from serving.stages.preprocess import PreprocessInputs
from tests.unit.live.toy_log import DAY_S, N_EVENTS, N_ITEMS, N_KNOWN, USERS, write
from training.dataset import Dataset
from training.features.aggregates import LogAggregates
from training.features.items import Codes
from training.features.point_in_time import EventLog
from training.features.store import make_profiles, write_store

DECLARED = (
    Aggregation("events_7d", "user", "count", "count", window="7d"),
    Aggregation("amount_long", "user", "amount", "sum", half_life="3d"),
    Aggregation("paid", "user", "price", "last", n=2),
    Aggregation("items_7d", "user", "distinct", "distinct", window="7d"),
)
OTHERS = (Aggregation("events_24h", "user", "count", "count", window="24h"),)
HISTORY = 8


def publish(folder: Path, data: Dataset, log: pd.DataFrame, declared: Sequence[Aggregation]) -> Path:
    """Write the files of a preprocess stage that learned from a log, without its plan."""
    items, aggregates = ItemIndex(10 * np.arange(N_ITEMS)), LogAggregates.of(data, log, declared)
    categories = Codes.of(data.items["category"])
    users = pd.DataFrame({"user_id": np.unique(log["user_id"])})
    events = EventLog(log, items, categories.codes, make_profiles(users, {}), HISTORY, aggregates)
    write_store(folder / "store", events, events.profiles.user_ids)
    np.save(folder / "item_ids.npy", items.ids)
    np.save(folder / "item_category.npy", categories.codes)
    Content.of([{}] * N_ITEMS).save(folder)
    return folder


def start(folder: Path, reader: Reader) -> PreprocessInputs:
    settings = {"interests": [], "repeats": False}
    info = StageInfo("preprocess", 1, Axes(history=HISTORY), settings=settings)
    return PreprocessInputs.load(folder, info).with_live(reader)


def ask(stage: PreprocessInputs) -> tuple[np.ndarray, int]:
    """Return the features of USERS, float32 [22, F], and the clock."""
    inputs = {"user_id": USERS[:, None], "after": np.full((len(USERS), 1), NO_SEQUENCE)}
    state, clock_s, degraded = stage.read_state(inputs | {"history": np.full((len(USERS), HISTORY), FROM_STORE)})
    assert not np.any(degraded)
    return np.stack(list(state.aggregates.values()), axis=1), int(np.min(clock_s))


def expect(data: Dataset, log: pd.DataFrame, declared: Sequence[Aggregation], clock_s: int) -> np.ndarray:
    """Return what training computes of USERS from a log, float32 [22, F]."""
    n_users = len(USERS)
    features = LogAggregates.of(data, log, declared).compute_for_users(
        USERS, np.full(n_users, clock_s), np.full(n_users, len(log))
    )
    return np.stack(list(features.values()), axis=1)


def test_features_equal_those_of_training_on_the_whole_log_also_after_a_restart(tmp_path, toy, toy_log, log_reader):
    folder = publish(tmp_path / "preprocess", toy, toy_log.iloc[:N_KNOWN], DECLARED)
    stage = start(folder, log_reader)
    frozen, clock_s = ask(stage)
    np.testing.assert_allclose(frozen, expect(toy, toy_log.iloc[:N_KNOWN], DECLARED, clock_s), rtol=1e-6)
    for first in range(N_KNOWN, N_EVENTS, 50):
        write(log_reader.folder, toy_log.iloc[first : first + 50])
        followed, clock_s = ask(stage)
    np.testing.assert_allclose(followed, expect(toy, toy_log, DECLARED, clock_s), rtol=1e-6)
    assert (np.nanmax(np.abs(followed - frozen), axis=0) > 0.01).all()
    np.testing.assert_array_equal(ask(start(folder, log_reader))[0], followed)


def test_time_without_events_ages_the_features_of_everybody(tmp_path, toy, toy_log, log_reader):
    stage = start(publish(tmp_path / "preprocess", toy, toy_log.iloc[:N_KNOWN], DECLARED), log_reader)
    later = toy_log.iloc[-1:].assign(timestamp=int(toy_log["timestamp"].iloc[N_KNOWN]) + 5 * DAY_S)
    write(log_reader.folder, later)
    followed, clock_s = ask(stage)
    assert clock_s == later["timestamp"].iloc[0]
    np.testing.assert_allclose(followed, expect(toy, pd.concat([toy_log.iloc[:N_KNOWN], later]), DECLARED, clock_s), rtol=1e-6)


def test_one_store_serves_generations_with_different_declarations(tmp_path, toy, toy_log, log_reader):
    write(log_reader.folder, toy_log.iloc[N_KNOWN:500])
    publish(tmp_path / "first", toy, toy_log.iloc[:N_KNOWN], DECLARED)
    publish(tmp_path / "second", toy, toy_log.iloc[:500], OTHERS)  # has learned these events
    stages = {declared: start(tmp_path / name, log_reader) for name, declared in (("first", DECLARED), ("second", OTHERS))}
    write(log_reader.folder, toy_log.iloc[500:])
    for declared, stage in stages.items():
        followed, clock_s = ask(stage)
        np.testing.assert_allclose(followed, expect(toy, toy_log, declared, clock_s), rtol=1e-6)


def test_an_erased_user_begins_with_what_the_generation_knew(tmp_path, toy, toy_log, log_reader):
    folder = publish(tmp_path / "preprocess", toy, toy_log.iloc[:N_KNOWN], DECLARED)
    write(log_reader.folder, toy_log.iloc[N_KNOWN:])
    with closing(Writer(log_reader.folder, Layout(), ("purchase",))) as writer:
        erase_user(writer, 7)
    followed, clock_s = ask(start(folder, log_reader))
    left = pd.concat([toy_log.iloc[:N_KNOWN], toy_log.iloc[N_KNOWN:].query("user_id != 7")])
    np.testing.assert_allclose(followed, expect(toy, left, DECLARED, clock_s), rtol=1e-6)


def test_events_that_no_generation_learns_from_do_not_count(tmp_path, toy, toy_log, log_reader):
    stage = start(publish(tmp_path / "preprocess", toy, toy_log.iloc[:N_KNOWN], DECLARED), log_reader)
    write(log_reader.folder, toy_log.iloc[N_KNOWN:], Flags(0))
    followed, clock_s = ask(stage)
    np.testing.assert_allclose(followed, expect(toy, toy_log.iloc[:N_KNOWN], DECLARED, clock_s), rtol=1e-6)


def test_of_more_new_users_than_fit_the_latest_ones_are_kept(tmp_path, toy, toy_log, log_reader):
    store = UserStore(publish(tmp_path / "preprocess", toy, toy_log.iloc[:N_KNOWN], DECLARED) / "store")
    trends = UserTrends.of(store, ItemIndex(10 * np.arange(N_ITEMS)), log_reader, new_bytes=0)  # the least: 8,192 users
    assert trends is not None
    user_ids, at_s = 100 + np.arange(9_000), store.as_of_s + 60
    write(log_reader.folder, toy_log.iloc[:1].loc[np.zeros(9_000, int)].assign(user_id=user_ids, timestamp=at_s))
    assert trends.refresh()
    counts = trends.read(user_ids, at_s)[:, 0]
    assert set(counts.tolist()) == {0.0, 1.0}
    assert (np.diff(counts) >= 0).all()  # the forgotten ones came first
    assert counts.sum() > 4_000


def test_an_unreadable_store_is_reported(tmp_path, toy, toy_log):
    folder = publish(tmp_path / "preprocess", toy, toy_log.iloc[:N_KNOWN], DECLARED)
    with closing(Writer(tmp_path / "live", Layout(), ("purchase",), shop="another")):
        pass
    with closing(Reader(tmp_path / "live", shop="toy")) as foreign:
        trends = UserTrends.of(UserStore(folder / "store"), ItemIndex(10 * np.arange(N_ITEMS)), foreign)
        assert trends is not None
        assert not trends.refresh()
        inputs = {
            "user_id": USERS[:1, None],
            "after": np.full((1, 1), NO_SEQUENCE),
            "history": np.full((1, HISTORY), FROM_STORE),
        }
        _, _, degraded = start(folder, foreign).read_state(inputs)
        assert np.all(degraded == Degraded.LIVE)
