"""Faults around a server: shared memory, processor and disk taken away, the live writer and the broker killed and paused.

Shoppers get right answers or popular items meanwhile, no acknowledged event is lost, and the server recovers. More faults, and
how long each lasts: experiments/faults.py.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from confluent_kafka import Producer

from experiments.fault_backends import TOPIC, Broker, depend_on, keep_paused
from experiments.fault_load import ITEM
from experiments.faults import fill_disk, throttle
from live.archive import list_segments, read_log
from perf.observe import read_samples
from server import watch
from server.processes import SHM_DIR, find_members, find_server_members
from server.start.environment import PROJECT
from server.start.ports import find_free_port
from server.state import ServerState, read_known_servers
from serving.live.store import find_live_folder
from serving.stages.live.measurements import PREFIX, SILENT
from serving.tables.store.memory import ARENA_PREFIX
from tests.repositories import copy_small_fused_repository
from tests.server.support.gateways import USER
from tests.server.support.supervised import Supervised, stopped_after

THROTTLED_S = 8.0
SHM_MIB = 256
EVENT_MS = 1_600_000_000_000  # within the exported log: the live clock stays where it is


STARTS = """
import sys
from pathlib import Path
from server import watch
from server.helpers import gateway
from server.launcher import TritonServer
repo, run_dir, port = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
state = gateway.follow(TritonServer(repo, run_dir=run_dir).start().state, port, "", run_dir)
watch.start_supervisor(state, run_dir)
"""


@pytest.fixture(scope="module")
def broker() -> Iterator[Broker]:
    with Broker() as broker:
        yield broker


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """Yield a folder on the disk: the files of other tests may be in /dev/shm, which the shop does not see."""
    with TemporaryDirectory(prefix="faults-") as name:
        yield Path(name)


@pytest.fixture(scope="module")
def shop(folder, broker) -> Iterator[Supervised]:
    """Yield a running shop. If this user may make a mount namespace, the shop runs in its own, whose /dev/shm has SHM_MIB."""
    repo, run_dir, port = copy_small_fused_repository(folder / "repository"), folder / "run", find_free_port()
    depend_on(repo, broker.address)
    command = [sys.executable, "-c", STARTS, str(repo), str(run_dir), str(port)]
    if subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode == 0:
        mount = f"mount -t tmpfs -o size={SHM_MIB}m tmpfs {SHM_DIR} && exec"
        command = ["unshare", "--mount", "--propagation", "private", "sh", "-c", f'{mount} "$@"', "sh", *command]
    subprocess.run(command, cwd=PROJECT, check=True, timeout=300)
    (state,) = read_known_servers(run_dir)
    with stopped_after(state, repo, run_dir, port) as shop:
        yield shop


def lists_of(shop: Supervised) -> dict[int, list]:
    """Return the lists of eight users. Fails if a fallback gave an answer."""
    lists = {}
    for user in range(1, 9):
        params = {"user": user, "k": 5}
        answer = shop.http.get("/v1/recommendations", params=params, headers={"x-deadline-ms": "5000"}).json()
        assert answer["degraded"] == [], answer
        lists[user] = [item["id"] for item in answer["items"]]
    return lists


@contextmanager
def throttled(state: ServerState) -> Iterator[None]:
    with ExitStack() as stack:
        try:
            stack.enter_context(throttle(state.tag))
        except OSError as error:
            pytest.skip(f"this user may make no control group that limits processors: {error}")
        yield


def test_a_server_with_a_tenth_of_a_core_is_slow_but_never_wrong_and_is_left_alone(shop):
    before, state, seen = lists_of(shop), shop.state, Counter[tuple[str, ...]]()
    with throttled(state):
        until_s = time.monotonic() + THROTTLED_S
        while time.monotonic() < until_s:
            for user, items in before.items():
                answer = shop.http.get("/v1/recommendations", params={"user": user, "k": 5})
                assert answer.status_code == 200
                seen[tuple(answer.json()["degraded"])] += 1
                assert answer.json()["degraded"] == ["gateway_fallback"] or [i["id"] for i in answer.json()["items"]] == items
    assert seen.total() >= len(before)
    shop.recover()
    assert shop.state.pid == state.pid, watch.read_last_lines(shop.run_dir, shop.grpc_port, 20)
    assert lists_of(shop) == before


class Events:
    """Posts events of users and an item that nobody asks about, so that they change no answer."""

    def __init__(self, shop: Supervised, prefix: str) -> None:
        self.statuses, self._shop, self._prefix, self._count = Counter[int](), shop, prefix, 0
        self.refused: list[str] = []  # ids
        self.acknowledged: list[str] = []

    def post(self) -> int:
        self._count += 1
        return self._send(f"{self._prefix}-{self._count}")

    def post_until(self, stop: threading.Event) -> None:
        while not stop.wait(0.01):
            self.post()

    def send_again(self) -> None:
        while self.refused:
            assert self._send(self.refused.pop()) in (200, 502, 503)

    def check(self) -> None:
        """Fail unless the log has every acknowledged event once."""
        found = Counter(event_id for _, batch in read_log(find_live_folder(self._shop.repo)) for event_id in batch.event_ids)
        assert {found[event_id.encode()] for event_id in self.acknowledged} == {1}

    def _send(self, event_id: str) -> int:
        user_id = 10**9 + int(event_id.rpartition("-")[2])  # the same when it is sent again
        event = {"user": user_id, "item": ITEM, "id": event_id, "timestamp": EVENT_MS}
        status = self._shop.http.post("/v1/events", json=event).status_code
        self.statuses[status] += 1
        (self.acknowledged if status == 200 else self.refused).append(event_id)
        return status


def test_a_paused_live_writer_loses_no_event_and_is_replaced(shop):
    state, events, stop = shop.state, Events(shop, "writer"), threading.Event()
    assert events.post() == 200
    posting = threading.Thread(target=events.post_until, args=(stop,))
    posting.start()
    with keep_paused(shop.find_stub("observe").pid):
        shop.wait(lambda: shop.state.pid != state.pid)
    shop.recover()
    stop.set()
    posting.join()
    assert events.statuses.keys() <= {200, 502, 503}
    assert events.refused  # those in flight, and those that came while the server was down
    events.send_again()
    events.check()


def test_a_full_disk_refuses_events_and_nothing_else(shop):
    """Events alone do not make the gateway give up on the server, and the archive keeps what it cannot move."""
    before, events, live = lists_of(shop), Events(shop, "disk"), find_live_folder(shop.repo)
    with fill_disk(shop.state.tag, live):
        while len(events.refused) < 20:  # more than open a circuit breaker
            events.post()
        assert lists_of(shop) == before
        assert shop.is_ready()
        command = [sys.executable, "-m", "live", "compact", "--repo", str(shop.repo), "--keep-days", "0"]
        # Not by preexec_fn, which runs gRPC's handlers of forks beside its threads: they may abort the child.
        writes_nothing = ["prlimit", "--fsize=0:unlimited"]
        done = subprocess.run([*writes_nothing, *command], cwd=PROJECT, capture_output=True, text=True)
        assert (done.returncode, "Traceback" in done.stderr) == (1, False), done.stderr
        assert list_segments(live) == []
    assert events.statuses.keys() <= {200, 503}
    events.send_again()
    assert not events.refused
    subprocess.run(command, cwd=PROJECT, check=True)
    assert list_segments(live)
    events.check()
    assert lists_of(shop) == before


def test_messages_wait_for_a_broker_that_is_paused_or_killed(shop, broker):
    """Its clients find it again behind the same address. Without it the server answers, and takes events by itself."""
    before, events = lists_of(shop), Events(shop, "rest")
    producer = Producer({"bootstrap.servers": broker.address, "reconnect.backoff.max.ms": 200, "log_level": 0})

    def send(event_id: str) -> None:
        event = {"user_id": 2 * 10**9, "item_id": ITEM, "event_id": event_id, "timestamp_ms": EVENT_MS}
        # To one partition: after the kill it has fewer messages than were read, which shows that the topic began anew.
        producer.produce(TOPIC, json.dumps(event).encode(), partition=0)

    def is_logged(event_id: str) -> bool:
        ids = [found for _, batch in read_log(find_live_folder(shop.repo)) for found in batch.event_ids]
        return ids.count(event_id.encode()) == 1

    def is_reported_down() -> bool:
        samples = read_samples(f"http://127.0.0.1:{shop.state.ports.metrics}/metrics")
        values = {name: value for (name, _), value in samples.items()}
        return values.get(f"{PREFIX}_kafka_broker_down") == 1 and values.get(f"{PREFIX}_{SILENT}", -1) >= 0

    send("kafka-before")
    shop.wait(lambda: is_logged("kafka-before"))
    with keep_paused(broker.pid):
        send("kafka-paused")
        shop.wait(is_reported_down)
        assert events.post() == 200
        assert lists_of(shop) == before
    shop.wait(lambda: is_logged("kafka-paused"))
    broker.kill()
    send("kafka-killed")
    assert events.post() == 200
    assert lists_of(shop) == before
    assert shop.is_ready()
    broker.start()
    shop.wait(lambda: is_logged("kafka-killed"))
    events.check()


def read_log_lines(shop: Supervised) -> list[str]:
    return watch.log_path(shop.run_dir, shop.grpc_port).read_text(errors="replace").splitlines()


def fill(path: Path) -> None:
    """Write to a file until its file system is full. Raises OSError then."""
    with path.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(1 << 16))


def opened_rows(state: ServerState) -> set[str]:
    """Return the names of the shared-memory files of embedding rows that the server's processes have mapped."""
    maps = [Path(f"/proc/{process.pid}/maps").read_text() for process in find_server_members(state.tag)]
    paths = {line.split()[-1] for text in maps for line in text.splitlines() if f"{SHM_DIR}/{ARENA_PREFIX}" in line}
    return {Path(path).name for path in paths}


