"""Temporary folders: they are gone at the end, and those of killed processes when the next process needs one."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pandas as pd
import pytest

from serving.contract.scratch import PREFIX, hold_scratch, remove_left_scratch
from tests.interrupting import called_on_return
from training.features.rows import hold_rows

HOLD = """
from pathlib import Path
from serving.contract.scratch import hold_scratch
with hold_scratch() as folder:
    Path(folder, "events").write_text("of a user")
    print(folder, flush=True)
    input()
"""


@pytest.fixture
def temporary(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def start_holder() -> tuple[subprocess.Popen, Path]:
    process = subprocess.Popen([sys.executable, "-c", HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def test_what_a_killed_process_left_is_removed_by_the_next_one(temporary):
    process, folder = start_holder()
    with process, hold_scratch() as own:
        assert (folder / "events").exists()  # it is alive
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert set(temporary.iterdir()) == {own, folder}
        with hold_scratch() as other:
            assert set(temporary.iterdir()) == {own, other}
    assert list(temporary.iterdir()) == []


def test_only_own_folders_that_nobody_holds_are_removed(temporary):
    (temporary / "elsewhere").mkdir()
    (temporary / f"{PREFIX}link").symlink_to(temporary / "elsewhere")
    (temporary / f"{PREFIX}left").mkdir()
    with hold_scratch() as own:  # removes the one that was left
        assert remove_left_scratch() == 0
        assert own.is_dir()
    assert {path.name for path in temporary.iterdir()} == {"elsewhere", f"{PREFIX}link"}


def test_a_folder_that_another_process_takes_for_a_left_one_before_it_is_locked_is_replaced(temporary):
    taken = list[Path]()

    def take() -> None:
        if not taken:
            taken.extend(temporary.iterdir())
            assert remove_left_scratch() == 1

    with called_on_return(take, tempfile.mkdtemp), hold_scratch() as own:
        assert own.is_dir()
        assert own not in taken


def test_training_rows_in_files_do_not_outlive_a_kill_for_long(temporary):
    with hold_rows(2, lambda part: pd.DataFrame({"user": [1, 2][part]}), None, most_in_memory=1) as rows:
        assert list(rows.folder.glob("*.parquet"))
        assert [path.name.startswith(PREFIX) for path in temporary.iterdir()] == [True]
