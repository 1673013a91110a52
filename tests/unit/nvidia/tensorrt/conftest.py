from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from export.nvidia.tensorrt.config import make_tensorrt_config
from export.nvidia.tensorrt.model import Engine, write_configs, write_version
from export.nvidia.tensorrt.profiles import make_shape_profiles
from serving.contract.tensors import TensorSpec

X, Y = TensorSpec("x", "FP32", (3,)), TensorSpec("y", "FP32", (2,))


def small_network(path: Path, lowered: str = "") -> Path:
    """y = relu(x @ w) with named nodes; `lowered` adds the op by which a precision shows: "Cast" or "QuantizeLinear"."""
    weight = np.arange(6, dtype=np.float32).reshape(3, 2) - 2
    nodes = [helper.make_node("MatMul", ["x", "w"], ["h"], name="first")]
    initializers = [numpy_helper.from_array(weight, "w")]
    if lowered == "Cast":
        nodes += [
            helper.make_node("Cast", ["h"], ["h16"], name="down", to=TensorProto.FLOAT16),
            helper.make_node("Cast", ["h16"], ["l"], name="up", to=TensorProto.FLOAT),
        ]
    elif lowered == "QuantizeLinear":
        scale, zero = np.array(0.1, np.float32), np.array(0, np.int8)
        initializers += [numpy_helper.from_array(scale, "s"), numpy_helper.from_array(zero, "z")]
        nodes += [
            helper.make_node("QuantizeLinear", ["h", "s", "z"], ["q"], name="down"),
            helper.make_node("DequantizeLinear", ["q", "s", "z"], ["l"], name="up"),
        ]
    nodes.append(helper.make_node("Relu", ["l" if lowered else "h"], ["y"], name="last"))
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["requests", 3])]
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["requests", 2])]
    model = helper.make_model(
        helper.make_graph(nodes, "small", inputs, outputs, initializers),
        opset_imports=[helper.make_opsetid("", 17)],
        ir_version=8,
    )
    onnx.checker.check_model(model)
    onnx.save(model, str(path))
    return path


def publish(repository: Path, precision: str = "fp32", name: str = "rank_dense", generation: int = 1) -> Path:
    """Return the version folder of one exported model, without an engine."""
    lowered = {"fp16": "Cast", "int8": "QuantizeLinear"}.get(precision, "")
    repository.mkdir(exist_ok=True)
    network = small_network(repository.parent / f"{name}.onnx", lowered)
    profiles = make_shape_profiles((X,), 8, (4,))
    write_version(repository / name / str(generation), network, Engine(precision, profiles, ("last",) if lowered else ()))
    write_configs(repository / name, make_tensorrt_config(name, (X,), (Y,), 8, profiles, [generation], (4,)))
    return repository / name / str(generation)


@pytest.fixture
def version(tmp_path: Path) -> Path:
    return publish(tmp_path / "repo")