def test_shared_memory_whose_files_are_removed_changes_no_answer_and_is_made_anew_once_there_is_room(shop):
    """While shared memory is full, a killed stage cannot start again, and shoppers get popular items."""
    before, state = lists_of(shop), shop.state
    supervisor = next(process for process in find_members(state.tag) if "server.watch" in process.cmdline())
    folder = Path(f"/proc/{supervisor.pid}/root{SHM_DIR}")  # /dev/shm of the server's namespace
    files = [*folder.glob(f"{state.tag}*"), *(path for path in map(folder.joinpath, opened_rows(state)) if path.exists())]
    assert len(files) >= len(find_server_members(state.tag)) - 1  # at least one region of every stub
    for path in files:
        path.unlink()
    assert lists_of(shop) == before  # processes keep what they have mapped
    assert shop.is_ready()
    assert shop.state.pid == state.pid
    is_namespace_of_its_own = not folder.samefile(SHM_DIR)
    if is_namespace_of_its_own:
        with pytest.raises(OSError, match="No space left"):
            fill(folder / "filler")
    n_lines = len(read_log_lines(shop))
    shop.find_stub("observe").kill()  # makes the supervisor restart the server, which needs shared memory
    if is_namespace_of_its_own:
        shop.wait(lambda: any("restart failed" in line for line in read_log_lines(shop)[n_lines:]))
        assert not shop.is_ready()
        assert shop.ask()["degraded"] == ["gateway_fallback"]
        (folder / "filler").unlink()
    shop.wait(lambda: shop.state.pid != state.pid)
    shop.recover()
    assert lists_of(shop) == before
    event = {"user": USER, "item": before[USER][-1]}
    assert shop.http.post("/v1/events", json=event).status_code == 200
