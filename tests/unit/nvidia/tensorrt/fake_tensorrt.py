"""A fake of the part of TensorRT's Python module that the engine builder may use. `fake(version)` makes it for one version.

api.json holds the names and the values of flags in the real packages of 8.6.1, 10.0.1, 10.13.3 and 11.4.0, from which it was
read. A name that the real package lacks raises AttributeError here too. An "engine" is JSON that tells how it was built.
"""

from __future__ import annotations

import enum
import json
import os
import types
from pathlib import Path
from typing import Any

API: dict[str, dict[str, bool | int | None]] = json.loads((Path(__file__).parent / "api.json").read_text())
VERSIONS = tuple(API["Logger.WARNING"])
FAKES = Path(__file__).parent / "fakes"  # for the PYTHONPATH of a process: this module as `tensorrt`, and a GPU's driver
FLOAT, HALF, INT64 = "float32", "float16", "int64"


def fake(version: str) -> types.ModuleType:
    """Return a module whose classes lack what the real module of this version lacks, according to api.json."""
    trt = types.ModuleType("tensorrt")
    vars(trt).update(__version__=version, float32=FLOAT, float16=HALF)
    for name in ("NetworkDefinitionCreationFlag", "BuilderFlag", "MemoryPoolType", "TensorIOMode"):
        setattr(trt, name, enum.IntEnum(name, flags_of(name, version)))
    for kind in (Logger, Builder, Network, Layer, Tensor, Parser, Profile, Config, Runtime, Engine):
        name = NAMES.get(kind.__name__, kind.__name__)
        body = {key: value for key, value in vars(kind).items() if key.startswith("__") and callable(value)}
        body |= {key: value for key, value in vars(kind).items() if kind is Tensor or exists(f"{name}.{key}", version)}
        setattr(trt, name, type(name, (), body | {"trt": trt, "__setattr__": only_known}))
    return trt


NAMES = {
    "Network": "INetworkDefinition",
    "Layer": "ILayer",
    "Tensor": "ITensor",
    "Parser": "OnnxParser",
    "Profile": "IOptimizationProfile",
    "Config": "IBuilderConfig",
    "Engine": "ICudaEngine",
}


def exists(name: str, version: str) -> bool:
    return API.get(name, {}).get(version) is not None


def flags_of(name: str, version: str) -> dict[str, int]:
    worth = {key: values.get(version) for key, values in API.items() if key.split(".")[0] == name}
    return {key.split(".")[1]: int(value) for key, value in worth.items() if value is not None}


def only_known(self, name: str, value) -> None:
    """Refuse to set an attribute that the class does not have, as real objects do, except for `fake_…` of this fake."""
    if name.startswith("fake_") or isinstance(getattr(type(self), name, None), property):
        object.__setattr__(self, name, value)
    else:
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")


class OfModule:
    """Attributes that `fake` adds to every class, declared for type checkers."""

    trt: Any  # the fake module


class Logger:
    WARNING = 1

    def __init__(self, severity: int) -> None:
        assert severity == Logger.WARNING


class Builder(OfModule):
    def __init__(self, logger) -> None:
        if os.environ.get("FAKE_TENSORRT_CRASHES"):
            os.abort()

    def create_network(self, flags: int = 0):
        known = sum(1 << int(flag) for flag in self.trt.NetworkDefinitionCreationFlag)
        assert flags & ~known == 0, f"unknown creation flags {flags:b}"
        return self.trt.INetworkDefinition(flags)

    def create_builder_config(self):
        return self.trt.IBuilderConfig()

    def create_optimization_profile(self):
        return self.trt.IOptimizationProfile()

    def build_serialized_network(self, network, config):
        lowered = {node.op_type for node in network.fake_graph.node} & {"Cast", "QuantizeLinear"}
        flags = {flag.name for flag in config.fake_flags}
        if network.fake_typed and flags & {"FP16", "INT8", "OBEY_PRECISION_CONSTRAINTS"}:
            return None
        if not network.fake_typed and {{"Cast": "FP16", "QuantizeLinear": "INT8"}[op] for op in lowered} - flags:
            return None
        inputs = {value.name for value in network.fake_graph.input}
        if not config.fake_profiles or any(set(profile.fake_shapes) != inputs for profile in config.fake_profiles):
            return None
        built = {
            "version": self.trt.__version__,
            "inputs": sorted(inputs),
            "outputs": [value.name for value in network.fake_graph.output],
            "profiles": [profile.fake_shapes for profile in config.fake_profiles],
            "typed": network.fake_typed,
            "flags": sorted(flags),
            "kept": [
                layer.fake_name
                for layer in network.fake_layers
                if layer.fake_precision == FLOAT and layer.fake_output_type == FLOAT
            ],
            "workspace": config.fake_pools.get("WORKSPACE"),
        }
        return memoryview(json.dumps(built).encode())

    build_engine = max_batch_size = platform_has_fast_fp16 = None


