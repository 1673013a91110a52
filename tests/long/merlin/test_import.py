"""A DLRM of HugeCTR's becomes the ranker: taught on what is written for it, by its own script, read back from its files."""

import copy
import io
import json
import runpy
import shutil
import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from rich.console import Console

from export.build import build_repository
from export.nvidia.hugectr.foreign import read_foreign
from export.nvidia.hugectr.importing import find_latest, import_dlrm
from export.nvidia.hugectr.inputs import Inputs, Slot, list_inputs, read_inputs
from export.nvidia.hugectr.network import Network, describe_network
from export.nvidia.pipeline import MerlinPipeline, map_to_host
from export.nvidia.precision.agreement import EXACT
from export.settings import Settings
from export.steps.hugectr_data import write_hugectr_data
from hps_config.reader import read_ps_json
from repository.checks.recorded import RECORDED_FILE, compare_answers, read_recorded
from serving.contract.artifacts import read_stage
from serving.contract.errors import ArtifactError, ConfigError
from serving.contract.tensors import ENSEMBLE, PAD_ID, PAD_ROW
from serving.pipeline import Pipeline
from serving.stages.rank import Rank
from tests.long.merlin import fake_hugectr
from tests.unit.hps.oracle import read_sparse
from tests.unit.hps.test_hugectr import interact
from tests.unit.small_shops import few_resamples, shop
from training.dataset import load_dataset
from training.features.build import build_features
from training.models.rankers.ranking_data import make_served_items

SCRIPT = Path(__file__).parents[3] / "export" / "nvidia" / "hugectr" / "container" / "train_dlrm.py"
TAGS = frozenset({"item.catalogue_tags"})


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    """A shop whose items have a list of tags."""
    folder = tmp_path_factory.mktemp("shop")
    whole = shop(folder / "data", users=30, items=40, events=600)
    tags = [f"{i},{i},{'|'.join(f't{tag}' for tag in range(i % 3 + 1))}" for i in range(1, 41)]
    (folder / "data" / "items.csv").write_text("\n".join(["sku,unit_price,tags", *tags, ""]))
    toml = (folder / "data" / "dataset.toml").read_text()
    (folder / "data" / "dataset.toml").write_text(toml + 'multi_categorical = { tags = "|" }\n')
    assert len(whole.items) == 40
    return load_dataset(folder / "data")


@pytest.fixture(scope="module")
def taught(dataset, tmp_path_factory):
    """Return the folder that the training script leaves. `hugectr` is replaced by a fake."""
    folder = tmp_path_factory.mktemp("hugectr")
    write_hugectr_data(dataset, folder, Settings(), Console(quiet=True))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)  # the script changes it
        patch.setitem(sys.modules, "hugectr", fake_hugectr.module())
        patch.setattr(sys, "argv", ["train_dlrm.py", "--folder", str(folder), "--batch-size", "64"])
        runpy.run_path(str(SCRIPT), run_name="__main__")
    return folder


@pytest.fixture(scope="module")
def features(dataset):
    return build_features(dataset, dataset.interactions)


@pytest.fixture(scope="module")
def ours(features) -> Inputs:
    return list_inputs(features)


@pytest.fixture
def folder(taught, tmp_path):
    """Return a copy that a test may damage."""
    return shutil.copytree(taught, tmp_path / "model")


