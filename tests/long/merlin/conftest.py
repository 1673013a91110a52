"""One small shop, exported for the cpu profile and from there, without training again, for merlin."""

from __future__ import annotations

from pathlib import Path

import pytest

from export.nvidia.source import Source
from serving.contract.tensors import ENSEMBLE, STAGES
from tests import repositories


def source_of(repository: Path) -> Source:
    return Source.open({name: repository / name / "1" for name in (*STAGES, ENSEMBLE)})


@pytest.fixture(scope="session")
def cpu() -> Path:
    return repositories.small_repository()


@pytest.fixture(scope="session")
def exported() -> dict[str, Path]:
    """Triton -> a merlin repository."""
    return {triton: repositories.small_merlin_repository(triton) for triton in ("24.03", "modern")}


@pytest.fixture
def repository(exported, tmp_path) -> Path:
    """A copy, behind hps, to break."""
    return repositories.copy_to_change(exported["24.03"], tmp_path / "repository")


@pytest.fixture
def modern(exported, tmp_path) -> Path:
    return repositories.copy_to_change(exported["modern"], tmp_path / "repository")
