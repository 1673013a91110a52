"""DLRM, arranged per request, against a plain one over one flat row per pair in HugeCTR's layer order."""

import tracemalloc

import numpy as np
import onnxruntime as ort
import pytest
import torch

from serving.contract.errors import ExportError
from serving.contract.tensors import OOV_ROW, PAD_ROW
from serving.stages.features.encode import Ragged
from training.models.parity import compare
from training.models.rankers.dlrm import DLRM, Shape
from training.models.rankers.dlrm_graph import export_dlrm
from training.models.rankers.embedding import Table
from training.models.rankers.ranking_data import ItemLists, ItemSlots
from training.models.rankers.save_ranker import take_vectors
from training.models.rankers.train_ranker import look_up_items

SHAPE = Shape({"a": 6, "b": 9}, {"c": 5, "d": 7, "e": 8}, user_numbers=3, pair_numbers=4, width=8, bottom=(10,), top=(12, 6))


def random_network(seed=0, shape=SHAPE):
    torch.manual_seed(seed)
    network = DLRM(shape).network.eval()
    network.mean.normal_()
    network.scale.uniform_(0.5, 2.0)
    return network


def random_inputs(requests, candidates, seed=1, shape=SHAPE):
    rng = np.random.default_rng(seed)
    sizes = {
        "user_numbers": (requests, shape.user_numbers),
        "user_rows": (requests, len(shape.user_tables), shape.width),
        "pair_numbers": (requests, candidates, shape.pair_numbers),
        "item_rows": (requests, candidates, len(shape.item_tables), shape.width),
    }
    return {name: rng.normal(size=size).astype(np.float32) for name, size in sizes.items()}


def run(network, inputs):
    with torch.no_grad():
        return network(*(torch.from_numpy(values) for values in inputs.values())).numpy()


def plain_dlrm(layers, user_numbers, user_rows, pair_numbers, item_rows):
    """One (user, candidate) pair, written from HugeCTR's description of InnerProduct, ReLU and Interaction."""

    def mlp(values, name, last_relu):
        count = sum(key.startswith(name) and key.endswith("weight") for key in layers)
        for layer in range(count):
            values = values @ layers[f"{name}{layer}.weight"].astype(np.float64) + layers[f"{name}{layer}.bias"]
            if layer < count - 1 or last_relu:
                values = np.maximum(values, 0.0)
        return values

    dense = mlp(np.concatenate([user_numbers, pair_numbers]), "bottom", last_relu=True)
    rows = [dense, *user_rows, *item_rows]
    dots = [rows[i] @ rows[j] for j in range(1, len(rows)) for i in range(j)]
    return mlp(np.concatenate([dense, dots, [0.0]]), "top", last_relu=False)[0]


def test_logits_equal_a_plain_dlrm_with_the_layers_weights():
    network, inputs = random_network(), random_inputs(requests=3, candidates=4)
    network.fold()
    layers, logits = network.collect_layers(), run(network, inputs)
    for request in range(3):
        for candidate in range(4):
            expected = plain_dlrm(
                layers,
                inputs["user_numbers"][request],
                inputs["user_rows"][request],
                inputs["pair_numbers"][request, candidate],
                inputs["item_rows"][request, candidate],
            )
            np.testing.assert_allclose(logits[request, candidate], expected, rtol=1e-4, atol=1e-5)


def test_layers_have_the_widths_of_the_reference_workload():
    shape = Shape(dict.fromkeys("abcde", 4), dict.fromkeys("fghijk", 4), user_numbers=3, pair_numbers=2)
    weights = {
        name: array.shape for name, array in random_network(shape=shape).collect_layers().items() if name.endswith("weight")
    }
    assert list(weights.items()) == [
        ("bottom0.weight", (5, 64)),
        ("bottom1.weight", (64, 16)),
        ("top0.weight", (16 + 66 + 1, 128)),
        ("top1.weight", (128, 64)),
        ("top2.weight", (64, 1)),
    ]


def test_folding_changes_no_logit():
    network, inputs = random_network(), random_inputs(2, 5)
    before = run(network, inputs)
    for _ in range(2):  # folding again changes nothing either
        network.fold()
        np.testing.assert_allclose(run(network, inputs), before, rtol=1e-4, atol=1e-5)


def test_onnx_agrees_at_any_number_of_requests_and_candidates(tmp_path):
    network, path = random_network(), tmp_path / "rank.onnx"
    network.fold()
    parity = export_dlrm(network, random_inputs(3, 4), path)
    assert (parity.network, parity.values) == ("rank", 12)
    session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    for requests, candidates in ((1, 1), (1, 9), (32, 2)):
        inputs = random_inputs(requests, candidates, seed=requests)
        np.testing.assert_allclose(session.run(["logits"], inputs)[0], run(network, inputs), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("n_user", "n_item"), [(1, 1), (6, 1), (1, 4)])
@pytest.mark.parametrize("layers", [{"bottom": (), "top": (5,)}, {"bottom": (7, 6), "top": (9, 8, 3)}], ids=["shallow", "deep"])
@pytest.mark.parametrize("folded", [True, False], ids=["folded", "standardising"])
def test_the_graph_is_the_network_whatever_its_shape(tmp_path, n_user, n_item, layers, folded):
    user_tables, item_tables = ({f"{side}{n}": 5 for n in range(count)} for side, count in (("u", n_user), ("i", n_item)))
    shape = Shape(user_tables, item_tables, user_numbers=2, pair_numbers=3, width=4, **layers)
    network = random_network(shape=shape)
    if folded:
        network.fold()
    assert export_dlrm(network, random_inputs(3, 5, shape=shape), tmp_path / "rank.onnx").max_rel < 1e-5


