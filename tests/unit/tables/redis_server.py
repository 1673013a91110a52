"""A real Redis on loopback: one node that is a whole cluster, or several that share one."""

from __future__ import annotations

import atexit
import itertools
import random
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import redis

LAST_SLOT = 16_383
NODE_TIMEOUT_MS = 1_000  # after which the others take a node for dead


def free_port() -> int:
    """Return a free port whose cluster bus, 10,000 above, is free as well; at random, for parallel tests.

    Both are below 32,768, where Linux takes ports for outgoing connections from: one of these may come at any moment.
    """
    for port in random.sample(range(20_000, 22_700), 100):
        with socket.socket() as own, socket.socket() as bus:
            try:
                own.bind(("127.0.0.1", port))
                bus.bind(("127.0.0.1", port + 10_000))
            except OSError:
                continue
            return port
    raise OSError("no free port")


def wait_for_redis(client: redis.Redis, condition: Callable[[], object] | None = None) -> None:
    """Wait until a server answers, or until a condition on its answers holds."""
    deadline = time.monotonic() + 60
    while True:
        try:
            if (condition or client.ping)():
                return
        except redis.ConnectionError:
            pass
        assert time.monotonic() < deadline, "redis-server did not start"
        time.sleep(0.02)


class RedisServer:
    """slots: the first and the last that are this node's."""

    def __init__(self, folder: Path, slots: tuple[int, int] = (0, LAST_SLOT)) -> None:
        self.folder, self.port, self._slots = folder, free_port(), slots
        self.address = f"127.0.0.1:{self.port}"
        folder.mkdir(parents=True, exist_ok=True)
        self.launch()
        if slots == (0, LAST_SLOT):
            self.wait_ready()

    def start(self) -> None:
        self.launch()
        self.wait_ready()

    def launch(self) -> None:
        place = ["--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self.folder)]
        command = ["redis-server", *place, "--save", "", "--cluster-enabled", "yes"]
        command += ["--cluster-node-timeout", str(NODE_TIMEOUT_MS)]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        atexit.register(self._process.kill)  # also when a start that failed never gets to `stop`
        self.client = redis.Redis(port=self.port)
        wait_for_redis(self.client)
        if b"cluster_slots_assigned:0" in self.client.execute_command("CLUSTER", "INFO"):
            self.client.execute_command("CLUSTER", "ADDSLOTSRANGE", *self._slots)

    def wait_ready(self) -> None:
        wait_for_redis(self.client, lambda: b"cluster_state:ok" in self.client.execute_command("CLUSTER", "INFO"))

    def freeze(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def stop(self) -> None:
        self.thaw()
        self._process.terminate()
        self._process.wait(10)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(10)

    def restore(self) -> None:
        """Bring it back to what it was when new, whatever was done to it."""
        self.thaw()
        if self._process.poll() is not None:
            self.start()
        self.client.config_set("maxmemory", 0)
        self.client.flushall()


class RedisCluster:
    """Nodes that share the slots. `address` names them all."""

    def __init__(self, folder: Path, n_nodes: int = 3) -> None:
        bounds = [LAST_SLOT * node // n_nodes for node in range(n_nodes + 1)]
        slots = [(first + (node > 0), last) for node, (first, last) in enumerate(itertools.pairwise(bounds))]
        self.nodes = [RedisServer(folder / str(node), own) for node, own in enumerate(slots)]
        self.address = ",".join(node.address for node in self.nodes)
        for node in self.nodes[1:]:
            self.nodes[0].client.execute_command("CLUSTER", "MEET", "127.0.0.1", node.port)
        self.wait_ready()

    def wait_ready(self) -> None:
        for node in self.nodes:
            node.wait_ready()

    def fields(self) -> int:
        """Rows that the cluster holds."""
        return sum(node.client.hlen(name) for node in self.nodes for name in node.client.scan_iter())

    def kill(self) -> None:
        for node in self.nodes:
            node.kill()

    def start(self) -> None:
        """Again, with nothing but their slots."""
        for node in self.nodes:
            node.launch()
        self.wait_ready()

    def stop(self) -> None:
        for node in self.nodes:
            node.stop()
