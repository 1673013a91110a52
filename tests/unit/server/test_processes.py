"""Stopping a server ends the processes that belong to it, and no others."""

from __future__ import annotations

import os
import shutil
import subprocess
import time

import psutil
import pytest

from server.processes import STOP_TIMEOUT_S, STUB_NAME, count_lost_stubs, stop_processes, terminate
from serving.contract.errors import ServerError
from tests.tags import draw_tag, run_tagged
from tests.waiting import until


def test_a_shell_that_is_about_to_become_a_stub_is_ended_and_no_other(tmp_path):
    tag, nobody = draw_tag(), 2**22 + 1  # above the largest pid
    starting = subprocess.Popen(["bash", "-c", f"sleep 60; exec triton_python_backend_stub {tag}"])
    looking = subprocess.Popen(["bash", "-c", f"sleep 60; pgrep {tag}"])
    stop_processes(nobody, tag, timeout_s=0)
    assert starting.wait(60) == -9
    assert looking.poll() is None
    looking.kill()
    looking.wait()


def test_a_process_whose_parent_does_not_collect_its_exit_code_counts_as_ended():
    parent = subprocess.Popen(["bash", "-c", "sleep 600 & echo $!; exec sleep 600"], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    child = psutil.Process(int(parent.stdout.readline()))
    until(lambda: psutil.Process(parent.pid).name() == "sleep")  # no shell any more, which would collect it
    started_s = time.monotonic()
    terminate([child])
    took_s, status = time.monotonic() - started_s, child.status()
    parent.kill()
    parent.communicate()
    assert took_s < STOP_TIMEOUT_S
    assert status == psutil.STATUS_ZOMBIE


def test_a_process_of_another_user_is_named_instead_of_a_traceback(tmp_path, monkeypatch):
    """Root may signal every process, so the kernel's refusal is made up here."""

    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    def deny(process: psutil.Process) -> None:
        raise psutil.AccessDenied(process.pid)

    tag = draw_tag()
    with run_tagged(tag) as server:
        with monkeypatch.context() as refused:
            refused.setattr(os, "kill", refuse)
            refused.setattr(psutil.Process, "terminate", deny)
            with pytest.raises(ServerError, match=rf"Process {server.pid} .* belongs to user .*, and user .* may not stop"):
                stop_processes(server.pid, tag, timeout_s=0)
            with pytest.raises(ServerError, match=rf"Process {server.pid} of the server"):
                terminate([psutil.Process(server.pid)])
        stop_processes(server.pid, tag, timeout_s=0)
        assert server.wait(60) < 0


def test_stubs_that_end_one_after_another_are_unloaded_and_one_that_stays_dead_is_lost(tmp_path, monkeypatch):
    sleep, stub = time.sleep, shutil.copy("/bin/sleep", tmp_path / STUB_NAME)
    first, second, other = (subprocess.Popen([stub, "600"]) for _ in range(3))

    def end(process: subprocess.Popen[bytes]) -> None:
        process.kill()
        while psutil.Process(process.pid).status() != psutil.STATUS_ZOMBIE:
            sleep(0.01)

    def unload(_: float) -> None:
        first.wait()
        end(second)

    end(first)
    with monkeypatch.context() as clock:
        clock.setattr(time, "sleep", unload)
        assert count_lost_stubs(os.getpid()) == 0
    assert count_lost_stubs(os.getpid()) == 1  # nobody has waited for the second
    second.wait()
    assert count_lost_stubs(os.getpid()) == 0
    other.kill()
    other.wait()