class Network(OfModule):
    def __init__(self, flags: int) -> None:
        members = self.trt.NetworkDefinitionCreationFlag.__members__
        self.fake_explicit = "EXPLICIT_BATCH" not in members or bool(flags & 1 << members["EXPLICIT_BATCH"])
        major = int(self.trt.__version__.split(".")[0])
        self.fake_typed = major >= 11 or ("STRONGLY_TYPED" in members and bool(flags & 1 << members["STRONGLY_TYPED"]))
        self.fake_layers: list[Any] = []
        self.fake_graph = None

    num_layers = property(lambda self: len(self.fake_layers))

    def get_layer(self, index: int):
        return self.fake_layers[index]


class Tensor:
    def __init__(self, dtype: str) -> None:
        self.fake_dtype = dtype

    dtype = property(lambda self: self.fake_dtype)


class Layer(OfModule):
    def __init__(self, node) -> None:
        self.fake_name, self.fake_precision = node.name, None
        self.fake_output_type: str | None = None
        self.fake_dtype = INT64 if node.op_type == "Shape" else FLOAT

    name = property(lambda self: self.fake_name)
    num_outputs = property(lambda self: 1)
    precision = property(
        lambda self: self.fake_precision, lambda self, value: object.__setattr__(self, "fake_precision", value)
    )

    def get_output(self, index: int):
        return self.trt.ITensor(self.fake_dtype)

    def set_output_type(self, index: int, dtype: str) -> None:
        assert self.fake_dtype == FLOAT, "only floats are constrained"
        self.fake_output_type = dtype


class Parser(OfModule):
    def __init__(self, network, logger) -> None:
        self.fake_network = network
        self.fake_errors: list[str] = []

    num_errors = property(lambda self: len(self.fake_errors))

    def parse(self, model: bytes, path: str | None = None) -> bool:
        if not self.fake_network.fake_explicit:
            self.fake_errors.append("the network must be created with EXPLICIT_BATCH")
            return False
        import onnx  # takes longer than everything else that a process of a test does, and only builds need it

        try:
            self.fake_network.fake_graph = onnx.load_model_from_string(model).graph
        except Exception as error:
            self.fake_errors.append(f"not an ONNX model ({type(error).__name__})")
            return False
        self.fake_network.fake_layers = [self.trt.ILayer(node) for node in self.fake_network.fake_graph.node]
        return True

    def get_error(self, index: int) -> str:
        return self.fake_errors[index]


class Profile:
    def __init__(self) -> None:
        self.fake_shapes: dict[str, list[tuple]] = {}

    def set_shape(self, input: str, min: tuple, opt: tuple, max: tuple) -> None:
        assert all(isinstance(shape, tuple) for shape in (min, opt, max))
        self.fake_shapes[input] = [min, opt, max]


class Config(OfModule):
    def __init__(self) -> None:
        self.fake_flags = {self.trt.BuilderFlag.TF32}
        self.fake_pools: dict[str, int] = {}
        self.fake_profiles: list[Any] = []

    def set_memory_pool_limit(self, pool, size: int) -> None:
        self.fake_pools[pool.name] = size

    def set_flag(self, flag) -> None:
        self.fake_flags.add(flag)

    def clear_flag(self, flag) -> None:
        self.fake_flags.discard(flag)

    def add_optimization_profile(self, profile) -> int:
        spans = profile.fake_shapes.values()
        if not spans or not all(a <= b <= c for low, usual, high in spans for a, b, c in zip(low, usual, high, strict=True)):
            return -1
        self.fake_profiles.append(profile)
        return len(self.fake_profiles) - 1

    max_workspace_size = set_calibration_profile = int8_calibrator = None


class Runtime(OfModule):
    def __init__(self, logger) -> None:
        pass

    def deserialize_cuda_engine(self, plan: bytes):
        try:
            built = json.loads(plan)
        except ValueError:
            return None
        return self.trt.ICudaEngine(built) if built["version"] == self.trt.__version__ else None


class Engine(OfModule):
    def __init__(self, built: dict) -> None:
        self.fake_built = built

    num_io_tensors = property(lambda self: len(self.fake_built["inputs"]) + len(self.fake_built["outputs"]))
    num_optimization_profiles = property(lambda self: len(self.fake_built["profiles"]))
    num_bindings = device_memory_size = None

    def get_tensor_name(self, index: int) -> str:
        return [*self.fake_built["inputs"], *self.fake_built["outputs"]][index]

    def get_tensor_mode(self, name: str):
        return self.trt.TensorIOMode.INPUT if name in self.fake_built["inputs"] else 2
