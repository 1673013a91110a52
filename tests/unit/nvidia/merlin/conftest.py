"""One small shop, exported for the cpu profile and from there, without training again, for merlin."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from export.nvidia.publish import publish_merlin
from export.nvidia.source import Source
from export.settings import Settings
from serving.contract.tensors import ENSEMBLE, STAGES
from tests.unit.small_shops import CONTEXT, export, shop


def source_of(repository: Path) -> Source:
    return Source.open({name: repository / name / "1" for name in (*STAGES, ENSEMBLE)})


@pytest.fixture(scope="package")
def cpu(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("shop")
    return export(folder, shop(folder / "data", users=12, items=30, events=60, more=CONTEXT))


@pytest.fixture(scope="package")
def exported(cpu, tmp_path_factory) -> dict[str, Path]:
    """Triton -> a merlin repository."""
    repositories = {triton: tmp_path_factory.mktemp("merlin") / "repository" for triton in ("24.03", "modern")}
    for triton, repository in repositories.items():
        publish_merlin(source_of(cpu), repository, Settings(merlin={"triton": triton}))
    return repositories


@pytest.fixture
def repository(exported, tmp_path) -> Path:
    """A copy, behind hps, to break."""
    return shutil.copytree(exported["24.03"], tmp_path / "repository")


@pytest.fixture
def modern(exported, tmp_path) -> Path:
    return shutil.copytree(exported["modern"], tmp_path / "repository")
