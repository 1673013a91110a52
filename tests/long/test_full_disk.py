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
    limited = f"import resource as r; r.setrlimit(r.RLIMIT_FSIZE, ({ROOM}, {ROOM})); from export.__main__ import main; main()"
    command = [sys.executable, "-c", limited, "relayout", "--layout", "ensemble", str(small_repository()), str(small_disk)]
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True)
    assert done.returncode == 1
    assert [line for line in done.stderr.splitlines() if line.startswith("error: ") and "cannot be written" in line]
    assert "Nothing was published. Free some room" in done.stderr
    assert "Traceback" not in done.stderr
    assert read_pinned_generation(small_disk) == 1
    assert [path.name for path in small_disk.glob("rank/[0-9]*")] == ["1"]
    assert not list(small_disk.parent.glob(".*.staging"))
