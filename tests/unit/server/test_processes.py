"""Stopping a server ends the processes that belong to it, and no others."""

from __future__ import annotations

import subprocess

from server.processes import stop_processes


def test_a_shell_that_is_about_to_become_a_stub_is_ended_and_no_other(tmp_path):
    tag, nobody = f"triton_test_{tmp_path.name}_", 2**22 + 1  # above the largest pid
    starting = subprocess.Popen(["bash", "-c", f"sleep 60; exec triton_python_backend_stub {tag}"])
    looking = subprocess.Popen(["bash", "-c", f"sleep 60; pgrep {tag}"])
    stop_processes(nobody, tag, timeout_s=0)
    assert starting.wait(60) == -9
    assert looking.poll() is None
    looking.kill()
    looking.wait()
