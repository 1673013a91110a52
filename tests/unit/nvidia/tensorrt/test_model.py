"""A model is published before its engine exists: files, configurations, and the stand-in on ONNX Runtime."""

import json
import sys

import numpy as np
import onnxruntime as ort
import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2 as pb

from export.nvidia.tensorrt import build_engines
from export.nvidia.tensorrt.config import make_tensorrt_config
from export.nvidia.tensorrt.model import STAND_IN, Engine, make_configs, write_version
from export.nvidia.tensorrt.profiles import make_shape_profiles
from serving.contract.errors import ExportError
from tests.contract import fake_backend
from tests.unit.nvidia.tensorrt.conftest import X, Y, small_network


def test_a_version_holds_network_profiles_and_stand_in(version):
    assert sorted(path.name for path in version.iterdir()) == ["__pycache__", "engine.json", "model.onnx", "model.py"]
    assert json.loads((version / "engine.json").read_text()) == {
        "precision": "fp32",
        "fp32_nodes": [],
        "profiles": [{"x": [[1, 3], [1, 3], [8, 3]]}, {"x": [[1, 3], [4, 3], [8, 3]]}],
    }


def test_every_config_the_start_script_may_choose_is_there_and_parses(version):
    model = version.parent
    names = {build_engines.TENSORRT, build_engines.ONE_PROFILE, build_engines.ONNXRUNTIME, build_engines.PYTHON}
    assert {path.stem for path in (model / "configs").iterdir()} == names
    configs = {p.stem: text_format.Parse(p.read_text(), pb.ModelConfig()) for p in (model / "configs").iterdir()}
    assert {name: config.backend for name, config in configs.items()} == {
        "tensorrt": "tensorrt",
        "tensorrt_one_profile": "tensorrt",
        "onnxruntime": "onnxruntime",
        "python": "python",
    }
    assert list(configs["tensorrt"].instance_group[0].profile) == ["0", "1"]
    assert list(configs["tensorrt_one_profile"].instance_group[0].profile) == ["0"]
    assert text_format.Parse((model / "config.pbtxt").read_text(), pb.ModelConfig()) == configs["tensorrt"]


def test_profiles_must_be_of_the_networks_inputs(tmp_path):
    network, other = small_network(tmp_path / "n.onnx"), make_shape_profiles((Y,), 8)
    with pytest.raises(ExportError, match=r"takes \{'x': 2\}.* its profile has \{'y': 2\}"):
        write_version(tmp_path / "1", network, Engine("fp32", other))
    with pytest.raises(ExportError, match="precision 'fp8'"):
        write_version(tmp_path / "1", network, Engine("fp8", make_shape_profiles((X,), 8)))


@pytest.fixture
def stand_in(version, monkeypatch):
    """Return the class of the published model.py, and what tritonserver passes to `initialize`."""
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", fake_backend)
    namespace: dict = {}
    exec(compile((version / "model.py").read_text(), str(version / "model.py"), "exec"), namespace)
    arguments = {"model_repository": str(version.parent), "model_version": version.name}
    return namespace["TritonPythonModel"], arguments, version


def answers(stand_in, max_batch_size: int, *batches: np.ndarray) -> list[np.ndarray]:
    kind, arguments, _ = stand_in
    model = kind()
    config = {"max_batch_size": max_batch_size, "input": [{"name": "x"}], "output": [{"name": "y"}]}
    model.initialize(arguments | {"model_config": json.dumps(config)})
    requests = [fake_backend.InferenceRequest(x=batch) for batch in batches]
    return [response.output_tensors()[0].as_numpy() for response in model.execute(requests)]


@pytest.mark.parametrize("max_batch_size", [8, 0])
def test_the_stand_in_answers_each_request_as_the_network_does(stand_in, max_batch_size):
    rng = np.random.default_rng(0)
    batches = [rng.normal(size=(rows, 3)).astype(np.float32) for rows in (1, 3, 2)]
    session = ort.InferenceSession(str(stand_in[2] / "model.onnx"), providers=["CPUExecutionProvider"])
    for got, batch in zip(answers(stand_in, max_batch_size, *batches), batches, strict=True):
        np.testing.assert_allclose(got, session.run(None, {"x": batch})[0], rtol=1e-6)
        assert got.shape == (len(batch), 2)


def test_the_stand_in_needs_nothing_of_this_project():
    from tests.unit.test_layers import read_source

    assert {name.split(".")[0] for name in read_source(STAND_IN).imports} == {
        "json",
        "os",
        "numpy",
        "onnxruntime",
        "triton_python_backend_utils",
    }


def test_config_names_are_those_of_the_start_script():
    config = make_tensorrt_config("m", (X,), (Y,), 8, make_shape_profiles((X,), 8), [1])
    assert set(make_configs(config)) == {"tensorrt", "tensorrt_one_profile", "onnxruntime", "python"}
