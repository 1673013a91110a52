"""One small shop, exported for the cpu profile and from there, without training again, for merlin."""

from __future__ import annotations

from collections.abc import Iterator
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
    """Return a merlin repository for each Triton, by its name."""
    return {triton: repositories.small_merlin_repository(triton) for triton in ("24.03", "modern")}


@pytest.fixture(scope="session")
def copies(exported, tmp_path_factory) -> dict[str, Path]:
    """Return a copy of each repository, by the name of its Triton. Each test leaves it as it was."""
    folder = tmp_path_factory.mktemp("copies")
    return {triton: repositories.copy_to_change(path, folder / triton) for triton, path in exported.items()}


@pytest.fixture
def repository(exported, copies) -> Iterator[Path]:
    """A copy, behind hps, to break."""
    yield copies["24.03"]
    repositories.restore_copy(copies["24.03"], exported["24.03"])


@pytest.fixture
def modern(exported, copies) -> Iterator[Path]:
    yield copies["modern"]
    repositories.restore_copy(copies["modern"], exported["modern"])
