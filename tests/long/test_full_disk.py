"""An export that finds no room says so, and leaves what was published."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from server.start.environment import PROJECT
from serving.contract.generations import read_pinned_generation
from tests.repositories import small_repository

ROOM = 50_000  # bytes: the largest files of a generation have more


@pytest.fixture
def small_disk(tmp_path) -> Path:
    """A repository of one generation. Files may not grow beyond ROOM while the test exports: that stands for a full disk."""
    return shutil.copytree(small_repository(), tmp_path / "repository")


def test_an_export_to_a_full_disk_is_one_clear_message_and_changes_nothing(small_disk):
    limit = f"import resource as r, runpy; r.setrlimit(r.RLIMIT_FSIZE, ({ROOM}, {ROOM}))"
    limited = f"{limit}; runpy.run_module('export', run_name='__main__')"
    command = [sys.executable, "-c", limited, "relayout", "--layout", "ensemble", str(small_repository()), str(small_disk)]
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith("error: The new generation cannot be written: [Errno 27] File too large")
    assert f"files are written into {small_disk.parent}, where" in done.stderr
    assert "Servers keep the generation that they serve. Free space" in done.stderr
    assert "Traceback" not in done.stderr
    assert read_pinned_generation(small_disk) == 1
    assert [path.name for path in small_disk.glob("rank/[0-9]*")] == ["1"]
    assert not list(small_disk.parent.glob(".*.staging"))
