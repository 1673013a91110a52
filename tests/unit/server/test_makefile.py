"""What make says about the server it started, without running any of it."""

from __future__ import annotations

import os
import subprocess

import pytest

from server.environment import PROJECT


@pytest.mark.parametrize(("given", "told"), [([], "make stop"), (["GRPC_PORT=9001"], "make stop GRPC_PORT=9001")])
def test_run_ends_with_how_to_stop_the_server_it_started_and_no_other(given, told):
    clean = {name: value for name, value in os.environ.items() if name not in ("GRPC_PORT", "MAKEFLAGS", "MAKEOVERRIDES")}
    dry = ["make", "--dry-run", "run", *given]
    printed = subprocess.run(dry, cwd=PROJECT, env=clean, capture_output=True, text=True, check=True).stdout
    assert f'echo "Stop it:  {told}"' in printed.splitlines()
