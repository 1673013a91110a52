"""Kill the live store's writers by SIGKILL at random moments: nothing acknowledged is lost, applied twice or torn.

    python -m experiments.live_kills [--writer-kills 100] [--machine-kills 90] [--server-kills 10]

    writer    one of two processes that write the store at the same time
    machine   all processes at the same instant: both writers, and a reader in the middle of its transaction
    server    a real tritonserver with all its processes, while clients post events

Whoever was killed before an acknowledgement came sends the same events again, with the same ids, as a careful client does.

After the kills an independent reader, which opens the store's file by itself, checks the log: every acknowledged event is there
under its sequence, no event id twice, no sequence missing. It counts the events of each user and item and compares them with
their records; and the whole state is computed from the log again and compared byte for byte (live/replay.py).
"""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import chain, islice
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Annotated, NamedTuple

import lmdb
import numpy as np
import psutil
import typer

from experiments.harness import RESULTS, Figure, ResultsFolder, finish, read_machine
from live.replay import replay
from perf.command import run
from perf.live.exchange import connect
from perf.live.shop import Shop, copy_repository, read_sequences, serve_copy
from server.processes import find_members
from serving.contract.errors import ServerError
from serving.live.events import HEADER, OBSERVED, EventBatch, EventKind, EventKinds, Flags, unpack
from serving.live.layout import Layout
from serving.live.reader import Reader
from serving.live.sequences import unpack_sequence
from serving.live.store import DATABASES, LAYOUT, PROGRESS, Progress, find_live_folder
from serving.live.writer import Writer

EVENT_KINDS = EventKinds((EventKind("view", 0.1), EventKind("purchase", 1.0, positive=True)))
WRITERS = 2
USERS, ITEMS = 40, 60
LONGEST_RUN_S = 0.05  # of a writer, until it is killed
START_MS = 1_700_000_000_000
FORKING = multiprocessing.get_context("fork")
CLIENTS, SERVED_S = 4, 1.0
Acknowledged = dict[int, bytes]  # sequence -> event id
Posted = tuple[list[int], list[int], list[str]]  # users, items and ids of events
LEAST_KILLS = 200


@dataclass
class FaultCounts:
    """Faults in a store, counted by kind."""

    events: int = 0
    repeated: int = 0  # events that were sent again and were there already
    wrong: Counter[str] = field(default_factory=Counter)

    def __add__(self, other: FaultCounts) -> FaultCounts:
        return FaultCounts(self.events + other.events, self.repeated + other.repeated, self.wrong + other.wrong)


FAULTS = ("lost", "applied twice", "sequences missing", "counts of records", "records that differ from a replay")


def draw_events(rng: np.random.Generator, count: int) -> EventBatch:
    """Return random events of few users and items, each with an id of its own."""
    headers = np.zeros(count, HEADER)
    headers["user_id"], headers["item_id"] = rng.integers(0, USERS, count), rng.integers(0, ITEMS, count)
    headers["time_ms"] = START_MS + rng.integers(0, 10_000_000, count)
    headers["kind"], headers["value"] = rng.integers(0, len(EVENT_KINDS.kinds), count), np.nan
    EVENT_KINDS.decide(headers)
    return EventBatch(headers, [rng.bytes(8) for _ in range(count)], [b""] * count, [b""] * count)


def draw_batches(seed: int) -> Iterator[EventBatch]:
    rng = np.random.default_rng(seed)
    while True:
        yield draw_events(rng, int(rng.integers(1, 40)))


def append_forever(folder: Path, seed: int, acknowledged: Connection, killed: Killed | None) -> None:
    """Append what a killed writer may or may not have written, then new events."""
    writer = Writer(folder, Layout(), EVENT_KINDS.names)
    again = islice(draw_batches(killed.seed), killed.batches, killed.batches + 1) if killed else ()
    for batch in chain(again, draw_batches(seed)):
        sequences = writer.append(batch)
        acknowledged.send(list(zip(sequences.tolist(), batch.event_ids, strict=True)))


def read_forever(folder: Path, seed: int, _: Connection, __: None) -> None:
    reader, rng = Reader(folder), np.random.default_rng(seed)
    while True:
        with reader.snapshot() as snapshot:
            snapshot.read_users(rng.integers(0, USERS, 8))
            snapshot.read_seen(np.unique(rng.integers(0, USERS, 8)))


class Killed(NamedTuple):
    """A writer that was killed. batches: that were acknowledged; the next one may be written or not"""

    seed: int
    batches: int


@dataclass
class Running:
    """A process at work. former: the writer whose last batch it sends first; batches: that were acknowledged"""

    process: multiprocessing.process.BaseProcess
    pipe: Connection
    seed: int
    former: Killed | None
    batches: int = 0

    def find_unacknowledged(self) -> Killed:
        """Return the first batch for which no acknowledgement came."""
        if self.former and not self.batches:
            return self.former
        return Killed(self.seed, self.batches - (self.former is not None))


