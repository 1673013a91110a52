"""HugeCTR's files of a DLRM: written, read back, and recomputed from the bytes alone."""

import json
import re
import struct
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from export.nvidia.hugectr.dense_file import read_dense_file
from export.nvidia.hugectr.layers import DlrmLayers, check_layers, compute_interaction_width, make_layers
from export.nvidia.hugectr.model import compute_slot_offsets, write_model
from export.nvidia.hugectr.network import Network, write_network
from serving.contract.errors import ArtifactError, ConfigError, ExportError
from tests.unit.hps.oracle import read_sparse

WIDTH, DENSE = 4, 13
ROWS = {"user": 6, "item": 9, "genres": 5}
KEYS_PER_SLOT = {"user": 1, "item": 1, "genres": 3}


def weights(rng: np.random.Generator) -> dict[str, np.ndarray]:
    sizes = {"bottom": [DENSE, 8, WIDTH], "top": [compute_interaction_width(WIDTH, len(ROWS)), 6, 5, 1]}
    arrays = {}
    for name, widths in sizes.items():
        for i, (inputs, outputs) in enumerate(pairwise(widths)):
            arrays[f"{name}{i}.weight"] = (rng.normal(size=(inputs, outputs)) * 1.5 / np.sqrt(inputs)).astype(np.float32)
            arrays[f"{name}{i}.bias"] = rng.normal(size=outputs).astype(np.float32)
    return arrays


def tables(rng: np.random.Generator) -> dict[str, np.ndarray]:
    return {name: rng.normal(size=(rows, WIDTH)).astype(np.float32) for name, rows in ROWS.items()}


@pytest.fixture
def written(tmp_path) -> Path:
    rng = np.random.default_rng(0)
    rows = tables(rng)
    counts = {name: rng.integers(0, 100, len(table)) for name, table in rows.items()}
    write_model(tmp_path, "dlrm", make_layers(weights(np.random.default_rng(1))), rows, KEYS_PER_SLOT, counts)
    return tmp_path


def forward_from_files(folder: Path, dense: np.ndarray, keys: list[list[list[int]]]) -> np.ndarray:
    """Probabilities [B] by walking the JSON and reading the bytes: nothing of the code under test.

    dense float32 [B, 13]; keys: per sample, per slot, the keys (already offset).
    """
    layers = json.loads((folder / "dlrm.json").read_text())["layers"]
    floats = iter(struct.iter_unpack("<f", (folder / "dlrm_dense_0.model").read_bytes()))
    vectors = {key: np.array(vector) for key, vector in read_sparse(folder / "dlrm0_sparse_0.model", WIDTH)}

    def take(n_rows: int, n_columns: int) -> np.ndarray:
        return np.array([[next(floats)[0] for _ in range(n_columns)] for _ in range(n_rows)])

    tensors: dict[str, np.ndarray] = {}
    for layer in layers:
        kind, bottom, top = layer["type"], layer.get("bottom"), layer.get("top")
        if kind == "Data":
            tensors[layer["dense"]["top"]] = dense.astype(np.float64)
        elif kind == "DistributedSlotSparseEmbeddingHash":
            assert layer["sparse_embedding_hparam"]["combiner"] == "mean"
            tensors[top] = np.array([[np.mean([vectors[k] for k in slot], axis=0) for slot in sample] for sample in keys])
        elif kind == "InnerProduct":
            weight = take(tensors[bottom].shape[1], layer["fc_param"]["num_output"])
            tensors[top] = tensors[bottom] @ weight + take(1, layer["fc_param"]["num_output"])
        elif kind == "ReLU":
            tensors[top] = np.maximum(tensors[bottom], 0)
        elif kind == "Interaction":
            tensors[top] = np.array(
                [interact(mlp, rows) for mlp, rows in zip(tensors[bottom[0]], tensors[bottom[1]], strict=True)]
            )
        elif kind == "BinaryCrossEntropyLoss":
            assert bottom[1] == layers[0]["label"]["top"]
            assert next(floats, None) is None
            return 1 / (1 + np.exp(-tensors[bottom[0]][:, 0]))
    raise AssertionError("no loss layer")


def interact(mlp: np.ndarray, rows: Iterable[np.ndarray]) -> list[float]:
    meeting = [mlp, *rows]
    pairs = [float(meeting[i] @ meeting[j]) for j in range(1, len(meeting)) for i in range(j)]
    return [*mlp, *pairs, 0.0]


def sample_inputs(rng: np.random.Generator, n: int) -> tuple[np.ndarray, list[list[list[int]]]]:
    dense = rng.normal(size=(n, DENSE)).astype(np.float32)
    rows = [
        [rng.integers(0, ROWS[slot], rng.integers(1, most + 1)).tolist() for slot, most in KEYS_PER_SLOT.items()]
        for _ in range(n)
    ]
    return dense, rows