def from_bytes(folder: Path, numbers: np.ndarray, keys: list[list[list[int]]]) -> np.ndarray:
    """Return the logits that the files give, float64 [N]. numbers: [N, Gu + Gp]; keys: for each row and slot, its keys"""
    layers = json.loads((folder / "dlrm.json").read_text())["layers"]
    weights = iter(np.fromfile(next(folder.glob("dlrm_dense_*.model")), "<f4").astype(np.float64))
    width = layers[1]["sparse_embedding_hparam"]["embedding_vec_size"]
    rows = {key: np.array(row) for key, row in read_sparse(next(folder.glob("dlrm0_sparse_*.model")), width)}
    none = np.zeros(width)
    tensor = numbers.astype(np.float64)
    for layer in layers[2:]:
        if layer["type"] == "InnerProduct":
            n_out = layer["fc_param"]["num_output"]
            weight = np.array([next(weights) for _ in range(tensor.shape[1] * n_out)]).reshape(-1, n_out)
            tensor = tensor @ weight + np.array([next(weights) for _ in range(n_out)])
        elif layer["type"] == "ReLU":
            tensor = np.maximum(tensor, 0)
        elif layer["type"] == "Interaction":
            pooled = [[np.mean([rows.get(k, none) for k in slot] or [none], axis=0) for slot in row] for row in keys]
            tensor = np.array([interact(bottom, slots) for bottom, slots in zip(tensor, pooled, strict=True)])
    assert next(weights, None) is None
    return tensor[:, 0]


class TestTrainingData:
    def test_columns_are_what_the_ranker_reads(self, taught, ours):
        table = pq.read_table(taught / "train" / "0.parquet")
        names = [entry["col_name"] for kind in ("labels", "conts", "cats") for entry in metadata(taught)[kind]]
        assert names == ["label", *(n.replace(".", "_") for n in (*ours.numbers, *(slot.name for slot in ours.slots)))]
        assert table.column_names == names
        assert 0 < table["label"].to_numpy().mean() < 1
        assert metadata(taught)["file_stats"][0] == {"file_name": "0.parquet", "num_rows": table.num_rows}

    def test_keys_lie_in_their_slot(self, taught, ours):
        table = pq.read_table(taught / "train" / "0.parquet")
        for slot in ours.slots:
            keys = fake_hugectr.flat(table[slot.name.replace(".", "_")])
            assert slot.first_key <= keys.min()
            assert keys.max() < slot.first_key + slot.rows
        assert read_inputs(taught / "dlrm_inputs.json") == ours

    def test_slots_do_not_overlap(self, ours, features):
        assert {f"item.{name}" for name in features.item_arrays.lists} == TAGS
        ends = [slot.first_key + slot.rows for slot in ours.slots]
        assert [slot.first_key for slot in ours.slots] == [0, *ends[:-1]]


def metadata(folder: Path) -> dict:
    return json.loads((folder / "train" / "_metadata.json").read_text())


class TestImport:
    def test_the_model_answers_what_its_files_say(self, taught, ours):
        """The rows are those that it was trained on, with lists, and with keys that are new to it."""
        model = import_dlrm(taught, "dlrm", ours, TAGS)
        table = pq.read_table(taught / "train" / "0.parquet").slice(0, 50).to_pydict()
        numbers = np.stack([table[name.replace(".", "_")] for name in ours.numbers], axis=1).astype(np.float32)
        keys = [[as_list(table[slot.name.replace(".", "_")][row]) for slot in ours.slots] for row in range(50)]
        keys[0] = [[slot.first_key + 1] for slot in ours.slots]
        got = answers(model, ours, numbers, keys)
        np.testing.assert_allclose(got, from_bytes(taught, numbers, keys), rtol=1e-4, atol=1e-5)
        assert got.std() > 0.01

    def test_columns_in_another_order_and_not_all_of_them(self, folder, ours):
        """The model was trained on the columns in reverse order, without two numbers and one slot of the user."""
        theirs = fewer(ours)
        retrain(folder, theirs)
        model = import_dlrm(folder, "dlrm", ours, TAGS)
        rng = np.random.default_rng(1)
        numbers = rng.normal(size=(20, len(ours.numbers))).astype(np.float32)
        rows = {slot.name: rng.integers(1, slot.rows, 20) for slot in ours.slots}
        got = answers(model, ours, numbers, [[[s.first_key + int(rows[s.name][r])] for s in ours.slots] for r in range(20)])
        chosen = numbers[:, [ours.numbers.index(name) for name in theirs.numbers]]
        keys = [[[slot.first_key + int(rows[slot.name][row])] for slot in theirs.slots] for row in range(20)]
        np.testing.assert_allclose(got, from_bytes(folder, chosen, keys), rtol=1e-4, atol=1e-5)

    def test_the_latest_snapshot_is_taken(self, tmp_path):
        for iteration in (5, 40, 9):
            (tmp_path / f"dlrm_dense_{iteration}.model").touch()
        assert find_latest(tmp_path, "dlrm_dense_").name == "dlrm_dense_40.model"
        with pytest.raises(ArtifactError, match=r"holds no other_<iteration>\.model"):
            find_latest(tmp_path, "other_")


