"""An observer of a server finds out which of its processes died."""

from __future__ import annotations

import shutil
import subprocess
import sys

from server.ports import find_free_ports
from server.processes import STUB_PROGRAM
from server.state import ServerState
from server.watch import Observer

# A parent that never asks what became of its child, as tritonserver does not.
SERVER = """
import subprocess, sys, time
stub = subprocess.Popen([sys.argv[2], "600"])
stub.kill()
print("killed", flush=True)
time.sleep(600)
"""


def test_a_stub_that_died_before_anybody_looked_is_missed(tmp_path):
    stub = shutil.copy(shutil.which("sleep"), tmp_path / STUB_PROGRAM)
    tag = f"triton_test_{tmp_path.name}_"
    with subprocess.Popen([sys.executable, "-c", SERVER, tag, stub], stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout.readline() == "killed\n"
            state = ServerState(server.pid, tag, tmp_path, tmp_path / "log", find_free_ports())
            assert Observer(state).find_fault() == "1 of its Python model process(es) died"
        finally:
            server.kill()
