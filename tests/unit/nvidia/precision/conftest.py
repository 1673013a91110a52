"""The project's own networks, untrained, with batches to feed them."""

import numpy as np
import onnx
import pytest
import torch

from export.nvidia.precision.calibration import halve_lists
from training.models.rankers.dlrm import Network, Shape
from training.models.rankers.dlrm_graph import export_dlrm
from training.models.rankers.reranker import ListNetwork
from training.models.rankers.reranker_graph import export_reranker

REQUESTS, CANDIDATES = 4, 10
SHAPE = Shape({"user": 9, "country": 5}, {"item": 9}, user_numbers=3, pair_numbers=4, width=8, bottom=(16,), top=(32, 16))


def batch_for_ranker(rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Numbers on very different scales, as raw features are; rows as small as table rows."""
    scales = np.array([30.0, 1.0, 0.01, 1.0])
    arrays = {
        "user_numbers": rng.normal(size=(REQUESTS, 3)),
        "user_rows": 0.1 * rng.normal(size=(REQUESTS, 2, 8)),
        "pair_numbers": scales * rng.normal(size=(REQUESTS, CANDIDATES, 4)),
        "item_rows": 0.1 * rng.normal(size=(REQUESTS, CANDIDATES, 1, 8)),
    }
    return {name: values.astype(np.float32) for name, values in arrays.items()}


def batch_for_lists(rng: np.random.Generator) -> dict[str, np.ndarray]:
    arrays = {
        "features": rng.normal(size=(REQUESTS, CANDIDATES, 5)),
        "vectors": 0.1 * rng.normal(size=(REQUESTS, CANDIDATES, 6)),
        "valid": np.ones((REQUESTS, CANDIDATES)),
    }
    return {name: values.astype(np.float32) for name, values in arrays.items()}


@pytest.fixture(scope="module")
def ranker(tmp_path_factory) -> tuple[onnx.ModelProto, list]:
    torch.manual_seed(0)
    rng, network = np.random.default_rng(0), Network(SHAPE)
    feeds = [batch_for_ranker(rng) for _ in range(8)]
    network.mean += torch.from_numpy(np.concatenate([feeds[0]["user_numbers"].mean(0), feeds[0]["pair_numbers"].mean((0, 1))]))
    network.scale /= torch.tensor([1.0, 1.0, 1.0, 30.0, 1.0, 0.01, 1.0])
    network.fold()
    path = tmp_path_factory.mktemp("onnx") / "rank.onnx"
    export_dlrm(network, feeds[0], path)
    return onnx.load(str(path)), feeds


@pytest.fixture(scope="module")
def reranker(tmp_path_factory) -> tuple[onnx.ModelProto, list]:
    torch.manual_seed(0)
    rng, network = np.random.default_rng(0), ListNetwork(6, 8)
    torch.nn.init.normal_(network.leave.weight, std=0.1)
    feeds = [batch_for_lists(rng) for _ in range(4)]
    feeds += [halve_lists(feed) for feed in feeds]
    path = tmp_path_factory.mktemp("onnx") / "rerank.onnx"
    export_reranker(network, feeds[0], path)
    return onnx.load(str(path)), feeds
