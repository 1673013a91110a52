"""Nothing that we start reports to strangers: ONNX Runtime's wheels would, from their import on."""

import subprocess
import sys
from pathlib import Path

import pytest

from export.nvidia.tensorrt.model import STAND_IN

PROJECT = Path(__file__).parents[2]
LOAD_STAND_IN = f"""
import runpy, sys, types
sys.modules["triton_python_backend_utils"] = types.ModuleType("triton_python_backend_utils")
runpy.run_path({str(STAND_IN)!r})
"""


@pytest.mark.parametrize(
    "code",
    [*(f"import {package}, onnxruntime" for package in ("serving", "training", "export", "experiments")), LOAD_STAND_IN],
    ids=["serving", "training", "export", "experiments", "stand-in of TensorRT"],
)
def test_onnx_runtime_makes_no_identifier_of_the_machine_to_report_with(code, tmp_path):
    # nothing of this process's environment: a variable that names CI or a test would keep it quiet as well
    environment = {"HOME": str(tmp_path), "PYTHONPATH": str(PROJECT), "PATH": "/usr/bin:/bin"}
    subprocess.run([sys.executable, "-c", code], env=environment, cwd=tmp_path, check=True, timeout=120)
    assert list(tmp_path.rglob("*")) == []
