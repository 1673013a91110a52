"""Faults and backends of the experiments, with stand-ins for the server and for Redis."""

from __future__ import annotations

import os
import socket
import subprocess
import threading
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from experiments import fault_backends
from experiments.fault_backends import RedisNode
from experiments.fault_load import compare_with_log
from experiments.faults import take_port
from server.start.ports import is_free
from serving.contract.errors import ServerError


def test_a_port_is_taken_once_its_holder_is_gone():
    holder = socket.create_server(("127.0.0.1", 0))
    port = holder.getsockname()[1]
    with subprocess.Popen(["sleep", "60"]) as server, subprocess.Popen(["sleep", "60"]) as supervisor:
        state = SimpleNamespace(pid=server.pid, ports=SimpleNamespace(grpc=port))
        site: Any = SimpleNamespace(supervisor=psutil.Process(supervisor.pid), served=SimpleNamespace(state=state))
        closing = threading.Timer(0.3, holder.close)
        closing.start()
        try:
            with take_port(site):
                assert not is_free(port)
        finally:
            closing.join()
            server.kill()
            supervisor.kill()
    assert is_free(port)


def test_messages_of_kafka_that_are_logged_twice_count_as_doubled():
    logged = Counter({"posted": 1, "posted twice": 2, "message": 1, "message twice": 2, "of an earlier fault": 2})
    acknowledged, messages = {"posted", "posted twice", "lost"}, {"message", "message twice"}
    assert compare_with_log(acknowledged, messages, logged) == (1, 2)


def test_a_redis_that_does_not_answer_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    program = tmp_path / "redis-server"
    program.write_text(f"#!/bin/sh\necho $$ > {tmp_path}/pid\nexec sleep 60\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(fault_backends, "STARTED_S", 0.0)  # it gives up after the first attempt, of some seconds
    with pytest.raises(ServerError, match="redis-server did not start"):
        RedisNode(tmp_path)
    assert not psutil.pid_exists(int((tmp_path / "pid").read_text()))
