"""Recorded requests: what callers send, seeded, written and read back, and a comparison that can fail."""

import numpy as np
import pytest

from export.steps.recording import draw_requests
from repository.checks.recorded import Recorded, compare_answers, read_recorded
from serving.contract.errors import ArtifactError
from serving.contract.tensors import FROM_STORE, PAD_ID, Axes, make_ensemble_spec, make_stage_specs
from training.dataset import load_dataset


@pytest.fixture(scope="module")
def dataset():
    return load_dataset("synthetic:users=60,items=40,events=1000,context=1")


@pytest.fixture(scope="module")
def spec(dataset):
    return make_ensemble_spec(make_stage_specs(Axes(history=6, exclusions=4), dataset.context_columns))


@pytest.fixture(scope="module")
def tensors(dataset, spec):
    return draw_requests(dataset, spec, 400, np.random.default_rng(0))


def test_every_input_is_there_as_the_contract_says(spec, tensors):
    assert tensors.keys() == {tensor.name for tensor in spec.inputs}
    for tensor in spec.inputs:
        assert tensors[tensor.name].shape == (400, *tensor.dims)
        assert tensors[tensor.name].dtype == tensor.numpy_dtype


def test_most_users_are_real_and_a_few_are_strangers(dataset, tensors):
    known = np.isin(tensors["user_id"], dataset.users["user_id"])
    assert 0.9 < known.mean() < 1.0


def test_some_bring_a_history_or_exclude_items(dataset, tensors):
    sessions = (tensors["history"] != FROM_STORE).any(axis=1)
    assert 0.02 < sessions.mean() < 0.25
    assert np.isin(tensors["history"][sessions], [PAD_ID, *dataset.items["item_id"]]).all()
    excluding = tensors["exclude"][(tensors["exclude"] != PAD_ID).any(axis=1)]
    assert len(excluding) > 0
    assert all(len(set(row[row != PAD_ID])) == (row != PAD_ID).sum() for row in excluding)


def test_a_seed_gives_the_same_requests(dataset, spec, tensors):
    again = draw_requests(dataset, spec, 400, np.random.default_rng(0))
    for name, array in tensors.items():
        np.testing.assert_array_equal(again[name], array)


def test_they_read_back_as_written(tensors, tmp_path):
    answers = {"item_ids": np.arange(800).reshape(400, 2), "scores": np.ones((400, 2), np.float32)}
    Recorded(tensors, answers).write(tmp_path / "recorded.npz")
    back = read_recorded(tmp_path / "recorded.npz")
    assert back.inputs.keys() == tensors.keys()
    for name, array in (tensors | answers).items():
        got = (back.inputs | back.outputs)[name]
        assert got.dtype == array.dtype
        np.testing.assert_array_equal(got, array)


def test_a_damaged_file_is_an_artifact_error(tmp_path):
    path = tmp_path / "recorded.npz"
    Recorded({"user_id": np.arange(500).reshape(-1, 1)}, {}).write(path)
    written = path.read_bytes()
    damaged = [written[:place] + bytes([written[place] ^ 0xFF]) + written[place + 1 :] for place in range(100, 400, 20)]
    for content in (b"PK not really", *damaged):
        path.write_bytes(content)
        with pytest.raises(ArtifactError, match="cannot be read"):
            read_recorded(path)


def test_answers_that_differ_are_told_apart():
    one = {"item_ids": np.array([[1, 2], [3, 4]]), "scores": np.array([[2.0, 1.0], [2.0, 1.0]], np.float32)}
    assert compare_answers(one, one) == ""
    swapped = {**one, "item_ids": np.array([[1, 2], [4, 3]])}
    assert compare_answers(swapped, one) == "1 of 2 id lists differ, first request 1"
    assert "scores differ by up to 0.01" in compare_answers({**one, "scores": one["scores"] + np.float32(0.01)}, one)
