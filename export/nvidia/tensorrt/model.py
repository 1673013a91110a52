"""Write the files of a TensorRT model except its engine (the package's docstring lists them)."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import onnx
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2 as pb

from export.nvidia.precision.lower import PRECISIONS
from export.nvidia.tensorrt import build_engines
from export.nvidia.tensorrt.config import make_onnxruntime_config, make_python_config
from export.nvidia.tensorrt.profiles import Profile
from repository.triton.models import write_config
from serving.contract.errors import ExportError

STAND_IN = Path(__file__).parent / "onnxruntime_model.py"  # not importable here: it needs tritonserver's modules


@dataclass(frozen=True)
class Engine:
    """Content of `engine.json`.

    fp32_nodes: ONNX nodes that TensorRT 8 must not lower; later versions read types from the graph.
    """

    precision: str
    profiles: tuple[Profile, ...]
    fp32_nodes: tuple[str, ...] = ()

    def as_json(self) -> str:
        profiles = [
            {name: [list(span.minimum), list(span.optimum), list(span.maximum)] for name, span in profile.items()}
            for profile in self.profiles
        ]
        return json.dumps({"precision": self.precision, "fp32_nodes": list(self.fp32_nodes), "profiles": profiles}, indent=1)


def write_version(version: Path, network: Path, engine: Engine) -> None:
    """Write a version folder without its engine. network: the ONNX file, with its precision in the graph.

    Raises ExportError when profiles and network have different inputs.
    """
    graph = onnx.load(str(network), load_external_data=False).graph
    ranks = {value.name: len(value.type.tensor_type.shape.dim) for value in graph.input}
    for profile in engine.profiles:
        profile_ranks = {name: len(span.maximum) for name, span in profile.items()}
        if profile_ranks != ranks:
            raise ExportError(
                f"{network.name} takes {ranks} (name and number of axes), its profile has {profile_ranks}. "
                "Make the profiles from the tensors of the network."
            )
    if engine.precision not in PRECISIONS:
        raise ExportError(f"{network.name} has the precision {engine.precision!r}. Expected one of {', '.join(PRECISIONS)}.")
    version.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(network, version / build_engines.ONNX)
    (version / build_engines.ENGINE_FILE).write_text(engine.as_json() + "\n")
    shutil.copyfile(STAND_IN, version / "model.py")
    (version / "__pycache__").touch()  # a file: Python cannot write a cache there, the folder stays as published


def write_configs(model: Path, tensorrt: pb.ModelConfig) -> None:
    """Write config.pbtxt for TensorRT, and under configs/ every config that the start script may replace it with."""
    (model / "configs").mkdir(parents=True, exist_ok=True)
    for name, config in make_configs(tensorrt).items():
        (model / "configs" / f"{name}.pbtxt").write_text(text_format.MessageToString(config))
    write_config(model / build_engines.CONFIG, tensorrt)


def make_configs(tensorrt: pb.ModelConfig) -> dict[str, pb.ModelConfig]:
    """Return the configs by the names that `build_engines.py` uses."""
    one_profile = pb.ModelConfig()
    one_profile.CopyFrom(tensorrt)
    for group in one_profile.instance_group:
        group.profile[:] = ["0"]
    return {
        build_engines.TENSORRT: tensorrt,
        build_engines.ONE_PROFILE: one_profile,
        build_engines.ONNXRUNTIME: make_onnxruntime_config(tensorrt),
        build_engines.PYTHON: make_python_config(tensorrt),
    }