class Processes:
    """Processes on one store. acknowledged: events that the writers were told are durable"""

    def __init__(self, folder: Path) -> None:
        self.folder, self.acknowledged, self.seed = folder, dict[int, bytes](), 0
        self._running: list[Running] = []

    def start(self, work, killed: Sequence[Killed | None]) -> None:
        """Start a process for each of `killed`, whose work it goes on with; None for new work."""
        for former in killed:
            self.seed += 1
            receiving, sending = FORKING.Pipe(duplex=False)
            process = FORKING.Process(target=work, args=(self.folder, self.seed, sending, former), daemon=True)
            process.start()
            sending.close()
            self._running.append(Running(process, receiving, self.seed, former))

    def listen(self, seconds: float) -> None:
        """Note what is acknowledged for a while."""
        end_s = time.monotonic() + seconds
        while time.monotonic() < end_s:
            for running in self._running:
                with contextlib.suppress(EOFError, OSError):
                    if running.pipe.poll(0.001):
                        self._note(running)

    def kill(self, count: int) -> list[Killed]:
        """Kill the first `count` processes at the same instant, and read which events were acknowledged until then.

        Raises ServerError for one that had ended by itself.
        """
        killed, self._running = self._running[:count], self._running[count:]
        for running in killed:
            running.process.kill()
        for running in killed:
            running.process.join()
            if (code := running.process.exitcode) != -signal.SIGKILL:
                raise ServerError(
                    f"A process on the store ended by itself with exit code {code}; expected it to run until it is "
                    "killed. Its traceback is above."
                )
            with contextlib.suppress(EOFError, OSError):  # the end of the pipe, or an incomplete message
                while True:
                    self._note(running)
        return [running.find_unacknowledged() for running in killed]

    def _note(self, running: Running) -> None:
        """Read one acknowledgement. Raises EOFError or OSError at the end of the pipe."""
        self.acknowledged |= dict(running.pipe.recv())
        running.batches += 1


def kill_processes(folder: Path, writer_kills: int, machine_kills: int, rng: np.random.Generator) -> Acknowledged:
    """Kill writers one at a time, then all processes at once, again and again. Return what was acknowledged."""
    with closing(Writer(folder, Layout(), EVENT_KINDS.names)) as writer:  # loads the loops, which forked processes share
        writer.append(draw_events(rng, 10))
    processes = Processes(folder)
    processes.start(append_forever, [None] * WRITERS)
    for _ in range(writer_kills):
        processes.listen(rng.random() * LONGEST_RUN_S)
        processes.start(append_forever, processes.kill(1))
    killed = processes.kill(WRITERS)
    for _ in range(machine_kills):
        processes.start(append_forever, killed[:WRITERS])
        processes.start(read_forever, [None])
        processes.listen(LONGEST_RUN_S / 2 + rng.random() * LONGEST_RUN_S)
        killed = processes.kill(WRITERS + 1)
    return processes.acknowledged


def kill_server(repo: Path, kills: int, rng: np.random.Generator) -> tuple[FaultCounts, int]:
    """Kill all processes of a real server while clients post, and start it again on the same store.

    Return what is wrong with the store in the end, and how many events were acknowledged.
    """
    acknowledged: Acknowledged = {}
    pending: dict[int, Posted] = {}
    if not kills:
        return FaultCounts(), 0
    with copy_repository(repo) as copy:
        for number in range(kills):
            with serve_copy(copy) as shop:
                acknowledged |= post_until_killed(shop, number, float(rng.random()) * SERVED_S, pending)
        return check_store(find_live_folder(copy), acknowledged), len(acknowledged)


def post_until_killed(shop: Shop, number: int, seconds: float, pending: dict[int, Posted]) -> Acknowledged:
    """Let clients post events until the server dies. pending: what each client got no acknowledgement for, replaced"""
    acknowledged: Acknowledged = {}

    def post(client: int) -> None:
        rng, count = np.random.default_rng((number, client)), 0
        with contextlib.suppress(ServerError), connect(shop.site.grpc_url) as exchange:
            while True:
                if client not in pending:
                    users, items = (rng.choice(known, 4).tolist() for known in (shop.user_ids, shop.item_ids))
                    pending[client] = users, items, [f"{number}-{client}-{count}-{place}" for place in range(4)]
                sequences = read_sequences(exchange.ask(shop.encode_observe(*pending[client])))
                places = [unpack_sequence(sequence).place for sequence in sequences.tolist()]
                acknowledged.update(zip(places, (text.encode() for text in pending.pop(client)[2]), strict=True))
                count += 1

    threads = [threading.Thread(target=post, args=(client,)) for client in range(CLIENTS)]
    for thread in threads:
        thread.start()
    time.sleep(seconds)
    for process in find_members(shop.site.tag or ""):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    for thread in threads:
        thread.join()
    return acknowledged


