"""The stage: what it serves equals what training sees, for every user; and what it does with odd requests."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from serving.contract.artifacts import StageInfo
from serving.contract.errors import ArtifactError, DependencyError
from serving.contract.ids import session_id
from serving.contract.tensors import FROM_STORE, MISSING_INT, OOV_ROW, PAD_ID, Axes, Degraded
from serving.stages.features.user_files import UserFiles
from serving.stages.features.user_store import SeenItems, UserStore
from serving.stages.live.content import Content
from serving.stages.preprocess import MAX_STRING_BYTES, Preprocess
from training.dataset import load_dataset, split_log
from training.features import FeatureSettings, build_features

H = 8


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """(features, folder) of a small shop with users, context and histories."""
    dataset = load_dataset("synthetic:users=80,items=60,events=2500,seed=3,context=1")
    train, _ = split_log(dataset.interactions)
    features = build_features(dataset, train, FeatureSettings(history_length=H))
    folder = tmp_path_factory.mktemp("preprocess")
    publish(features, folder)
    info(features).write(folder)
    return features, folder


def publish(features, folder: Path) -> None:
    features.save_preprocess(folder)
    Content.of([{}] * features.items.n_items).save(folder)


def info(features, **axes) -> StageInfo:
    plan = features.user_plan
    sizes = {"history": H, "user_categorical": len(plan.categorical), "user_continuous": len(plan.continuous)} | axes
    return StageInfo("preprocess", 7, Axes(**sizes), features.context, {"interests": [], "repeats": False})


def request(stage: Preprocess, user_ids, **tensors) -> dict[str, np.ndarray]:
    """Inputs for user ids, absent tensors filled as the adapter fills them."""
    filled = stage.info.spec.fill_optional(len(user_ids))
    return filled | {"user_id": np.array(user_ids, np.int64)[:, None]} | tensors


def test_served_features_are_the_trained_ones(exported):
    features, folder = exported
    stage = Preprocess.load(folder)
    user_ids = np.append(features.seen.user_ids, [-1, -(2**63), 2**63 - 1])
    rng = np.random.default_rng(0)
    n_users = len(user_ids)
    context = {
        "store": rng.choice([MISSING_INT, 0, 1, 5, 10**12], n_users),
        "device": rng.choice(np.array(["phone", "till", "", "unheard of"], object), n_users),
        "temperature": rng.choice(np.array([np.nan, -3.5, 0.1, 3e38], np.float32), n_users),
    }
    sent = {name: values[:, None] for name, values in context.items()}
    sent["device"] = np.array([[text.encode()] for text in context["device"]], object)
    outputs = stage(request(stage, user_ids, **sent))
    expected = features.encode_users(user_ids, context | {"temperature": context["temperature"].astype(np.float64)})
    np.testing.assert_array_equal(outputs["user_categorical"], expected.user_categorical)
    np.testing.assert_array_equal(outputs["user_continuous"], expected.user_continuous)
    np.testing.assert_array_equal(features.items.find_positions(outputs["history_ids"]), expected.history_positions)
    np.testing.assert_array_equal(outputs["history_age_days"], expected.history_age_days)


def test_texts_of_the_context_are_read_as_those_of_the_log(exported):
    stage = Preprocess.load(exported[1])
    sent = [
        b"phone",
        b" phone ",
        "\u00a0phone\u3000".encode(),
        b"",
        b"NULL",
        b" N/A",
        "\u00a0".encode(),
        b"phone\xa0",
        b"never",
    ]
    rows = stage(request(stage, [1] * len(sent), device=np.array(sent, object)[:, None]))["user_categorical"]
    np.testing.assert_array_equal(rows, rows[[0, 0, 0, 3, 3, 3, 3, 8, 8]])
    assert all((rows[one] != rows[other]).any() for one, other in ((0, 3), (0, 8), (3, 8)))


def test_outputs_are_the_contract_s_tensors(exported):
    stage = Preprocess.load(exported[1])
    inputs = request(stage, [1, 2, 3])
    outputs = {"user_id": inputs["user_id"]} | stage(inputs)
    assert outputs.keys() == {tensor.name for tensor in stage.info.spec.output_fields}
    for tensor in stage.info.spec.output_fields:
        assert (outputs[tensor.name].dtype, outputs[tensor.name].shape) == (tensor.numpy_dtype, (3, *tensor.dims))
    assert (outputs["lineage"][:, :2] == (7, 0)).all()


def test_a_row_s_answer_does_not_depend_on_its_batch(exported):
    features, folder = exported
    stage = Preprocess.load(folder)
    user_ids = features.seen.user_ids[:40]
    together = stage(request(stage, user_ids))
    for row, user_id in enumerate(user_ids):
        alone = stage(request(stage, [user_id]))
        for name in together:
            np.testing.assert_array_equal(alone[name][0], together[name][row], err_msg=name)


def test_unknown_users_are_cold_not_refused(exported):
    stage = Preprocess.load(exported[1])
    inputs = request(stage, [-1, 2**63 - 1, MISSING_INT + 1])
    assert stage.find_faults(inputs) == {}
    outputs = stage(inputs)
    assert (outputs["history_ids"] == PAD_ID).all()
    assert (outputs["user_categorical"][:, 0] == OOV_ROW).all()
    assert np.isfinite(outputs["user_continuous"]).all()


def test_a_history_of_the_request_comes_first(exported):
    features, folder = exported
    stage = Preprocess.load(folder)
    first, second = features.items.ids[:2]
    history = np.full((3, H), PAD_ID)
    history[0, :3] = [second, 10**15, first]
    history[1] = FROM_STORE
    known = features.seen.user_ids[0]
    outputs = stage(request(stage, [known] * 3, history=history))
    from_store = stage(request(stage, [known]))
    assert outputs["history_ids"][0].tolist() == [second, first, *[PAD_ID] * (H - 2)]
    assert not outputs["history_age_days"][0].any()
    np.testing.assert_array_equal(outputs["history_ids"][1], from_store["history_ids"][0])
    assert (outputs["history_ids"][2] == PAD_ID).all()  # an empty history is a history


def test_unknown_users_and_items_are_counted(exported):
    """A session counts as its items, of which the catalogue lacks one; a stored history names known items alone."""
    features, folder = exported
    stage = Preprocess.load(folder)
    known, unknown = features.seen.user_ids[0], -1
    history = np.full((3, H), FROM_STORE)
    history[0] = [features.items.ids[0], 10**15, *[PAD_ID] * (H - 2)]
    outputs = stage(request(stage, [unknown, unknown, known], history=history))
    n_stored = int((outputs["history_ids"][2] != PAD_ID).sum())
    assert n_stored
    found = {measured.name: measured.value for measured in stage.list_measurements()}
    assert found == {
        "recommender_unknown_users_total": 1,
        "recommender_history_items_total": 2 + n_stored,
        "recommender_unknown_history_items_total": 1,
    }


class BrokenStore:
    def lookup(self, user_ids: np.ndarray):
        raise DependencyError("the store is down")


def test_a_store_that_is_down_serves_cold_users_and_says_so(exported):
    features, folder = exported
    stage = Preprocess.load(folder)
    cold = stage(request(stage, [-1]))
    stage.inputs.store = BrokenStore()
    outputs = stage(request(stage, features.seen.user_ids[:2]))
    assert (outputs["lineage"][:, 1] == Degraded.PREPROCESS).all()
    np.testing.assert_array_equal(outputs["user_continuous"], np.repeat(cold["user_continuous"], 2, axis=0))
    assert (outputs["history_ids"] == PAD_ID).all()


def test_infinite_context_and_long_strings_are_faults_of_their_rows(exported):
    stage = Preprocess.load(exported[1])
    inputs = request(stage, [1, 2, 3, 4])
    inputs["temperature"] = np.array([[1.0], [np.inf], [np.nan], [-np.inf]], np.float32)
    inputs["device"] = np.array([[b"phone"], [b""], [b"x" * (MAX_STRING_BYTES + 1)], [b"x" * MAX_STRING_BYTES]], object)
    faults = stage.find_faults(inputs)
    assert faults.keys() == {1, 2, 3}
    assert "temperature is infinite" in faults[1]
    assert "device has 1025 bytes; expected at most 1024" in faults[2]


def test_stage_json_must_agree_with_plan_and_store(exported, tmp_path):
    features = exported[0]
    publish(features, tmp_path)
    info(features, history=H + 1).write(tmp_path)
    with pytest.raises(ArtifactError, match="plan and store have"):
        Preprocess.load(tmp_path)


@pytest.mark.parametrize("lost", ["store/event_ids.npy", "store/store.json", "plan/plan.json", "item_category.npy"])
def test_a_missing_file_is_refused(exported, tmp_path, lost):
    features = exported[0]
    publish(features, tmp_path)
    info(features).write(tmp_path)
    (tmp_path / lost).unlink()
    with pytest.raises(ArtifactError, match=lost.split("/")[-1].removesuffix(".npy")):
        Preprocess.load(tmp_path)


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("event_offsets", lambda array: array + 10**12, "does not divide the"),
        ("event_offsets", lambda array: array + 1, "does not divide the"),  # the last event is nobody's
        ("event_offsets", lambda array: array - 1, "does not divide the"),
        ("event_offsets", lambda array: array[::-1], "does not divide the"),
        ("event_offsets", lambda array: array[:-1], r"holds int64 .*; expected int64 \[\d+\]"),
        ("event_ids", lambda array: array[:5], r"event_times\.npy holds int64 .*; expected int64 \[5\]"),
        ("event_categories", lambda array: array[:5], r"event_categories\.npy holds int32 \[5\]"),
        ("event_times", lambda array: array.astype(np.float64), "holds float64 .*; expected int64"),
        ("event_count", lambda array: array[:5], r"event_count\.npy holds int64 \[5\]"),
        ("sum_weight", lambda array: array.astype(np.float32), "holds float32 .*; expected float64"),
        ("user_ids", lambda array: array[::-1], "is not ascending; expected ids in ascending order"),
        ("profile.0", lambda array: array[:5], r"profile\.0\.npy holds .* \[5\]"),
        ("profile.0", lambda array: array + 1_000, r"profile\.0\.npy holds values from 1000"),
    ],
)
def test_a_broken_store_is_refused(exported, tmp_path, name, change, said):
    exported[0].save_preprocess(tmp_path)
    path = tmp_path / "store" / f"{name}.npy"
    np.save(path, change(np.load(path)))
    with pytest.raises(ArtifactError, match=said):
        UserStore(tmp_path / "store")


def test_store_arrays_are_mapped_not_copied(exported, tmp_path):
    exported[0].save_preprocess(tmp_path)
    store = UserStore(tmp_path / "store")
    assert isinstance(store.user_ids.base, np.memmap)
    assert f"{tmp_path}/store/event_ids.npy" in Path("/proc/self/maps").read_text()


def test_empty_state_is_that_of_an_unknown_user(exported):
    store = UserStore(exported[1] / "store")
    user_ids = np.array([-5, -6])
    empty, unknown = store.make_empty(user_ids), store.lookup(user_ids)
    for field in dataclasses.fields(empty):
        wanted, got = getattr(unknown, field.name), getattr(empty, field.name)
        if field.name == "profile":
            assert wanted.keys() == got.keys()
            continue
        np.testing.assert_array_equal(wanted, got, err_msg=field.name)


def test_the_files_alone_give_the_state_of_the_store(exported):
    store, files = UserStore(exported[1] / "store"), UserFiles.open(exported[1] / "store")
    user_ids = np.concatenate([store.user_ids[::-1], [-5, store.user_ids[-1] + 1], store.user_ids[:1]])
    wanted, got = store.lookup(user_ids), files.lookup(user_ids)
    assert got.event_count.any()
    for name, values in got._asdict().items():
        np.testing.assert_array_equal(values, getattr(wanted, name), err_msg=name)


@pytest.mark.parametrize("hours", [48.0, 0.0])
def test_a_generation_remembers_users_for_ever_and_sessions_for_hours(tmp_path, hours):
    """An archive that is kept for ever would otherwise give every generation more and more visitors who never come back."""
    shop = load_dataset("synthetic:users=60,items=60,events=1500,seed=3,context=1")
    end_s = int(shop.interactions["timestamp"].max())
    visits, users = shop.interactions.copy(), shop.users.copy()
    visits.loc[visits["user_id"] == 7, "timestamp"] = end_s - 3_600
    visits = visits.sort_values("timestamp", kind="stable", ignore_index=True)
    for frame in (visits, users):
        frame["user_id"] = frame["user_id"].where(
            frame["user_id"] % 2 == 0, frame["user_id"].map(lambda each: session_id(str(each)))
        )
    shop = dataclasses.replace(shop, interactions=visits, users=users.sort_values("user_id", ignore_index=True))
    features = build_features(shop, visits, FeatureSettings(history_length=H, session_hours=hours))
    features.save_preprocess(tmp_path)
    features.seen.save(tmp_path)
    store, seen, last_s = UserStore(tmp_path / "store"), SeenItems.load(tmp_path), visits.groupby("user_id")["timestamp"].max()
    expected = {user for user, at_s in last_s.items() if user > 0 or not hours or at_s >= end_s - 3_600 * hours}
    assert session_id("7") in expected
    sessions = features.encode_users(last_s.index.to_numpy()[last_s.index < 0]).user_categorical[:, 0]
    assert len(set(sessions.tolist())) == 1
    assert sessions[0] > OOV_ROW
    assert (len(expected) < len(last_s)) == bool(hours)
    assert set(seen.user_ids.tolist()) == expected
    for user_id, log in visits.groupby("user_id"):
        state, stored = store.lookup(np.array([user_id])), features.encode_users(np.array([user_id]))
        assert state.event_count.tolist() == [len(log) if user_id in expected else 0]
        if user_id in expected:
            row = int(np.searchsorted(seen.user_ids, user_id))
            assert set(seen.item_ids[seen.offsets[row] : seen.offsets[row + 1]].tolist()) == set(log["item_id"])
            assert features.items.find_positions(state.history_ids).tolist() == stored.history_positions.tolist()
            profiles = features.log.profiles
            profile = profiles.take_columns(profiles.find_positions(np.array([user_id])))
            assert {name: str(values) for name, values in state.profile.items()} == {
                name: str(values) for name, values in profile.items()
            }
