"""A real Redis on loopback: one node that is a whole cluster."""

from __future__ import annotations

import atexit
import signal
import socket
import subprocess
import time
from pathlib import Path

import redis


def free_port() -> int:
    """Below 55536: the cluster bus takes the port 10,000 above."""
    for port in range(21_000, 55_000, 7):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) and probe.connect_ex(("127.0.0.1", port + 10_000)):
                return port
    raise OSError("no free port")


class RedisServer:
    def __init__(self, folder: Path) -> None:
        self.folder, self.port = folder, free_port()
        self.address = f"127.0.0.1:{self.port}"
        folder.mkdir(parents=True, exist_ok=True)
        self.start()

    def start(self) -> None:
        place = ["--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self.folder)]
        command = ["redis-server", *place, "--save", "", "--cluster-enabled", "yes"]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        atexit.register(self._process.kill)  # also when a start that failed never gets to `stop`
        self.client = redis.Redis(port=self.port)
        self._until(self.client.ping)
        if b"cluster_slots_assigned:16384" not in self.client.execute_command("CLUSTER", "INFO"):
            self.client.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
        self._until(lambda: b"cluster_state:ok" in self.client.execute_command("CLUSTER", "INFO"))

    @staticmethod
    def _until(condition) -> None:
        deadline = time.monotonic() + 20
        while True:
            try:
                if condition():
                    return
            except redis.ConnectionError:
                pass
            assert time.monotonic() < deadline, "redis-server did not start"
            time.sleep(0.02)

    def freeze(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def stop(self) -> None:
        self.thaw()
        self._process.terminate()
        self._process.wait(10)