def test_files_alone_give_what_the_weights_give(written):
    """The same forward pass, once from the bytes and once with torch from the weights that were written."""
    torch = pytest.importorskip("torch")
    dense, rows = sample_inputs(np.random.default_rng(2), 20)
    first_keys = list(compute_slot_offsets(tables(np.random.default_rng(0))).values())
    assert first_keys == [0, 6, 15]
    keys = [[[first + row for row in slot] for first, slot in zip(first_keys, sample, strict=True)] for sample in rows]
    got = forward_from_files(written, dense, keys)

    arrays = {name: torch.from_numpy(array) for name, array in weights(np.random.default_rng(1)).items()}
    slots = [torch.from_numpy(table) for table in tables(np.random.default_rng(0)).values()]
    hidden = torch.from_numpy(dense)
    for i in range(2):
        hidden = torch.relu(hidden @ arrays[f"bottom{i}.weight"] + arrays[f"bottom{i}.bias"])
    pooled = torch.stack([torch.stack([t[s].mean(0) for t, s in zip(slots, sample, strict=True)]) for sample in rows])
    meeting = torch.cat([hidden[:, None], pooled], dim=1)
    later, earlier = np.tril_indices(meeting.shape[1], -1)
    products = (meeting @ meeting.transpose(1, 2))[:, later, earlier]
    hidden = torch.cat([hidden, products, torch.zeros(len(dense), 1)], dim=1)
    for i in range(3):
        hidden = hidden @ arrays[f"top{i}.weight"] + arrays[f"top{i}.bias"]
        hidden = torch.relu(hidden) if i < 2 else hidden
    expected = torch.sigmoid(hidden[:, 0]).numpy()
    np.testing.assert_allclose(got, expected, atol=1e-6)
    assert expected.std() > 0.02  # the samples differ


def test_the_projects_own_ranker_is_written_and_recomputed(tmp_path):
    """training/models/rankers/dlrm.py: its logits, candidate by candidate, equal the network's written as HugeCTR files."""
    torch = pytest.importorskip("torch")
    from training.models.rankers.dlrm import DLRM, Shape

    torch.manual_seed(0)
    shape = Shape({"user": 6}, {"item": 9, "genres": 5}, user_numbers=8, pair_numbers=5, width=WIDTH, bottom=(8,), top=(6, 5))
    model = DLRM(shape).eval()
    model.network.mean.normal_()
    model.network.scale.uniform_(0.5, 2.0)
    rng = np.random.default_rng(3)
    batch, candidates = 3, 4
    user_numbers, pair_numbers = torch.randn(batch, 8), torch.randn(batch, candidates, 5)
    user = rng.integers(1, 6, batch)
    item, genres = rng.integers(1, 9, (batch, candidates)), rng.integers(1, 5, (batch, candidates, 3))
    slots = [torch.from_numpy(item[..., None]), torch.from_numpy(genres)]
    with torch.no_grad():
        user_rows = model.look_up_users(torch.from_numpy(user[:, None]))
        logits = model.network(user_numbers, user_rows, pair_numbers, model.look_up_items(slots)).numpy()

    model.network.fold()
    rows = {slot: table.array() for slot, table in zip(ROWS, (*model.user_tables, *model.item_tables), strict=True)}
    counts = {slot: np.arange(len(table)) for slot, table in rows.items()}
    first = write_model(tmp_path, "dlrm", make_layers(model.network.collect_layers()), rows, KEYS_PER_SLOT, counts)
    dense = np.concatenate([user_numbers[:, None].expand(-1, candidates, -1), pair_numbers], axis=2).reshape(-1, DENSE)
    keys = [
        [[first["user"] + user[b]], [first["item"] + item[b, c]], [first["genres"] + g for g in genres[b, c]]]
        for b in range(batch)
        for c in range(candidates)
    ]
    got = forward_from_files(tmp_path, dense, keys)
    np.testing.assert_allclose(got, 1 / (1 + np.exp(-logits.ravel())), atol=1e-6)


def test_dense_file_byte_for_byte(written):
    arrays = weights(np.random.default_rng(1))
    expected = b"".join(struct.pack(f"<{array.size}f", *array.ravel().tolist()) for array in arrays.values())
    assert (written / "dlrm_dense_0.model").read_bytes() == expected