def check_store(folder: Path, acknowledged: Acknowledged) -> FaultCounts:
    """Read a store's file by itself, without the code that wrote it, and compute its state again."""
    with lmdb.open(str(folder), readonly=True, lock=False, max_dbs=len(DATABASES)) as environment:
        log = {int.from_bytes(key, "big"): value for key, value in read_database(environment, "events").items()}
        users, seeds, items = (decode_ids(read_database(environment, name)) for name in ("users", "seeds", "items"))
        meta = read_database(environment, "meta")
    layout, repeated = Layout.from_json(meta[LAYOUT]), Progress.unpack(meta[PROGRESS]).repeated
    batch = unpack(log.values())
    ids, headers = dict(zip(log, batch.event_ids, strict=True)), batch.headers
    observed = headers["type"] == OBSERVED
    counted = observed & ((headers["flags"] & Flags.COUNTED) != 0)
    of_users = read_event_counts(users, layout.user) - read_event_counts(seeds, layout.user)
    wrong = Counter(
        {
            "lost": sum(ids.get(sequence) != event_id for sequence, event_id in acknowledged.items()),
            "applied twice": len(batch) - len(set(batch.event_ids)),
            "sequences missing": max(log) - len(log),
            "counts of records": count_differing(of_users, Counter(headers["user_id"][counted].tolist()))
            + count_differing(read_event_counts(items, layout.item), Counter(headers["item_id"][observed].tolist())),
            "records that differ from a replay": sum(replay(folder).differing.values()),
        }
    )
    return FaultCounts(len(log), repeated, wrong)


def read_database(environment: lmdb.Environment, name: str) -> dict[bytes, bytes]:
    database = environment.open_db(name.encode(), create=False)
    with environment.begin() as txn:
        return {bytes(key): bytes(value) for key, value in txn.cursor(database)}


def decode_ids(records: dict[bytes, bytes]) -> dict[int, bytes]:
    return {int.from_bytes(key, "little", signed=True): value for key, value in records.items()}


def read_event_counts(records: dict[int, bytes], dtype: np.dtype) -> Counter[int]:
    """Return the `event_count` of records, by id."""
    return Counter({key: int(np.frombuffer(record, dtype)["event_count"][0]) for key, record in records.items()})


def count_differing(one: Counter[int], other: Counter[int]) -> int:
    """Return how many ids have different counts."""
    return sum(one[key] != other[key] for key in one.keys() | other.keys())


def make_figures(counts: FaultCounts, acknowledged: int, kills: dict[str, int]) -> list[Figure]:
    return [
        *(Figure(name=f"SIGKILLs, {name}", values=[float(count)]) for name, count in kills.items()),
        Figure(name="SIGKILLs", values=[float(sum(kills.values()))], at_least=LEAST_KILLS),
        Figure(name="events of the logs", values=[float(counts.events)], at_least=1),
        Figure(name="acknowledged events that were checked", values=[float(acknowledged)], at_least=1),
        Figure(name="events sent again after a kill that were there already", values=[float(counts.repeated)], at_least=1),
        *(Figure(name=kind, values=[float(counts.wrong[kind])], at_most=0) for kind in FAULTS),
    ]


def main(
    repo: Annotated[Path, typer.Option(help="repository of the server that is killed")] = Path("model_repository"),
    writer_kills: Annotated[int, typer.Option(min=0)] = 100,
    machine_kills: Annotated[int, typer.Option(min=0)] = 90,
    server_kills: Annotated[int, typer.Option(min=0)] = 10,
    results: ResultsFolder = RESULTS,
) -> None:
    """Kill writers, everything, and a real server. Exit code 1 when an event was lost, applied twice or torn."""
    machine, rng = read_machine(), np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "shop.live"
        acknowledged = kill_processes(folder, writer_kills, machine_kills, rng)
        counts = check_store(folder, acknowledged)
    of_server, posted = kill_server(repo, server_kills, rng)
    kills = {"writer": writer_kills, "machine": machine_kills, "server": server_kills}
    figures = make_figures(counts + of_server, len(acknowledged) + posted, kills)
    command = f"python -m experiments.live_kills {' '.join(f'--{name}-kills {count}' for name, count in kills.items())}"
    title, conditions = "SIGKILLs while events are written", f"{WRITERS} writers and a reader; {CLIENTS} clients of the server"
    finish("live-kills", title, command, conditions, figures, results, machine)


if __name__ == "__main__":
    run(main, "python -m experiments.live_kills")
