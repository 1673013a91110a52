"""Tables with random rows, folders in shared memory, and tiers over them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from stages.embeddings.config import TableConfig, TiersConfig
from stages.embeddings.tiers import Tiers


def random_rows(rows: int, width: int, seed: int = 0) -> np.ndarray:
    """float32 [rows, width]"""
    return np.random.default_rng(seed).standard_normal((rows, width), dtype=np.float32)


@pytest.fixture
def source(tmp_path: Path) -> Callable[..., str]:
    """source(items=array, …) -> folder of `<table>.npy`"""

    def write(**tables: np.ndarray) -> str:
        folder = tmp_path / "tables"
        folder.mkdir(exist_ok=True)
        for name, array in tables.items():
            np.save(folder / f"{name}.npy", array)
        return str(folder)

    return write


@pytest.fixture
def open_tiers(tmp_path: Path) -> Iterator[Callable[..., Tiers]]:
    """open_tiers(tables, **settings) -> Tiers, closed after the test. Its shared memory lies in the test's own folder."""
    opened: list[Tiers] = []
    shared = tmp_path / "shared"
    shared.mkdir()

    def open_them(tables: TableConfig | tuple[TableConfig, ...], warm: bool = True, **settings) -> Tiers:
        tables = tables if isinstance(tables, tuple) else (tables,)
        settings = {"model": "rank", "arena": "test", "shared_folder": str(shared), **settings}
        opened.append(Tiers(TiersConfig(tables=tables, **settings), warm))
        return opened[-1]

    yield open_them
    for tiers in opened:
        tiers.close()
