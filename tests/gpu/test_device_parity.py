"""The exported networks on an NVIDIA GPU against the CPU. Runs where ONNX Runtime has its CUDA provider."""

import numpy as np
import onnxruntime as ort
import pytest

from serving.contract.generations import read_pinned_generation
from tests.repositories import small_repository

NETWORKS = {"retrieve": "user_tower", "rank": "rank", "rerank": "rerank"}
SIZES = {"requests": 3, "candidates": 50, "places": 20}
pytestmark = pytest.mark.skipif(
    "CUDAExecutionProvider" not in ort.get_available_providers(),
    reason="needs an NVIDIA GPU and onnxruntime-gpu: this onnxruntime has no CUDA provider",
)


@pytest.fixture(scope="module")
def repository():
    return small_repository()


@pytest.mark.parametrize(("stage", "network"), NETWORKS.items())
def test_a_network_computes_the_same_on_the_gpu(repository, stage, network):
    path = repository / stage / str(read_pinned_generation(repository)) / f"{network}.onnx"
    on_gpu = ort.InferenceSession(str(path), providers=["CUDAExecutionProvider"])
    assert on_gpu.get_providers()[0] == "CUDAExecutionProvider"
    on_cpu = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    rng = np.random.default_rng(0)
    feeds = {i.name: rng.random([SIZES.get(d, d) for d in i.shape], np.float32) for i in on_cpu.get_inputs()}
    for cpu, gpu in zip(on_cpu.run(None, feeds), on_gpu.run(None, feeds), strict=True):
        np.testing.assert_allclose(gpu, cpu, rtol=1e-3, atol=1e-3)  # TF32 products on the GPU
