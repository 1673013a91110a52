import sys
from dataclasses import replace

import pytest

from serving.contract.artifacts import write_manifest
from serving.contract.tensors import ENSEMBLE, STAGES
from tests.contract import fake_backend
from tests.contract.stages import INFO, Echo, Next, pbtxt_as_json, quiet_model
from tests.unit.gateway.conftest import closed

__all__ = ["closed"]

sys.modules["triton_python_backend_utils"] = fake_backend  # what Triton's stub provides inside the server


@pytest.fixture
def arguments(tmp_path):
    folder = tmp_path / "preprocess" / "7"
    folder.mkdir(parents=True)
    INFO.write(folder)
    write_manifest(folder)
    return {
        "model_name": "preprocess",
        "model_instance_name": "preprocess_0_0",
        "model_repository": str(folder.parent),
        "model_version": "7",
        "model_config": pbtxt_as_json(INFO),
    }


@pytest.fixture
def model(arguments):
    fake_backend.MetricFamily.metrics.clear()
    fake_backend.Logger.lines.clear()
    model = quiet_model(Echo)
    model.initialize(arguments)
    yield model
    model.finalize()


@pytest.fixture
def fused(tmp_path):
    fake_backend.MetricFamily.metrics.clear()
    folder = tmp_path / ENSEMBLE / "7"
    for name in STAGES:
        (folder / name).mkdir(parents=True)
        replace(INFO, stage=name).write(folder / name)
    info = replace(INFO, stage=ENSEMBLE)
    info.write(folder)
    write_manifest(folder)
    model = quiet_model(Echo, Next, Next, Next)
    model.initialize(
        {
            "model_name": ENSEMBLE,
            "model_instance_name": "recommend_0_0",
            "model_repository": str(folder.parent),
            "model_version": "7",
            "model_config": pbtxt_as_json(info),
        }
    )
    yield model
    model.finalize()
