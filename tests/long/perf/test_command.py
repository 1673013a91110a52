"""A command of perf ends with the right exit code, and ends the processes that it started."""

import signal
import subprocess
import sys

import pytest

from server.start.environment import PROJECT

WAITING = """
import time
import typer
from perf.command import run

app = typer.Typer()

@app.command()
def wait():
    try:
        print("begun", flush=True)
        time.sleep(60)
    finally:
        print("stopped what it had started", flush=True)

run(app, "wait")
"""


# In the background, or under nohup, the tests ignore signals, and every process started here would inherit that.
HEEDED = """
import signal

signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
"""


def started(code: str, *before: str) -> subprocess.Popen:
    command = [*before, sys.executable, "-c", code]
    process = subprocess.Popen(command, cwd=PROJECT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "begun\n"
    return process


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_command_that_is_stopped_stops_what_it_started(signum):
    process = started(HEEDED + WAITING)
    process.send_signal(signum)
    assert process.communicate(timeout=30)[0] == "stopped what it had started\n"
    assert process.returncode == 128 + signum


def test_under_nohup_a_command_outlives_its_terminal():
    process = started(WAITING, "nohup")
    process.send_signal(signal.SIGHUP)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(1)
    process.terminate()
    process.communicate(timeout=30)
    assert process.returncode == 128 + signal.SIGTERM


MISTAKEN = """
import typer
from perf.command import run
from serving.contract.errors import ConfigError

app = typer.Typer()

@app.command()
def refuse():
    raise ConfigError("there is no run")

run(app, "refuse")
"""


def test_an_error_that_the_caller_can_mend_is_one_line():
    done = subprocess.run([sys.executable, "-c", MISTAKEN], cwd=PROJECT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (2, "error: there is no run\n")