def test_network_json(written):
    layers = json.loads((written / "dlrm.json").read_text())["layers"]
    assert [layer["type"] for layer in layers] == [
        "Data",
        "DistributedSlotSparseEmbeddingHash",
        *("InnerProduct", "ReLU") * 2,
        "Interaction",
        *("InnerProduct", "ReLU") * 2,
        "InnerProduct",
        "BinaryCrossEntropyLoss",
    ]
    data, embedding = layers[:2]
    assert data["sparse"] == [{"top": "keys", "nnz_per_slot": [1, 1, 3], "is_fixed_length": False, "slot_num": 3}]
    assert (data["dense"], data["label"]["label_dim"]) == ({"top": "dense", "dense_dim": 13}, 1)
    assert embedding["sparse_embedding_hparam"]["embedding_vec_size"] == 4
    assert embedding["sparse_embedding_hparam"]["max_vocabulary_size_global"] == 20
    produced = {data["dense"]["top"], data["label"]["top"], data["sparse"][0]["top"]}
    for layer in layers[1:]:  # every layer reads what an earlier one gives
        bottoms = layer["bottom"] if isinstance(layer["bottom"], list) else [layer["bottom"]]
        assert set(bottoms) <= produced
        produced.add(layer["top"])


def test_weights_the_wrong_way_round():
    arrays = {name: array.T for name, array in weights(np.random.default_rng(1)).items()}
    with pytest.raises(ExportError, match=r"layer bottom0 has weight \[8, 13\] and bias \[8\].*Transpose torch's weight"):
        make_layers(arrays)


def test_layers_that_do_not_fit():
    layers = make_layers(weights(np.random.default_rng(1)))
    with pytest.raises(ExportError, match=r"layer top0 takes 11 values\. Expected 15, the width of the interaction"):
        check_layers(layers, 4)
    with pytest.raises(ExportError, match=r"layer bottom1 takes 8 values\. Expected 4"):
        check_layers(DlrmLayers((layers.bottom[1], layers.bottom[1]), layers.top), 3)
    with pytest.raises(ExportError, match="1 bottom and 0 top layers"):
        check_layers(DlrmLayers(layers.bottom[:1], ()), 3)
    with pytest.raises(ExportError, match=r"gives 5 values\. Expected one logit"):
        check_layers(DlrmLayers(layers.bottom, layers.top[:-1]), 3)


def test_tables_that_do_not_fit(tmp_path):
    layers = make_layers(weights(np.random.default_rng(1)))
    rows = tables(np.random.default_rng(0))
    counts = {name: np.zeros(len(table)) for name, table in rows.items()}
    with pytest.raises(ExportError, match=r"table item is \[9, 5\]. Expected \[rows, 4\]"):
        write_model(tmp_path, "m", layers, rows | {"item": np.zeros((9, 5))}, KEYS_PER_SLOT, counts)
    with pytest.raises(ExportError, match="slot item lacks its keys per sample or its 9 use counts"):
        write_model(tmp_path, "m", layers, rows, KEYS_PER_SLOT, counts | {"item": np.zeros(8)})
    with pytest.raises(ExportError, match="slot genres lacks"):
        write_model(tmp_path, "m", layers, rows, {"user": 1, "item": 1}, counts)
    assert list(tmp_path.iterdir()) == []


def test_broken_dense_files(written):
    path = written / "dlrm_dense_0.model"
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(ArtifactError, match=re.escape(f"{path} has 1040 bytes. Expected 1044")):
        read_dense_file(path, ((13, 8), (8, 4)), ((11, 6), (6, 5), (5, 1)))
    path.unlink()
    with pytest.raises(ArtifactError, match=r"is missing\. Expected the dense weights"):
        read_dense_file(path, ((13, 8), (8, 4)), ((11, 6), (6, 5), (5, 1)))


@pytest.mark.parametrize(("numbers", "slots"), [(("user.age", "item.brand"), ("user.city",)), (("user.age",), ("item.price",))])
def test_a_column_in_the_wrong_list_of_inputs_is_named(tmp_path, numbers, slots):
    """A slot among the numbers, or a number among the slots."""
    pytest.importorskip("torch")
    from export.nvidia.hugectr.importing import import_dlrm
    from export.nvidia.hugectr.inputs import Inputs, Slot

    ours = Inputs(("user.age", "item.price"), (Slot("user.city", 5, 0), Slot("item.brand", 5, 5)))
    pairs = len(slots) * (len(slots) + 1) // 2
    network = Network(((len(numbers), WIDTH),), ((WIDTH + pairs + 1, 1),), WIDTH, (1,) * len(slots), 10)
    write_network(tmp_path / "dlrm.json", network)
    Inputs(numbers, tuple(Slot(name, 5, 0) for name in slots)).write(tmp_path / "dlrm_inputs.json")
    wrong = {*numbers, *slots} - {"user.age", "user.city"}
    with pytest.raises(
        ConfigError, match=rf"names {wrong.pop()}, which the data set lacks\. Its numbers are user\.age, item\.price"
    ):
        import_dlrm(tmp_path, "dlrm", ours)