def test_a_network_that_onnx_computes_differently_is_refused(tmp_path):
    network, inputs, path = random_network(), random_inputs(2, 3), tmp_path / "rank.onnx"
    network.fold()
    export_dlrm(network, inputs, path)
    with pytest.raises(ExportError, match=r"rank\.onnx differs from the trained network by .*expected at most 1e-04"):
        compare(path, inputs, run(network, inputs) + 0.1, limit=1e-4)
    with pytest.raises(ExportError, match="differs"):
        compare(path, inputs, np.full((2, 3), np.nan, np.float32), limit=1e-4)
    for rows, columns in ((1, 3), (2, 2), (6, 1)):  # the first would be broadcast
        with pytest.raises(ExportError, match=rf"rank\.onnx returns \[2, 3\], the trained network \[{rows}, {columns}\]"):
            compare(path, inputs, np.resize(run(network, inputs), (rows, columns)), limit=1e-4)
    one_apart = run(network, inputs) + np.eye(2, 3, dtype=np.float32)[:, ::-1] * [[0.1], [0.0]]
    assert compare(path, inputs, one_apart, limit=1e-4, share=0.8).max_abs == pytest.approx(0.1, rel=1e-3)
    with pytest.raises(ExportError, match="differs"):
        compare(path, inputs, one_apart, limit=1e-4, share=0.9)


def test_a_table_gives_means_of_lists_and_zeros_for_padding():
    torch.manual_seed(0)
    table = Table(6, 4)
    vectors = table.array()
    lists = torch.tensor([[3, 5, PAD_ROW], [4, PAD_ROW, PAD_ROW], [PAD_ROW, PAD_ROW, PAD_ROW]])
    pooled = table(lists).detach().numpy()
    np.testing.assert_allclose(pooled, [(vectors[3] + vectors[5]) / 2, vectors[4], np.zeros(4)], atol=1e-6)
    np.testing.assert_array_equal(table(lists[:, :1]).detach().numpy(), vectors[[3, 4, PAD_ROW]])


def test_rows_that_few_examples_teach_share_the_vector_of_unseen_values():
    torch.manual_seed(0)
    table = Table(6, 4)
    own = table.array().copy()
    table.share_rare(np.array([0, 0, 9, 10, 9, 50]), at_least=10)
    expected = own[[PAD_ROW, OOV_ROW, OOV_ROW, 3, OOV_ROW, 5]]
    np.testing.assert_array_equal(table.array(), expected)
    np.testing.assert_array_equal(table(torch.arange(6)[:, None]).detach().numpy(), expected)


def test_lists_of_items_read_as_padded_rows_and_take_no_more_memory_than_their_values():
    lists = ItemLists.of(Ragged(np.array([3, 5, 11, 3, 4, 6]), np.array([0, 2, 2, 5, 6])))
    padded = np.array([[3, 5, 0], [0, 0, 0], [11, 3, 4], [6, 0, 0]])
    assert lists.shape == padded.shape
    items = np.array([[0, 3], [1, 2]])
    np.testing.assert_array_equal(lists[items], padded[items])
    np.testing.assert_array_equal(lists[:], padded)
    table = Table(12, 4)
    np.testing.assert_array_equal(take_vectors(table, lists), take_vectors(table, padded))
    assert ItemLists.of(Ragged(np.empty(0, np.int64), np.zeros(3, np.int64)))[:].tolist() == [[0], [0]]
    assert lists[np.array([1, 3])].tolist() == [[0], [6]]
    long = np.append(np.ones(4_096), 50_000).astype(np.int64)
    lists = ItemLists.of(Ragged(np.full(long.sum(), 3), np.append(0, np.cumsum(long))))
    assert lists[np.array([0, 4_096])].shape == (2, 50_000)
    tracemalloc.start()
    vectors, (_, peak) = take_vectors(table, lists), tracemalloc.get_traced_memory()
    tracemalloc.stop()
    np.testing.assert_allclose(vectors, np.tile(table.array()[3], (4_097, 1)), atol=1e-4)  # a float32 mean of 50,000
    assert peak < 20_000_000  # not 1.6 GB, which 4,097 rows of 50,000 take


def test_rows_of_items_with_lists_are_those_of_each_position_and_learn_the_same():
    torch.manual_seed(0)
    model = DLRM(Shape({"user": 4}, {"item": 9, "tags": 12}, 1, 1, width=3))
    tags = np.array([[3, 5, 0], [4, 0, 0], [0, 0, 0], [11, 3, 4], [0, 0, 0]])
    items = ItemSlots(("item", "tags"), (np.array([[3], [4], [5], [6], [0]]), tags), np.zeros((5, 1)), np.zeros((5, 0)))
    positions = np.array([[0, 3, 0, 4], [2, 1, 3, 3]])
    expected = model.look_up_items([torch.from_numpy(rows[positions]) for rows in items.rows])
    assert torch.equal(look_up_items(model, items, positions), expected)
    gradients = []
    for rows in (expected, look_up_items(model, items, positions)):
        model.zero_grad()
        rows.square().sum().backward()
        gradients.append(torch.cat([parameter.grad for parameter in model.list_table_rows() if parameter.grad is not None]))
    torch.testing.assert_close(*gradients)