def as_list(value) -> list[int]:
    return value if isinstance(value, list) else [value]


def answers(model, ours: Inputs, numbers: np.ndarray, keys: list[list[list[int]]]) -> np.ndarray:
    """Return the imported DLRM's logits for rows of one candidate each. Keys become rows of the slots' tables again."""
    longest = max(len(slot) for row in keys for slot in row)
    rows = np.zeros((len(keys), len(ours.slots), longest), np.int64)
    for r, row in enumerate(keys):
        for s, slot in enumerate(row):
            rows[r, s, : len(slot)] = [key - ours.slots[s].first_key for key in slot]
    n_users, n_numbers = len(ours.user_slots), model.shape.user_numbers
    with torch.no_grad():
        user_rows = model.look_up_users(torch.from_numpy(rows[:, :n_users, 0]))
        item_rows = model.look_up_items([torch.from_numpy(rows[:, None, slot]) for slot in range(n_users, len(ours.slots))])
        values = torch.from_numpy(numbers)
        return model.network(values[:, :n_numbers], user_rows, values[:, None, n_numbers:], item_rows)[:, 0].numpy()


def fewer(ours: Inputs) -> Inputs:
    numbers = tuple(reversed(ours.numbers))[2:]
    left_out = next(iter(ours.user_slots))
    slots, first = [], 0
    for slot in reversed(ours.slots):
        if slot.name != left_out:
            slots.append(Slot(slot.name, slot.rows, first))
            first += slot.rows
    return Inputs(numbers, tuple(slots))


