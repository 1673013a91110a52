"""A generation carries the code that made its files: none is published where the code changed since the process began."""

from __future__ import annotations

from pathlib import Path

import pytest

from repository.publish import Staging
from repository.triton import code
from repository.triton.code import copy_serving_code
from serving.contract.errors import ExportError

CHANGED, NEW = (code.PROJECT / "serving" / "stages" / name for name in ("rank.py", "new.py"))


@pytest.mark.parametrize(
    "sources",
    [
        code.SOURCES | {CHANGED: (0, 0)},
        {path: stamp for path, stamp in code.SOURCES.items() if path != CHANGED},
        code.SOURCES | {NEW: (0, 0)},
    ],
    ids=["changed", "added", "removed"],
)
def test_code_that_changed_since_the_process_began_is_not_published(
    tmp_path, monkeypatch, sources: dict[Path, tuple[int, int]]
):
    """The refusal comes before the training, and again when the code is copied."""
    copy_serving_code(tmp_path / "as begun", ("serving.stages.rank",))
    monkeypatch.setattr(code, "SOURCES", sources)
    expected = rf"({CHANGED}|{NEW}) changed since this process began, .* start the command again\."
    with pytest.raises(ExportError, match=expected), Staging(tmp_path / "repo"):
        pass
    assert not (tmp_path / "repo").exists()
    with pytest.raises(ExportError, match=expected):
        copy_serving_code(tmp_path / "copy", ("serving.stages.rank",))
    assert not (tmp_path / "copy").exists()
