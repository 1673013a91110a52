"""The liveness probe of a server's container, which asks the gateway beside it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from repository.triton.code import PROJECT
from server.start.ports import find_free_port
from tests.pages import serve_page


def probe(url: str) -> subprocess.CompletedProcess[str]:
    """Run the probe as Kubernetes does. A proxy of the environment must not come between."""
    command = [sys.executable, "-S", str(PROJECT / "deploy" / "alive.py"), url]
    return subprocess.run(command, env={"http_proxy": "http://127.0.0.1:9"}, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(("status", "code"), [(200, 0), (503, 1), (500, 0)])
def test_the_gateway_says_whether_its_server_answers(status, code):
    with serve_page(lambda: b'{"ready": false}', status) as url:
        assert probe(f"{url}/readyz").returncode == code


def test_a_gateway_that_is_not_there_is_no_reason_to_restart_the_server():
    done = probe(f"http://127.0.0.1:{find_free_port()}/readyz")
    assert (done.returncode, done.stderr) == (0, "")
    assert "no gateway says whether the server answers" in done.stdout
