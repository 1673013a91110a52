"""The index of the merlin profile: what a GPU can hold, and where it moves to."""

import json
import os
import subprocess
import sys
from pathlib import Path

import faiss
import numpy as np
import pytest
from google.protobuf.json_format import MessageToJson

from export.nvidia.index import write_gpu_index
from export.nvidia.publish import publish_merlin
from export.settings import Settings
from repository.triton.models import read_config
from serving.contract.artifacts import read_stage
from serving.stages.parts.gpu_index import clone_to_gpu
from serving.stages.parts.models import RetrieveSearch
from tests.contract import fake_backend
from tests.long.merlin.conftest import source_of
from tests.unit.nvidia.tensorrt.fake_tensorrt import FAKES

PROJECT = Path(__file__).parents[3]


def arguments_of(folder: Path, kind: str, device: str) -> dict[str, str]:
    """Return what tritonserver tells an instance of retrieve_search."""
    return {
        "model_name": folder.name,
        "model_instance_name": "retrieve_search_0_0",
        "model_instance_kind": kind,
        "model_instance_device_id": device,
        "model_repository": str(folder),
        "model_version": "1",
        "model_config": MessageToJson(read_config(folder / "config.pbtxt"), preserving_proto_field_name=True),
    }


@pytest.fixture
def fake_gpus(monkeypatch):
    """Faiss's GPU API, as far as it is used, of a machine with two GPUs."""

    class Resources:
        def setTempMemory(self, n_bytes: int) -> None:
            self.scratch_bytes = n_bytes

    class Clone:
        def __init__(self, gpu: int) -> None:
            self.gpu = gpu

    def clone(resources, gpu, index):
        if index == "too large":
            raise RuntimeError("out of memory")
        assert isinstance(resources, Resources)
        return Clone(gpu)

    monkeypatch.setattr(faiss, "StandardGpuResources", Resources, raising=False)
    monkeypatch.setattr(faiss, "get_num_gpus", lambda: 2)
    monkeypatch.setattr(faiss, "index_cpu_to_gpu", clone, raising=False)


def test_lists_stay_as_they_are(tmp_path):
    assert write_gpu_index(tmp_path, "lists") == "lists"
    assert list(tmp_path.iterdir()) == []


def test_what_gpus_cannot_hold_becomes_flat(exported):
    folder = exported["24.03"] / "retrieve_search" / "1"
    assert read_stage(folder).settings["stage"]["index"] == "flat"
    index = faiss.read_index(str(folder / "items.faiss"))
    assert index.ntotal == np.load(folder / "available.npy").sum()


def test_the_index_moves_where_faiss_has_a_gpu(fake_gpus):
    moved = clone_to_gpu("index", 1)
    assert moved.gpu == 1
    assert moved.resources.scratch_bytes == 256 << 20
    with pytest.raises(RuntimeError, match="out of memory"):  # not a silent, slow search on the CPU
        clone_to_gpu("too large", 0)
    assert clone_to_gpu(None, 0) is None


@pytest.mark.parametrize(("kind", "device", "expected"), [("GPU", "2", 2), ("CPU", "0", 3)])
def test_it_moves_to_the_gpu_of_its_instance_or_of_the_export(cpu, tmp_path, fake_gpus, monkeypatch, kind, device, expected):
    """As exported the instances are KIND_CPU, so that a server without a GPU starts: then [merlin] gpu counts."""
    publish_merlin(source_of(cpu), tmp_path / "repository", Settings.model_validate({"merlin": {"gpu": 3}}))
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", fake_backend)
    from serving.stages.parts.triton import make_part_model

    folder = tmp_path / "repository" / "retrieve_search"
    model = make_part_model(RetrieveSearch)()
    model.initialize(arguments_of(folder, kind, device))
    assert model.first.stage.outputs.search.index.gpu == expected
    model.finalize()


LOADS_THE_PART = """
import json, sys
import faiss
import sitecustomize

class Resources:
    def setTempMemory(self, n_bytes): pass

class Clone:
    pass

faiss.StandardGpuResources, faiss.get_num_gpus = Resources, lambda: 1
faiss.index_cpu_to_gpu = lambda resources, gpu, index: Clone()
from tests.contract import fake_backend
sys.modules["triton_python_backend_utils"] = fake_backend
from serving.stages.parts.models import RetrieveSearch
from serving.stages.parts.triton import make_part_model

told = []
for sitecustomize.ATTRIBUTES[75] in (8, 9):
    model = make_part_model(RetrieveSearch)()
    model.initialize(json.loads(sys.argv[1]))
    told.append([type(model.first.stage.outputs.search.index).__name__, *fake_backend.Logger.lines])
    model.finalize()
print(json.dumps(told))
"""


def test_on_a_gpu_that_faiss_has_no_code_for_items_are_searched_on_the_cpu(exported):
    """Its first kernel there would end the process."""
    arguments = arguments_of(exported["24.03"] / "retrieve_search", "CPU", "0")
    environment = os.environ | {"PYTHONPATH": f"{FAKES}:{PROJECT}"}
    command = [sys.executable, "-c", LOADS_THE_PART, json.dumps(arguments)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=120)
    missing = "GPU 0 has the compute capability 9.x, and Faiss holds code for 7.x and 8.x only: items are searched on the CPU"
    assert json.loads(run.stdout.splitlines()[-1]) == [["Clone"], ["IndexIDMap", missing]]


def test_where_faiss_has_no_gpu_it_stays():
    assert clone_to_gpu("index", 0) == "index"
