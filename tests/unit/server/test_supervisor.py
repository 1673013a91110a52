"""A process kept running: crashes are followed by starts, ends are not."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from server import supervisor
from server.start.environment import PROJECT
from server.supervised import start_supervised
from tests.tags import draw_tag
from tests.waiting import until

TRACE = """
import sys, time
with open("trace", "a") as trace:
    print(time.monotonic(), file=trace)
starts = len(open("trace").readlines())
"""


def kept(folder: Path, code: str, *options: str) -> subprocess.Popen:
    command = [sys.executable, "-m", supervisor.__name__, *options, str(folder), sys.executable, "-c", TRACE + code]
    return subprocess.Popen(command, cwd=PROJECT, stdout=subprocess.PIPE, text=True)


def starts_s(folder: Path) -> list[float]:
    trace = folder / "trace"
    return [float(line) for line in trace.read_text().splitlines()] if trace.exists() else []


def test_crashes_are_followed_by_starts_after_longer_and_longer_pauses(tmp_path):
    process = kept(tmp_path, "sys.exit(7 if starts < 4 else 0)")
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    pauses_s = (0.2, 0.4, 0.8)
    lines = [json.loads(line) for line in said.splitlines()]
    assert [line["message"] for line in lines] == [f"ended, exit code 7; started again in {pause} s" for pause in pauses_s]
    assert {(line["level"], line["logger"]) for line in lines} == {("WARNING", "server.supervisor")}
    times = starts_s(tmp_path)
    assert len(times) == 4
    assert all(later - earlier >= pause for earlier, later, pause in zip(times, times[1:], pauses_s, strict=False))


def test_a_real_time_signal_which_has_no_name_is_survived(tmp_path):
    process = kept(tmp_path, "import os, signal; starts > 1 or os.kill(os.getpid(), signal.SIGRTMIN + 1)")
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert json.loads(said)["message"] == "ended, killed by signal 35; started again in 0.2 s"


@pytest.mark.parametrize(("code", "n_crashes", "status"), [("time.sleep(60)", 0, 128 + signal.SIGTERM), ("sys.exit(7)", 4, 7)])
def test_told_to_stop_it_ends_and_leaves_nothing(tmp_path, code, n_crashes, status):
    """While the process runs, and between two starts: the pause after four crashes is 1.6 s long."""
    process = kept(tmp_path, code)
    assert process.stdout is not None
    for _ in range(n_crashes):
        assert process.stdout.readline().count("ended, exit code 7; started again in")
    until(lambda: starts_s(tmp_path))
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)  # returns once nobody holds its output any more
    assert process.returncode == status


def test_with_rounds_what_ends_well_runs_again_after_the_pause(tmp_path):
    process = kept(tmp_path, "", "--every", "0.3")
    until(lambda: len(starts_s(tmp_path)) >= 3)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    times = starts_s(tmp_path)
    assert all(later - earlier >= 0.3 for earlier, later in pairwise(times))


def test_a_log_that_logrotate_cuts_short_goes_on_at_its_beginning(tmp_path):
    log = tmp_path / "logs" / "helper.log"
    os.mkfifo(tmp_path / "cut")
    process = start_supervised(log, ["-c", "print('before', flush=True); open('cut').read(); print('after')"], tmp_path)
    until(lambda: log.read_text() == "before\n")
    os.truncate(log, 0)
    (tmp_path / "cut").write_text("")
    assert process.wait(timeout=60) == 0
    assert log.read_bytes() == b"after\n"


def test_what_cannot_be_started_is_tried_again(tmp_path):
    folder = tmp_path / "later"
    process = kept(folder, "sys.exit(0)")
    assert process.stdout is not None
    assert process.stdout.readline().count("not started, [Errno 2] No such file or directory")
    folder.mkdir()
    process.communicate(timeout=60)
    assert (process.returncode, len(starts_s(folder))) == (0, 1)


def test_what_was_just_started_shows_the_arguments_by_which_it_is_found(tmp_path):
    """A server that is stopped at once takes it along."""
    for _ in range(5):
        process = start_supervised(tmp_path / "log", ["-c", "pass", tag := draw_tag()])
        command = Path(f"/proc/{process.pid}/cmdline").read_bytes()
        process.kill()
        process.wait()
        assert tag.encode() in command
