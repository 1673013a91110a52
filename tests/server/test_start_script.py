"""The container's start script with the real tritonserver, where TensorRT is not: its own fallbacks serve, and answer alike."""

import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as grpcclient

from export.nvidia.precision.agreement import describe_disagreement
from export.nvidia.precision.calibration import find_stage_folders
from export.nvidia.publish import publish_merlin
from export.nvidia.source import Source
from export.settings import Settings
from repository.checks.recorded import RECORDED_FILE, read_recorded
from server.launcher import MEMORY_RACE
from server.start.environment import build_backend_directory, build_server_env, find_wheel
from server.start.ports import find_free_ports
from server.status import health
from serving.contract.tensors import ENSEMBLE
from serving.loops.compiled import find_cache_root
from tests.repositories import small_repository
from tests.server.support.requests import infer

START = Path(__file__).parents[2] / "deploy" / "start.sh"
READY_TIMEOUT_S = 600.0
REQUESTS = 32


@pytest.fixture
def served(tmp_path):
    """Start a merlin repository for current images, in fp16, as a container does. Return its gRPC address and its log.

    A script named tritonserver on PATH runs the packaged server with the options that this machine needs.
    """
    source = Source.open(find_stage_folders(small_repository()))
    publish_merlin(source, tmp_path / "models", Settings.model_validate({"merlin": {"triton": "modern", "precision": "fp16"}}))
    wheel, ports, run = find_wheel(), find_free_ports(), tmp_path / "run"
    backends = build_backend_directory(wheel, run)
    options = [f"--backend-directory={backends}", f"--backend-config=python,shm-region-prefix-name=start_{ports.grpc}_"]
    options += [f"--grpc-port={ports.grpc}", f"--http-port={ports.http}", f"--metrics-port={ports.metrics}"]
    program = run / "bin" / "tritonserver"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec "{wheel.server}" {" ".join(options)} "$@"\n')
    program.chmod(0o755)
    env = build_server_env(wheel)
    env |= {"PATH": f"{program.parent}:{env['PATH']}", "MODELS": str(tmp_path / "models")}
    env |= {"ENGINES": str(tmp_path / "engines"), "BACKENDS": str(backends)}
    env |= {"NUMBA_CACHE_DIR": find_cache_root()}  # what other servers of this machine have compiled
    address, log = f"localhost:{ports.grpc}", tmp_path / "log"

    def start() -> subprocess.Popen:
        with log.open("wb") as file:
            return subprocess.Popen([str(START)], cwd=run, env=env, stdout=file, stderr=subprocess.STDOUT)

    process = start()
    try:
        if not wait_ready(process, address, log):
            process = start()  # as a container is
            assert wait_ready(process, address, log)
        yield address, log
    finally:
        process.terminate()
        process.wait()


def wait_ready(process: subprocess.Popen, address: str, log: Path) -> bool:
    """Return True once the server is ready, False where its race for shared memory (server/launcher.py) ended it."""
    deadline_s = time.monotonic() + READY_TIMEOUT_S
    while not health.is_ready(address):
        said = log.read_text(errors="replace")
        if process.poll() == -signal.SIGABRT and MEMORY_RACE in said:
            return False
        assert process.poll() is None, said[-3000:]
        assert time.monotonic() < deadline_s, said[-3000:]
        time.sleep(0.2)
    return True


def test_without_tensorrt_the_repository_is_served_all_the_same(served):
    address, log = served
    recorded = read_recorded(find_stage_folders(small_repository())[ENSEMBLE] / RECORDED_FILE)
    inputs = {name: values[:REQUESTS] for name, values in recorded.inputs.items()}
    expected = {name: values[:REQUESTS] for name, values in recorded.outputs.items()}
    with grpcclient.InferenceServerClient(address) as client:
        got = infer(client, **inputs)
    assert describe_disagreement("fp16", got, expected) == ""
    np.testing.assert_array_equal(got["degraded"], expected["degraded"])
    for name in ("rank_dense", "rerank_network", "towers_user"):
        assert f"WARNING: {name}: " in log.read_text(errors="replace")
        assert f"{name}: served by python" in log.read_text(errors="replace")
