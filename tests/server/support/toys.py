"""A repository of two tiny Python models and an ensemble, enough to see which generation answered.

    x ─▶ first ─▶ trail ─▶ second ─▶ answer        each step appends its version: answer = x·10⁶ + v_first·10³ + v_second

A response that mixed generations shows two different versions in `answer`.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import tritonclient.grpc as grpcclient

ENSEMBLE = "recommend"
STEPS = {"first": ("x", "trail"), "second": ("trail", "answer")}

MODEL = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        self.version = int(args["model_version"])

    def execute(self, requests):
        arrays = [pb_utils.get_input_tensor_by_name(request, "{input}").as_numpy() for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("{output}", a * 1000 + self.version)]) for a in arrays]
"""

STEP_CONFIG = """
name: "{name}" backend: "python" max_batch_size: 8
input [{{ name: "{input}" data_type: TYPE_INT64 dims: [1] }}]
output [{{ name: "{output}" data_type: TYPE_INT64 dims: [1] }}]
instance_group [{{ count: 1 kind: KIND_CPU }}]
dynamic_batching {{ }}
version_policy {{ specific {{ versions: [{generation}] }} }}
"""

ENSEMBLE_CONFIG = """
name: "recommend" platform: "ensemble" max_batch_size: 8
input [{{ name: "x" data_type: TYPE_INT64 dims: [1] }}]
output [{{ name: "answer" data_type: TYPE_INT64 dims: [1] }}]
ensemble_scheduling {{ step [
  {{ model_name: "first" model_version: {generation}
     input_map {{ key: "x" value: "x" }} output_map {{ key: "trail" value: "trail" }} }},
  {{ model_name: "second" model_version: {generation}
     input_map {{ key: "trail" value: "trail" }} output_map {{ key: "answer" value: "answer" }} }}
] }}
version_policy {{ specific {{ versions: [{generation}] }} }}
"""


def publish(repo: Path, generation: int, model: str = MODEL) -> Path:
    """Add a generation's version folders; the first one also gets the configs that serve it."""
    for name, (source, target) in STEPS.items():
        folder = repo / name / str(generation)
        folder.mkdir(parents=True)
        (folder / "model.py").write_text(model.format(input=source, output=target))
        (folder / "__pycache__").touch()  # a file: Python cannot write a cache there, the folder stays as published
        config = folder.parent / "config.pbtxt"
        if not config.exists():
            config.write_text(STEP_CONFIG.format(name=name, input=source, output=target, generation=generation))
    (repo / ENSEMBLE / str(generation)).mkdir(parents=True)
    config = repo / ENSEMBLE / "config.pbtxt"
    if not config.exists():
        config.write_text(ENSEMBLE_CONFIG.format(generation=generation))
    return repo


def add_stage(repo: Path, generation: int, stage: str) -> Path:
    """Give a generation the empty folder of a stage, as the fused layout has it. Return the repository."""
    (repo / ENSEMBLE / str(generation) / stage).mkdir()
    return repo


def remove(repo: Path, generation: int) -> None:
    for name in (*STEPS, ENSEMBLE):
        shutil.rmtree(repo / name / str(generation))


def ask(client: grpcclient.InferenceServerClient, x: int, model: str = ENSEMBLE) -> int:
    tensor = grpcclient.InferInput("x", [1, 1], "INT64").set_data_from_numpy(np.array([[x]], np.int64))
    return int(client.infer(model, [tensor], client_timeout=10).as_numpy("answer")[0, 0])


def expected(x: int, generation: int) -> int:
    return (x * 1000 + generation) * 1000 + generation
