"""The container's start script and what it calls, with a tritonserver that only tells how it was called."""

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from serving.contract.artifacts import compute_sha256, write_manifest
from tests.unit.nvidia.tensorrt.conftest import publish
from tests.unit.nvidia.tensorrt.fake_tensorrt import FAKES

DEPLOY = Path(__file__).parents[3] / "deploy"
ONE_GPU = {"PYTHONPATH": str(FAKES)}  # its driver; no TensorRT


@pytest.fixture
def image(tmp_path: Path) -> dict[str, str]:
    """Return the environment of a container with a Python backend and no GPU."""
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "tritonserver").write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    (programs / "python3").symlink_to(sys.executable)
    (programs / "tritonserver").chmod(0o755)
    (tmp_path / "backends" / "python").mkdir(parents=True)
    return {
        "PATH": f"{programs}:/usr/bin:/bin",
        "MODELS": str(tmp_path / "repo"),
        "ENGINES": str(tmp_path / "engines"),
        "BACKENDS": str(tmp_path / "backends"),
    }


def start(image: dict[str, str], *arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run([str(DEPLOY / "start.sh"), *arguments], env=image, capture_output=True, text=True, timeout=120)


def test_one_tritonserver_line_after_engines_and_checks(image, tmp_path):
    publish(tmp_path / "repo")
    run = start(image, "--log-verbose=1")
    assert run.returncode == 0, run.stderr
    assert "rank_dense: served by python" in run.stderr  # no GPU here
    key_file = tmp_path / "engines" / "control.key"
    assert stat.S_IMODE(key_file.stat().st_mode) == 0o600
    closed = f"model-repository,shared-memory,logging,trace,statistics:recommender-control={key_file.read_text()}"
    assert len(key_file.read_text()) == 64
    assert run.stdout.splitlines() == [
        f"--model-repository={tmp_path / 'repo'}",
        "--model-control-mode=explicit",
        "--load-model=*",
        "--disable-auto-complete-config",
        "--exit-timeout-secs=30",
        "--metrics-config=summary_latencies=true",
        f"--http-restricted-api={closed}",
        f"--grpc-restricted-protocol={closed}",
        "--log-verbose=1",
    ]


def test_compiled_loops_are_kept_beside_the_engines(image, tmp_path):
    publish(tmp_path / "repo")
    (tmp_path / "bin" / "tritonserver").write_text('#!/bin/sh\necho "$NUMBA_CACHE_DIR"\n')
    assert start(image).stdout == f"{tmp_path / 'engines' / 'numba'}\n"
    assert start(image | {"NUMBA_CACHE_DIR": "/elsewhere"}).stdout == "/elsewhere\n"


def test_a_repository_with_hps_names_its_ps_json(image, tmp_path):
    publish(tmp_path / "repo")
    add_hps(tmp_path)
    run = start(image | ONE_GPU)
    assert run.returncode == 0, run.stderr
    assert f"--backend-config=hps,ps={tmp_path / 'repo' / 'ps.json'}" in run.stdout.splitlines()


def test_the_folder_above_rocksdbs_is_there_before_the_server(image, tmp_path):
    publish(tmp_path / "repo")
    add_hps(tmp_path)
    path = tmp_path / "var" / "lib" / "hps" / "recommender-tables" / "rank_embeddings"
    ps = tmp_path / "repo" / "ps.json"
    ps.write_text(json.dumps(json.loads(ps.read_text()) | {"persistent_db": {"type": "rocks_db", "path": str(path)}}))
    (tmp_path / "bin" / "tritonserver").write_text(f'#!/bin/sh\n[ -d "{path.parent}" ] && echo there\n')
    run = start(image | ONE_GPU)
    assert run.returncode == 0, run.stderr
    assert run.stdout == "there\n"
    assert not path.exists()  # RocksDB's own to make


def test_a_place_for_rocksdb_that_cannot_be_made_stops_the_start(image, tmp_path):
    publish(tmp_path / "repo")
    add_hps(tmp_path)
    (tmp_path / "file").touch()
    ps = tmp_path / "repo" / "ps.json"
    ps.write_text(json.dumps(json.loads(ps.read_text()) | {"persistent_db": {"path": str(tmp_path / "file" / "a" / "b")}}))
    run = start(image | ONE_GPU)
    assert run.returncode != 0
    assert "mkdir" in run.stderr
    assert not run.stdout


@pytest.mark.parametrize(
    ("gpu", "environment", "fact"),
    [
        (
            0,
            ONE_GPU | {"FAKE_GPUS": "no driver"},
            "keeps rows on GPU 0, and the driver shows 0 GPUs here. Start the container with",
        ),
        (0, ONE_GPU | {"FAKE_GPUS": "0"}, "ps.json keeps rows on GPU 0, and the driver shows 0 GPUs here"),
        (1, ONE_GPU, "ps.json keeps rows on GPU 1, and the driver shows 1 GPUs here"),
        (
            0,
            ONE_GPU | {"FAKE_MAJOR": "10"},
            "GPU 0 has the compute capability 10.x, and this hps backend has code for 7.x to 9.x",
        ),
    ],
)
def test_hps_does_not_start_without_a_gpu_that_it_has_code_for(image, tmp_path, gpu, environment, fact):
    publish(tmp_path / "repo")
    add_hps(tmp_path)
    ps = tmp_path / "repo" / "ps.json"
    ps.write_text(ps.read_text().replace("[0]", f"[{gpu}]"))
    run = start(image | environment)
    assert (run.returncode, run.stdout) == (1, "")
    assert fact in run.stderr


def test_what_will_fail_is_said_and_the_server_not_started(image, tmp_path):
    publish(tmp_path / "repo")
    (tmp_path / "backends" / "python").rmdir()
    run = start(image)
    assert run.returncode == 1
    assert "has no python backend" in run.stderr
    assert not run.stdout


@pytest.mark.parametrize("layout", ["ensemble", "fused"])
def test_files_that_were_changed_with_their_manifest_are_not_served(image, tmp_path, layout):
    repo = tmp_path / "repo"
    publish(repo)
    generation = repo / "recommend" / "1"
    stage = generation / "rank" if layout == "fused" else repo / "rank_dense" / "1"
    stage.mkdir(parents=True, exist_ok=True)
    generation.mkdir(parents=True, exist_ok=True)
    (repo / "recommend" / "config.pbtxt").write_text("version_policy {\n  specific {\n    versions: 1\n  }\n}\n")
    write_manifest(stage)
    digest = compute_sha256(stage / "manifest.json")
    write_manifest(generation, stages={"rank" if layout == "fused" else "rank_dense": digest})
    assert start(image).returncode == 0
    write_manifest(stage, generation=2)
    run = start(image)
    assert run.returncode == 1
    assert f"{stage}/manifest.json is not the manifest that generation 1 was published with" in run.stderr
    assert not run.stdout


def test_a_manifest_that_cannot_be_read_is_not_served(image, tmp_path):
    publish(tmp_path / "repo")
    folder = tmp_path / "repo" / "recommend" / "1"
    folder.mkdir(parents=True)
    (folder.parent / "config.pbtxt").write_text("version_policy { specific { versions: [1] } }\n")
    (folder / "manifest.json").write_text("{")
    run = start(image)
    assert (run.returncode, run.stdout) == (1, "")
    assert "recommend/1/manifest.json cannot be read" in run.stderr


def add_hps(tmp_path: Path) -> Path:
    """Return the folder of the one table of a model on the hps backend."""
    (tmp_path / "backends" / "hps").mkdir()
    folder = tmp_path / "repo" / "rank_embeddings" / "1" / "rank.model"
    folder.mkdir(parents=True)
    for name in ("key", "emb_vector"):
        (folder / name).write_bytes(b"\0" * 8)
    (tmp_path / "repo" / "rank_embeddings" / "config.pbtxt").write_text('name: "rank_embeddings"\nbackend: "hps"\n')
    (tmp_path / "repo" / "ps.json").write_text(
        json.dumps({"models": [{"sparse_files": [str(folder)], "deployed_device_list": [0]}]})
    )
    return folder


def preflight(tmp_path: Path, *without: str) -> str:
    """Return what the script says. without: modules that Python pretends not to have"""
    hide = "import sys, importlib.util as u; f = u.find_spec; u.find_spec = lambda n, *a: None if n in %r else f(n, *a)"
    code = f"{hide % (without,)}; import runpy; runpy.run_path({str(DEPLOY / 'preflight.py')!r}, run_name='__main__')"
    options = ["--repository", str(tmp_path / "repo"), "--backends", str(tmp_path / "backends")]
    run = subprocess.run([sys.executable, "-c", code, *options], env=os.environ | ONE_GPU, capture_output=True, text=True)
    assert run.returncode == bool(run.stderr)
    return run.stderr


def test_preflight_names_each_fault(image, tmp_path):
    assert "holds no model" in preflight(tmp_path)
    version = publish(tmp_path / "repo")
    assert "no tensorrt backend" in preflight(tmp_path)
    (tmp_path / "backends" / "tensorrt").mkdir()
    assert preflight(tmp_path) == ""
    (version / "serving").mkdir()
    said = preflight(tmp_path, "faiss")
    assert "lacks faiss" in said
    assert "pip install 'faiss-gpu-cu12==1.12.0'" in said
    assert preflight(tmp_path, "rocksdict") == ""  # the tables are those of the hps backend
    (tmp_path / "repo" / "rank_rows").mkdir()
    assert "pip install 'rocksdict'" in preflight(tmp_path, "rocksdict")
    (tmp_path / "repo" / "rank_rows").rmdir()
    assert preflight(tmp_path, "redis", "mmh3") == ""
    (version / "stage.json").write_text('{"live_redis": "redis:7000"}')
    assert "pip install 'mmh3'" in preflight(tmp_path, "mmh3")
    (version / "stage.json").unlink()
    (version / "workflow").mkdir()
    (version / "workflow" / "workflow.pkl").touch()
    assert preflight(tmp_path) == ""
    said = preflight(tmp_path, "nvtabular", "merlin.systems")
    assert "lacks nvtabular, which NVTabular's workflow needs" in said
    assert "lacks merlin.systems, which NVTabular's workflow needs" in said
    folder = add_hps(tmp_path)
    assert preflight(tmp_path) == ""
    (folder / "key").unlink()
    assert f"{folder} lacks key" in preflight(tmp_path)
    (tmp_path / "repo" / "ps.json").write_text("[]")
    assert "does not describe tables" in preflight(tmp_path)
    (tmp_path / "repo" / "ps.json").unlink()
    assert "ps.json is missing" in preflight(tmp_path)