def retrain(folder: Path, theirs: Inputs) -> None:
    """Replace the model in `folder` by one with other inputs, and with random weights and rows."""
    rng, width, hidden = np.random.default_rng(2), 4, 6
    n_rows = sum(slot.rows for slot in theirs.slots)
    slots = len(theirs.slots)
    shapes = (((len(theirs.numbers), width),), ((width + slots * (slots + 1) // 2 + 1, hidden), (hidden, 1)))
    document = describe_network(Network(*shapes, width, (1,) * slots, n_rows))
    (folder / "dlrm.json").write_text(json.dumps(document))
    for path in folder.glob("dlrm_dense_*"):
        path.unlink()
    flat = [part for shape in (*shapes[0], *shapes[1]) for part in (rng.normal(size=shape), rng.normal(size=shape[1]))]
    np.concatenate([part.ravel() for part in flat]).astype("<f4").tofile(folder / "dlrm_dense_999.model")
    (folder / "dlrm0_sparse_999.model").mkdir()
    np.arange(n_rows).astype("<i8").tofile(folder / "dlrm0_sparse_999.model" / "key")
    rng.normal(size=(n_rows, width)).astype("<f4").tofile(folder / "dlrm0_sparse_999.model" / "emb_vector")
    for path in folder.glob("dlrm0_sparse_*"):
        if "999" not in path.name:
            shutil.rmtree(path)
    theirs.write(folder / "dlrm_inputs.json")


class TestRefusals:
    def edit_network(self, folder: Path, change) -> Path:
        path = folder / "dlrm.json"
        document = json.loads(path.read_text())
        change(document["layers"])
        path.write_text(json.dumps(document))
        return path

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (
                lambda layers: (
                    layers.insert(3, {"type": "MultiCross", "bottom": "dense", "top": "x"})
                    or layers.insert(3, {"type": "GRU", "bottom": "dense", "top": "y"})
                ),
                r"layers that cannot be imported: GRU, MultiCross\. Expected a DLRM of",
            ),
            (lambda layers: layers.insert(2, copy.deepcopy(layers[1])), "has 2 embedding layers over 1 sparse inputs"),
            (lambda layers: layers[0]["label"].update(label_dim=2), "has 2 labels"),
            (lambda layers: layers[2].update(bottom="elsewhere"), r"layer InnerProduct reads \['elsewhere'\]"),
            (lambda layers: layers.pop(3), "layer InnerProduct reads"),
            (lambda layers: layers[1]["sparse_embedding_hparam"].update(embedding_vec_size=9), "rows have 9"),
            (lambda layers: layers[-2]["fc_param"].update(num_output=3), "the top gives 3 values"),
            (lambda layers: layers.clear(), "is not a network JSON"),
        ],
    )
    def test_networks(self, folder, change, message):
        with pytest.raises(ConfigError, match=message):
            read_foreign(self.edit_network(folder, change))

    def test_a_network_without_interaction(self, folder):
        def cut(layers):
            at = [layer["type"] for layer in layers].index("Interaction")
            layers[at:-1] = []
            layers[-1]["bottom"] = [layers[-2]["top"], "label"]

        with pytest.raises(ConfigError, match="before and after one Interaction"):
            read_foreign(self.edit_network(folder, cut))

    def test_a_missing_network(self, tmp_path):
        with pytest.raises(ConfigError, match="cannot be read"):
            read_foreign(tmp_path / "dlrm.json")

    def test_a_relu_behind_the_logit(self, folder):
        def add(layers):
            logit = layers[-2]["top"]
            layers.insert(-1, {"type": "ReLU", "bottom": logit, "top": "more"})
            layers[-1]["bottom"] = ["more", "label"]

        with pytest.raises(ConfigError, match="ReLUs are missing or too many"):
            read_foreign(self.edit_network(folder, add))

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (lambda raw: raw["numbers"].append("pair.more"), "slots, the network has"),
            (lambda raw: raw["numbers"].__setitem__(0, "pair.none"), "names pair.none, which the data set lacks"),
            (lambda raw: raw["numbers"].__setitem__(0, raw["numbers"][1]), "names a column twice"),
            (lambda raw: raw["slots"][0].update(rows=3), "has 3 rows, the data set's encoding"),
            (lambda raw: raw.pop("slots"), "does not name a model's inputs"),
        ],
    )
    def test_inputs(self, folder, ours, change, message):
        path = folder / "dlrm_inputs.json"
        raw = json.loads(path.read_text())
        change(raw)
        path.write_text(json.dumps(raw))
        with pytest.raises(ConfigError, match=message):
            import_dlrm(folder, "dlrm", ours)

    def test_a_sum_over_lists(self, folder, ours):
        self.edit_network(folder, lambda layers: layers[1]["sparse_embedding_hparam"].update(combiner="sum"))
        with pytest.raises(ConfigError, match=r"slot item\.catalogue_tags holds lists, and the combiner is sum"):
            import_dlrm(folder, "dlrm", ours, TAGS)

    def test_weights_of_another_network(self, folder, ours):
        next(folder.glob("dlrm_dense_*")).write_bytes(b"1234")
        with pytest.raises(ArtifactError, match="has 4 bytes"):
            import_dlrm(folder, "dlrm", ours)


@pytest.fixture(scope="module")
def settings(taught) -> Settings:
    """Settings of an export that serves the imported model."""
    training = {"graph": "never", "teachers": "one"}
    return Settings.model_validate(
        {"hugectr": {"model": str(taught)}, "pipeline": {"recorded_requests": 16}, "training": training}
    )


