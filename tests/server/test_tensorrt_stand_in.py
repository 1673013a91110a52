"""A TensorRT model on a machine without TensorRT: the start script's own fallback, served by a real tritonserver."""

import subprocess
import sys

import numpy as np
import onnxruntime as ort
import tritonclient.grpc as grpcclient

from export.nvidia.tensorrt import build_engines
from tests.unit.nvidia.tensorrt.conftest import publish


def test_a_model_without_an_engine_is_served_by_onnx_runtime_and_answers_alike(tmp_path, launch):
    version = publish(tmp_path / "repo")
    command = [sys.executable, build_engines.__file__, "--repository", tmp_path / "repo", "--cache", tmp_path / "engines"]
    run = subprocess.run([*map(str, command), "--backends", str(tmp_path)], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert "rank_dense: served by python" in run.stderr
    server = launch(tmp_path / "repo")
    rows = np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32)
    session = ort.InferenceSession(str(version / "model.onnx"), providers=["CPUExecutionProvider"])
    with grpcclient.InferenceServerClient(server.grpc_url) as client:
        x = grpcclient.InferInput("x", rows.shape, "FP32").set_data_from_numpy(rows)
        np.testing.assert_allclose(client.infer("rank_dense", [x]).as_numpy("y"), session.run(None, {"x": rows})[0], rtol=1e-6)
