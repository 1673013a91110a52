"""Run the Redis node and the Kafka broker that a measured server depends on, and kill, pause and restart them."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import redis

from experiments.tables_feed import serve_broker, spawn
from perf.tune.variant import seal_again
from server.start.ports import find_free_port
from serving.contract.artifacts import STAGE_FILE, find_stage_folder
from serving.contract.errors import ConfigError, ServerError
from serving.contract.generations import read_pinned_generation
from serving.contract.tensors import ENSEMBLE, LIVE_MODELS, STAGES

TOPIC = "shop-events"
LAST_SLOT = 16_383
STARTED_S = 20.0
CHUNK_BYTES = 1 << 16


class RedisNode:
    """One Redis node without persistence, which loses everything when it is killed. By default it is a cluster of its own."""

    def __init__(self, folder: Path, in_cluster: bool = True) -> None:
        self.port = find_free_port()  # Redis takes the port 10,000 above it too, for the cluster's bus
        self.address = f"127.0.0.1:{self.port}"
        self._command = ["redis-server", "--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(folder), "--save", ""]
        self._command += ["--cluster-enabled", "yes"] if in_cluster else []
        self._is_ready = form_cluster if in_cluster else is_answering
        self.start()

    def start(self) -> None:
        """Start the node and wait until it answers. Raises ServerError when it does not, ConfigError without a redis-server."""
        try:
            self._process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL)
        except FileNotFoundError as error:
            raise ConfigError("There is no redis-server on PATH. Install it (apt-get install redis-server).") from error
        self.pid, deadline_s = self._process.pid, time.monotonic() + STARTED_S
        with redis.Redis(port=self.port) as client:
            while not self._is_ready(client):
                if time.monotonic() > deadline_s:
                    self.kill()
                    raise ServerError(f"redis-server did not start at port {self.port} in {STARTED_S:g} s. Is the port free?")
                time.sleep(0.05)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def __enter__(self) -> RedisNode:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


def is_answering(client: redis.Redis) -> bool:
    try:
        return bool(client.ping())
    except redis.ConnectionError:
        return False


def form_cluster(client: redis.Redis) -> bool:
    """Give the node all slots if it has none, and return whether it answers as a cluster."""
    try:
        if b"cluster_slots_assigned:0" in client.execute_command("CLUSTER", "INFO"):
            client.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, LAST_SLOT)
        return b"cluster_state:ok" in client.execute_command("CLUSTER", "INFO")
    except redis.ConnectionError:
        return False


class Broker:
    """librdkafka's mock broker in a process of its own, behind one address that outlives it.

    Each mock chooses its own port, so clients reach it through a forwarder, as through a load balancer. A mock keeps messages
    in memory, unlike a real broker: if it is killed, those that nobody has read yet are lost.
    """

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.start()
        threading.Thread(target=self._accept, daemon=True).start()

    def start(self) -> None:
        receiver, sender = spawn.Pipe()
        self._stop = spawn.Event()  # kept, because the process opens it by its name
        self._process = spawn.Process(target=serve_broker, args=(sender, self._stop), daemon=True)
        self._process.start()
        sender.close()
        host, _, port = receiver.recv().rpartition(":")
        self._target = host, int(port)

    @property
    def pid(self) -> int:
        assert self._process.pid is not None  # it was started
        return self._process.pid

    def kill(self) -> None:
        self._process.kill()
        self._process.join()

    def __enter__(self) -> Broker:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()
        self.kill()

    def _accept(self) -> None:
        with suppress(OSError):  # the listener was closed
            while True:
                client, _ = self._listener.accept()
                try:
                    server = socket.create_connection(self._target, timeout=1)
                except OSError:  # the broker is dead
                    client.close()
                    continue
                server.settimeout(None)
                for source, target in ((client, server), (server, client)):
                    threading.Thread(target=forward, args=(source, target), daemon=True).start()


def forward(source: socket.socket, target: socket.socket) -> None:
    """Copy bytes until either side ends, then end both."""
    with suppress(OSError):
        while data := source.recv(CHUNK_BYTES):
            target.sendall(data)
    for side in (source, target):
        with suppress(OSError):
            side.shutdown(socket.SHUT_RDWR)


def depend_on(repo: Path, brokers: str, nodes: str = "") -> None:
    """Make a repository read events from Kafka and users from Redis, as an export with `[live] brokers` and `redis` does.

    brokers: host:port, comma-separated; nodes: of Redis, in the same form, "" for none
    """
    generation = read_pinned_generation(repo)
    whole = repo / ENSEMBLE / str(generation) / STAGE_FILE
    if whole.exists():  # in the fused layout, where the one model reads users as this file says; `seal_again` seals it too
        change_stage(whole, nodes, {})
    for name in (*STAGES, *LIVE_MODELS):
        settings = {"brokers": brokers, "topic": TOPIC} if name in LIVE_MODELS else {}
        change_stage(find_stage_folder(repo, name, generation) / STAGE_FILE, nodes, settings)
        seal_again(repo, generation, name)


def change_stage(path: Path, nodes: str, settings: dict[str, str]) -> None:
    """Replace a stage.json by one with other nodes of Redis and further settings."""
    stage = json.loads(path.read_text())
    stage |= {"live_redis": nodes, "settings": stage["settings"] | settings}
    path.unlink()  # it is read-only
    path.write_text(json.dumps(stage))


@contextmanager
def keep_paused(pid: int) -> Iterator[None]:
    """Pause a process, and continue it at the end, unless somebody killed it meanwhile."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
