"""The rows that these tests look up, and what they look at."""

from __future__ import annotations

import numpy as np

from serving.tables.config import LevelsConfig
from serving.tables.leveled import LeveledTables
from serving.tables.levels.redis_store import RedisStore
from tests.unit.tables.conftest import random_rows

ROWS, WIDTH = 200, 4
TIMEOUT_MS = 500
PATIENT_MS = 5_000  # where no test is about time


def right(tiers: LeveledTables, rows: np.ndarray | None = None, degraded: bool | None = None) -> bool:
    """Assert that every row is right; keys beyond the table get the default. Return whether the look-up was as `degraded` says.

    degraded: None where both are right
    """
    rows = random_rows(ROWS, WIDTH) if rows is None else rows
    answer = tiers.lookup("items", np.arange(ROWS + 1))
    np.testing.assert_array_equal(answer.values, np.concatenate([rows, np.zeros((1, WIDTH), np.float32)]))
    return degraded is None or answer.degraded == degraded


def version(number: int) -> np.ndarray:
    return np.full((ROWS, WIDTH), number, np.float32)


def redis_rows(config: LevelsConfig, keys: np.ndarray | None = None) -> np.ndarray:
    """Return the rows of `keys`, by default of all, as Redis itself holds them: float32 [N, D]."""
    assert config.redis is not None
    store = RedisStore(config.redis, config.model, {"items": WIDTH})
    rows, found = store.read({"items": np.arange(ROWS) if keys is None else keys})[0]["items"]
    store.close()
    assert found is None
    return rows
