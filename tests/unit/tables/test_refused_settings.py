"""Settings of embedding tables that cannot work, and how long a level that is down is left alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from serving.contract.errors import ArtifactError, ConfigError, DependencyError
from serving.tables.config import LevelsConfig, TableConfig, UpdateConfig, read_config
from serving.tables.levels.breaker import FIRST_PAUSE_S, LONGEST_PAUSE_S, Breaker
from serving.tables.levels.source import Source
from tests.unit.tables.conftest import random_rows

PARTIAL = TableConfig("items", rows=100, width=4, l2_rows=30, default=-1.0)


# --- settings and parts -------------------------------------------------------------------------------------------------------
def test_breaker_pauses_longer_and_longer():
    now = [0.0]
    breaker = Breaker(lambda: now[0])
    assert breaker.closed
    pause_s = FIRST_PAUSE_S
    for _ in range(10):
        breaker.record_failure(DependencyError("down"))
        assert not breaker.closed
        now[0] += pause_s
        assert breaker.closed
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
    breaker.record_success()
    assert breaker.closed
    assert breaker.failures == 10


def test_source_of_another_shape_is_refused(source):
    folder = source(items=random_rows(10, 3))
    with pytest.raises(ArtifactError, match=r"Expected float32 \[10, 4\]"):
        Source(Path(folder), (TableConfig("items", 10, 4),))


@pytest.mark.parametrize(
    ("tables", "more", "message"),
    [
        ((PARTIAL,), {}, "no L3"),
        ((), {}, "one or more tables"),
        ((PARTIAL, PARTIAL), {"source": "x"}, "unique names"),
        ((PARTIAL,), {"source": "x", "updates": UpdateConfig()}, "lost when L2 evicts them"),
    ],
)
def test_settings_that_cannot_work_are_refused(tables, more, message):
    with pytest.raises(ConfigError, match=message):
        LevelsConfig("rank", tables, "x", **more)


@pytest.mark.parametrize("wrong", [{"rows": 0}, {"width": 0}, {"l2_rows": -1}, {"default": (1.0, 2.0)}, {"name": "a.b"}])
def test_tables_that_cannot_be_are_refused(wrong):
    with pytest.raises(ConfigError):
        TableConfig(**{"name": "items", "rows": 5, "width": 4, **wrong})


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"model": "rank", "tables": [{"nope": 1}], "arena": "x"}'])
def test_unreadable_settings_are_refused(tmp_path, text):
    (tmp_path / "levels.json").write_text(text)
    with pytest.raises(ConfigError, match="does not describe embedding tables"):
        read_config(tmp_path / "levels.json")
