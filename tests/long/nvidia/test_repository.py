"""A merlin repository: what `make check` says of a damaged or hand-edited one, and what an export leaves when it fails."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from export.check import check_repository
from export.nvidia.check import check_hps
from export.nvidia.hugectr_backend import write_hugectr_repository
from export.nvidia.source import Source
from export.nvidia.write import Writer
from export.settings import Settings
from hps_config.parsers import load_json
from repository.triton.models import read_config, write_config
from serving.contract.artifacts import MANIFEST_FILE
from serving.contract.tensors import ENSEMBLE, STAGES
from tests.repositories import copy_to_change, small_merlin_repository, small_repository

EMBEDDINGS = "rank_embeddings"


@pytest.fixture(scope="module")
def source() -> Source:
    return Source.open({name: small_repository() / name / "1" for name in (*STAGES, ENSEMBLE)})


@pytest.fixture
def merlin(tmp_path):
    """A copy of a repository behind hps, to break."""
    return copy_to_change(small_merlin_repository("24.03"), tmp_path / "repository")


@pytest.mark.parametrize(
    ("profile", "model", "lacking"),
    [
        ("cpu", ENSEMBLE, "stages"),
        ("cpu", ENSEMBLE, "files"),
        ("cpu", "rerank", "files"),
        ("merlin", ENSEMBLE, "stages"),
        ("merlin", ENSEMBLE, "files"),
        ("merlin", ENSEMBLE, "merlin"),
        ("merlin", "rank_features", "files"),
    ],
)
def test_a_manifest_that_lacks_a_section_is_a_finding(tmp_path, profile, model, lacking):
    original = small_repository() if profile == "cpu" else small_merlin_repository("24.03")
    repository = copy_to_change(original, tmp_path / "repository")
    path = repository / model / "1" / MANIFEST_FILE
    path.write_text(json.dumps({name: value for name, value in json.loads(path.read_text()).items() if name != lacking}))
    told = [f"{finding.where}: {finding.fact}" for finding in check_repository(repository) if finding.level == "error"]
    assert any(f"{path} has no object '{lacking}'" in message for message in told), told


def test_an_absent_refresh_interval_is_zero(merlin):
    config = read_config(merlin / EMBEDDINGS / "config.pbtxt")
    del config.parameters["refresh_interval"]
    write_config(merlin / EMBEDDINGS / "config.pbtxt", config)
    assert list(check_hps(merlin)) == []
    document = load_json(merlin / "ps.json") | {"update_source": {"type": "kafka", "brokers": "kafka:9092"}}
    (merlin / "ps.json").write_text(json.dumps(document))
    (finding,) = check_hps(merlin)
    assert (finding.level, "refresh_interval is 0, and ps.json has an update_source" in finding.fact) == ("warning", True)


def test_the_updater_of_our_own_tables_is_published_with_them():
    """The command of docs/merlin.md, by the published code alone."""
    command = [sys.executable, "-P", "-m", "serving.tables", "tables/levels.json"]
    folder = small_merlin_repository("modern") / "rank_rows" / "1"
    run = subprocess.run(command, cwd=folder, env=os.environ | {"PYTHONPATH": str(folder)}, capture_output=True, text=True)
    assert "names no update source" in run.stderr


def test_networks_have_the_instances_of_the_settings(source, tmp_path):
    serving = {"instances": 2, "rerank": {"instances": 3}}
    settings = Settings.model_validate({"merlin": {"triton": "modern"}, "serving": serving})
    Writer(source, tmp_path / "repository", settings).write()
    counts = {}
    for config in (read_config(path) for path in (tmp_path / "repository").glob("*/config.pbtxt")):
        if config.backend == "tensorrt":
            (group,) = config.instance_group
            counts[config.name] = group.count
    assert counts == {"towers_user": 2, "rank_dense": 2, "rerank_network": 3}


def test_a_hugectr_repository_that_cannot_be_written_leaves_the_old_one(source, tmp_path, monkeypatch):
    target = tmp_path / "repository.hugectr"
    write_hugectr_repository(source, target, Settings())
    before = {path: path.read_bytes() for path in sorted(tmp_path.rglob("*")) if path.is_file()}

    def disk_full(descriptor):
        raise OSError("No space left on device")

    monkeypatch.setattr(os, "fsync", disk_full)
    with pytest.raises(OSError, match="No space left"):
        write_hugectr_repository(source, target, Settings())
    assert {path: path.read_bytes() for path in sorted(tmp_path.rglob("*")) if path.is_file()} == before
    monkeypatch.undo()
    write_hugectr_repository(source, target, Settings())
    assert {path: path.read_bytes() for path in sorted(tmp_path.rglob("*")) if path.is_file()} == before
