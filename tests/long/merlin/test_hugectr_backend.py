"""The ranker for the older `hugectr` backend: what the backend checks, and what its files answer."""

import json

import numpy as np
import pytest
from tritonclient.grpc import model_config_pb2 as pb

from export.nvidia.hugectr.forward import compute_logits, find_slot_rows
from export.nvidia.hugectr_backend import (
    NAME,
    REQUIRED,
    REQUIRED_WITH_CACHE,
    find_config_faults,
    find_entry_faults,
    pair_tensors,
    refuse_foreign,
    write_hugectr_repository,
)
from export.nvidia.pipeline import MerlinPipeline
from export.nvidia.publish import publish_merlin
from export.settings import Settings
from repository.checks.recorded import RECORDED_FILE, read_recorded
from repository.triton.models import read_config
from serving.contract.artifacts import open_network
from serving.contract.errors import ExportError
from serving.stages.parts.models import RankFeatures
from tests.long.merlin.conftest import source_of
from tests.unit.hps.hugectr_files import read_model


@pytest.fixture(scope="module")
def written(cpu, tmp_path_factory):
    folder = tmp_path_factory.mktemp("hugectr") / "repository"
    publish_merlin(source_of(cpu), folder, Settings.model_validate({"merlin": {"hugectr": True}}))
    return folder.with_name("repository.hugectr")


@pytest.fixture
def entry(written):
    return json.loads((written / "ps.json").read_text())["models"][0]


@pytest.fixture
def config(written):
    return read_config(written / NAME / "config.pbtxt")


def backend(folder, entry, config, tensors) -> np.ndarray:
    """Probabilities [N] as the backend computes them: tensors taken apart by its documented layout, rows of its files."""
    slots, dense = int(config.parameters["slots"].string_value), int(config.parameters["des_feature_num"].string_value)
    assert all(array.shape[0] == 1 and array.ndim == 2 for array in tensors.values())
    starts = tensors["ROWINDEX"][0]
    samples = (len(starts) - 1) // slots
    assert len(starts) == samples * slots + 1  # one table: B * slots + 1
    assert tensors["DES"].shape[1] == samples * dense
    assert starts[0] == 0
    assert starts[-1] == tensors["CATCOLUMN"].shape[1]
    assert (np.diff(starts) == 1).all()  # one key per slot
    assert samples <= entry["max_batch_size"]
    layers, table = read_model(folder, NAME)
    keys = tensors["CATCOLUMN"][0].reshape(samples, slots)
    rows = find_slot_rows(np.asarray(table.keys), np.asarray(table.vectors), keys)
    return 1 / (1 + np.exp(-compute_logits(layers, tensors["DES"].reshape(samples, dense), rows)))


def test_the_files_answer_like_the_served_network(written, cpu, exported, entry, config):
    """Real requests of the export: every candidate of each is one sample."""
    recorded = read_recorded(cpu / "recommend" / "1" / RECORDED_FILE)
    inputs = {name: values[:8] for name, values in recorded.inputs.items()}
    given = MerlinPipeline(exported["24.03"], 1, "/models").trace(inputs)["rank_features"]
    step = RankFeatures.load(exported["24.03"] / "rank_features" / "1")
    features = step(given)
    modern = MerlinPipeline(exported["modern"], 1, "/models").trace(inputs)["rank_dense"]
    (expected,) = open_network(cpu / "rank" / "1", "rank").run(["logits"], modern)

    n_users, width = step.info.axes.user_categorical, features["pair_numbers"].shape[1]
    of_user, of_items = features["KEYS"][:, :n_users], features["KEYS"][:, n_users:].reshape(8, width, -1)
    keys = np.concatenate([np.repeat(of_user[:, None], width, axis=1), of_items], axis=2).reshape(8 * width, -1)
    users = np.repeat(modern["user_numbers"][:, None], width, axis=1)
    numbers = np.concatenate([users, features["pair_numbers"]], axis=2).reshape(8 * width, -1)
    got = backend(written / NAME / "1", entry, config, pair_tensors(numbers, keys))
    np.testing.assert_allclose(got, 1 / (1 + np.exp(-expected.ravel())), atol=1e-5)


def test_what_is_written_has_no_fault(entry, config):
    assert [*find_entry_faults(entry), *find_config_faults(config, entry)] == []
    assert entry["network_file"] == f"/models/{NAME}/1/{NAME}.json"
    assert config.backend == "hugectr"


@pytest.mark.parametrize("name", [*REQUIRED, *REQUIRED_WITH_CACHE])
def test_each_key_its_parser_needs(entry, name):
    del entry[name]
    assert list(find_entry_faults(entry)) == [f"ps.json lacks {name}, and its parser stops there"]


def test_without_a_cache_its_keys_are_not_needed(entry):
    bare = {name: value for name, value in entry.items() if name not in REQUIRED_WITH_CACHE} | {"gpucache": False}
    assert list(find_entry_faults(bare)) == []


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (lambda c: setattr(c, "max_batch_size", 1), "they must be equal"),
        (lambda c: c.input.pop(), "the inputs are"),
        (lambda c: setattr(c.instance_group[0], "kind", pb.ModelInstanceGroup.KIND_CPU), "is not KIND_GPU"),
        (lambda c: c.instance_group[0].gpus.append(5), "on GPUs of deployed_device_list"),
        (lambda c: setattr(c.instance_group[0], "count", 9), "9 instances share 2 worker buffers"),
        (lambda c: setattr(c.parameters["gpucache"], "string_value", "false"), "gpucache differs"),
        (lambda c: setattr(c.parameters["hit_rate_threshold"], "string_value", "9"), "hit_rate_threshold is above"),
    ],
)
def test_what_it_compares(entry, config, change, fault):
    change(config)
    assert any(fault in found for found in find_config_faults(config, entry))


def test_faults_stop_the_export(cpu, tmp_path, monkeypatch):
    """Those of a backend that requires a key more."""
    monkeypatch.setattr("export.nvidia.hugectr_backend.REQUIRED", (*REQUIRED, "new_key"))
    with pytest.raises(ExportError, match=r"would not serve rank_hugectr: ps\.json lacks new_key"):
        write_hugectr_repository(source_of(cpu), tmp_path / "hugectr", Settings())


@pytest.mark.parametrize("names", [("notes.txt",), ("ps.json",), ("ps.json", NAME, "mine")])
def test_a_folder_of_somebody_else_is_not_replaced(cpu, tmp_path, names):
    place = tmp_path / "repository.hugectr"
    place.mkdir()
    for name in names:
        (place / name).touch()
    with pytest.raises(ExportError, match=r"repository\.hugectr holds .*Move it away"):
        publish_merlin(source_of(cpu), tmp_path / "repository", Settings.model_validate({"merlin": {"hugectr": True}}))
    assert sorted(path.name for path in place.iterdir()) == sorted(names)
    assert not (tmp_path / "repository").exists()


def test_an_older_export_is_replaced(cpu, tmp_path):
    for _ in range(2):
        publish_merlin(source_of(cpu), tmp_path / "repository", Settings.model_validate({"merlin": {"hugectr": True}}))
    assert sorted(path.name for path in (tmp_path / "repository.hugectr").iterdir()) == ["ps.json", NAME]


def test_a_file_in_its_place(tmp_path):
    (tmp_path / "repository.hugectr").touch()
    with pytest.raises(ExportError, match=r"holds repository\.hugectr"):
        refuse_foreign(tmp_path / "repository.hugectr")