@pytest.fixture(scope="module")
def repository(dataset, settings, tmp_path_factory) -> Path:
    """An export of the cpu profile, which nobody may change."""
    repository = tmp_path_factory.mktemp("cpu") / "repository"
    with few_resamples():
        build_repository(dataset, repository, settings, Console(quiet=True))
    return repository


def test_nvidias_containers_serve_it_too(dataset, settings, repository, taught, ours, tmp_path):
    """With PROFILE=merlin and the same settings, answers equal the cpu profile's, and `hps` reads HugeCTR's own rows."""
    merlin = tmp_path / "merlin"
    with few_resamples():
        build_repository(dataset, merlin, settings, Console(quiet=True), profile="merlin")
    recorded = read_recorded(repository / ENSEMBLE / "1" / RECORDED_FILE)
    answers = MerlinPipeline(merlin, 1, "/models")(recorded.inputs)
    assert compare_answers(answers, recorded.outputs, EXACT) == ""

    first_keys = read_stage(merlin / "rank_features" / "1").settings["first_keys"]
    params = read_ps_json(merlin / "ps.json").find_model("rank_embeddings")
    (width,) = params.embedding_vecsize_per_table
    served = dict(read_sparse(map_to_host(merlin, "/models", params.sparse_files[0]), width))
    taught_rows = dict(read_sparse(next(taught.glob("dlrm0_sparse_*.model")), width))
    for slot, first in zip(ours.slots[: len(ours.user_slots)], first_keys.values(), strict=False):
        own = [key for key in taught_rows if slot.first_key <= key < slot.first_key + slot.rows]
        assert own
        assert [served[key - slot.first_key + first] for key in own] == [taught_rows[key] for key in own]


def test_an_export_serves_the_imported_model(repository, taught, ours, features):
    """From [hugectr] model in the settings to the answers of the published rank stage to real requests."""
    rank = Rank.load(repository / "rank" / "1")
    recorded = read_recorded(repository / ENSEMBLE / "1" / RECORDED_FILE)
    given = Pipeline.load(repository).trace({name: values[:4] for name, values in recorded.inputs.items()})
    candidates = rank.inputs.items.find_positions(given["candidate_ids"])
    pairs, _ = rank.inputs.compute_pair_inputs(given, candidates)
    got = rank(given)["rank_scores"]
    got = got - np.float32(rank.outputs.blend) * rank.inputs.take_retrieval_part(pairs)

    slots = make_served_items(features).rows
    request, place = np.nonzero(given["candidate_ids"] != PAD_ID)
    numbers = np.concatenate([given["user_continuous"][request], pairs[request, place]], axis=1)
    user_keys = given["user_categorical"][request] + [slot.first_key for slot in ours.slots[: len(ours.user_slots)]]
    keys = []
    for user, item in zip(user_keys.tolist(), candidates[request, place].tolist(), strict=True):
        own = [rows[item][rows[item] != PAD_ROW] for rows in slots]
        firsts = [slot.first_key for slot in ours.slots[len(ours.user_slots) :]]
        keys.append([[key] for key in user] + [(rows + first).tolist() for rows, first in zip(own, firsts, strict=True)])
    np.testing.assert_allclose(got[request, place], from_bytes(taught, numbers, keys), rtol=1e-4, atol=1e-4)


def test_an_export_refuses_a_model_that_is_not_there_before_it_trains(dataset, tmp_path):
    output = Console(record=True, file=io.StringIO())
    settings = Settings.model_validate({"hugectr": {"model": str(tmp_path / "none")}})
    with pytest.raises(ConfigError, match=r"none/dlrm\.json cannot be read"):
        build_repository(dataset, tmp_path / "repository", settings, output)
    phases = output.export_text()
    assert "features" in phases
    assert "sources" not in phases
