"""The record of rounds of continuous training: one that is killed is told from one that runs."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from repository.rounds import RUNNING_FILE, mark_round, read_round, read_running, record_round
from serving.contract.locks import hold_lock
from serving.contract.rounds import ROUND_LOCK_FILE, make_scratch_prefix, remove_abandoned
from serving.contract.tensors import ENSEMBLE
from tests.present import present

ROUND = """
import sys, time
from pathlib import Path
from repository.rounds import mark_round
with mark_round(Path(sys.argv[1])):
    print("runs", flush=True)
    time.sleep(600)
"""


def begin_round(repo: Path) -> subprocess.Popen:
    """Return a process in which a round runs."""
    process = subprocess.Popen([sys.executable, "-c", ROUND, str(repo)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "runs\n"
    return process


@pytest.mark.parametrize("reaped", [True, False])
def test_a_round_that_is_killed_has_failed_and_one_that_runs_has_not(tmp_path, reaped):
    record_round(tmp_path, "waits", "0 events are new")
    with begin_round(tmp_path) as process:
        assert present(read_running(tmp_path)).pid == process.pid
        assert present(read_round(tmp_path)).outcome == "waits"
        began_s = present(read_running(tmp_path)).began_s
        process.kill()
        if reaped:
            process.wait()
        else:
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # the kernel keeps its number until somebody asks how
        assert read_running(tmp_path) is None
        ended = present(read_round(tmp_path))
    assert (ended.outcome, ended.ended_s) == ("failed", began_s)
    assert f"never ended: process {process.pid} " in ended.report


def test_the_next_round_records_that_the_one_before_was_killed(tmp_path):
    process = begin_round(tmp_path)
    process.kill()
    process.wait()
    present(process.stdout).close()
    with mark_round(tmp_path):
        assert present(read_round(tmp_path)).outcome == "failed"
        assert f"process {process.pid} " in present(read_round(tmp_path)).report
        assert present(read_running(tmp_path)).pid != process.pid
    assert read_running(tmp_path) is None
    assert present(read_round(tmp_path)).outcome == "failed"


@pytest.mark.parametrize("changed", [{"pid": 2**22 + 1}, {"created_s": 0.0}], ids=["gone", "number used again"])
def test_whether_a_process_is_gone_is_known_on_its_own_machine_alone(tmp_path, changed):
    with mark_round(tmp_path):
        mark = json.loads((tmp_path / RUNNING_FILE).read_text()) | changed
        for machine, is_gone in ((mark["machine"], True), ("another", False)):
            (tmp_path / RUNNING_FILE).write_text(json.dumps(mark | {"machine": machine}))
            assert (read_running(tmp_path) is None) == is_gone
            assert (read_round(tmp_path) is not None) == is_gone


def test_a_mark_that_cannot_be_read_is_of_a_round_that_may_run_until_the_next_one(tmp_path):
    (tmp_path / RUNNING_FILE).write_text("{")
    assert present(read_running(tmp_path)).machine == "an unknown machine"
    with mark_round(tmp_path):
        assert "on an unknown machine" in present(read_round(tmp_path)).report
    assert read_running(tmp_path) is None


def test_a_round_that_ends_by_an_error_leaves_no_mark(tmp_path):
    with pytest.raises(KeyError), mark_round(tmp_path):
        raise KeyError("dataset")
    assert read_running(tmp_path) is None


def test_what_killed_rounds_and_exports_left_is_removed_unless_one_runs(tmp_path):
    repo = tmp_path / "model_repository"
    others = [
        tmp_path / name for name in (".another.follow-abcd1234", ".model_repository.follow-notes", "model_repository.live")
    ]
    for folder in (repo, *others):
        folder.mkdir()
    scratch = Path(tempfile.mkdtemp(dir=tmp_path, prefix=make_scratch_prefix(repo)))
    with hold_lock(repo / ROUND_LOCK_FILE):
        assert remove_abandoned(repo) == 0
        assert scratch.is_dir()
    assert remove_abandoned(repo) == 1
    assert not scratch.exists()
    assert all(folder.is_dir() for folder in others)
    staging = tmp_path / ".model_repository.staging"
    (staging / "preprocess" / "1").mkdir(parents=True)
    with hold_lock(tmp_path / ".model_repository.lock"):
        assert remove_abandoned(repo) == 0
        assert staging.is_dir()
    assert remove_abandoned(repo) == 1
    assert not staging.exists()
    scratch.mkdir()
    shutil.rmtree(repo)  # its live store, and what is to be erased, may outlive it
    assert remove_abandoned(repo) == 1


def test_a_staging_folder_inside_a_repository_is_left_to_exports_because_one_elsewhere_may_write_it(tmp_path, caplog):
    """A repository that is a mount of its own is shared, and the lock of its exports is beside it on each machine."""
    repo = tmp_path / "model_repository"
    staging = repo / ENSEMBLE / ".staging"
    staging.mkdir(parents=True)
    assert remove_abandoned(repo) == 0
    assert staging.is_dir()
    assert f"{staging} stays, with events of users" in caplog.text
