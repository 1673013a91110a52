"""Measure a real server at half of its peak while 10,000 rows/s of its tables are updated.

Four kinds of turns. All turns of a round get the same requests of `recommend` at the same instants:

    quiet      no updates
    unread     10,000 rows/s to topics that nobody reads: the cost of broker and publisher, which belong on other machines
    updated    10,000 rows/s to the server's own topics; the published rows again, so that answers stay real
    watched    the same, and new rows of a few items, each polled for in the answers of `rank` until it shows

Updated over unread is what updates cost this machine; updated over quiet includes broker and publisher.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from experiments.harness import Figure
from experiments.tables_feed import ROWS_PER_S, Published, run_beside, run_broker, run_publisher, spawn
from experiments.tables_large import LOAD_SHARE, Requests, compute_p99_ms, draw_requests, measure_peak
from export.relayout import relayout
from export.settings import TableSettings
from export.tables import PS_FILE, write_tables
from perf.bench import Bench, new_bench
from perf.load.open_loop import Outcome, run_load
from perf.load.workload import Arrays, ask, compute_stage_inputs, draw
from perf.target import own_server, read_site
from perf.tune.variant import seal_again
from server.status.health import open_local_client
from serving.contract.artifacts import find_stage_folder
from serving.contract.errors import ServerError
from serving.contract.tensors import ModelSpec, unpack_records
from serving.stages.features.ids import ItemIndex
from serving.tables.config import read_config
from serving.tables.leveled import CONFIG_FILE
from serving.tables.updates.publisher import Publisher

TURNS = ("quiet", "unread", "updated", "watched")
RATIOS = (("updated", "quiet"), ("updated", "unread"), ("unread", "quiet"))
MOST_VISIBLE_MS = 100.0
MOST_P99_UNDER_UPDATES = 1.2
LEAST_OF_ROWS = 0.95  # of those to be updated: a publisher that stops would let every other bound be met
SETTLED_S = 0.5  # between two turns
TOPICS_FOUND_S = 8.0  # the first message creates the topics, which the updater then finds
WATCHED_TABLE, OTHER_TABLE = "item_0", "user_0"  # the largest
WATCHED = 32  # candidates
WATCH_PAUSE_S = 0.1
VISIBLE_TIMEOUT_S = 5.0
IDLE_S = 4 * VISIBLE_TIMEOUT_S  # by then the last poll for a row is over


@dataclass
class Watched:
    """Input of the watching process. keys: int64 [WATCHED] rows of `table`, each of one candidate alone."""

    url: str
    brokers: str
    model: str
    table: str
    spec: ModelSpec
    generation: int
    inputs: Arrays
    columns: np.ndarray  # int [WATCHED]: the candidates in the answer
    keys: np.ndarray
    rows: np.ndarray  # float32 [WATCHED, D] as exported
    go: Any = field(default_factory=spawn.Event)
    stop: Any = field(default_factory=spawn.Event)
    idle: Any = field(default_factory=spawn.Event)
    visible_ms: Any = field(default_factory=spawn.Queue)


def measure_updates(repo: Path, scratch: Path, seconds: float, rounds: int, step: Callable[[str], None]) -> list[Figure]:
    outcomes: dict[str, list[Outcome]] = {turn: [] for turn in TURNS}
    rows_per_s: list[float] = []
    with ExitStack() as running:
        step("a server, a broker, a publisher and a watcher")
        brokers, _ = running.enter_context(run_broker())
        generation = make_live_repository(repo, scratch / "live", brokers, scratch / "state")
        tables = find_stage_folder(scratch / "live", "rank", generation) / "tables"
        server = running.enter_context(own_server(scratch / "live"))
        bench = new_bench(read_site(server.state), "updates", scratch / "raw")
        model = read_config(tables / CONFIG_FILE).model
        watched = choose_watched(bench, tables, WATCHED_TABLE, brokers, model)
        published = choose_published(brokers, model, tables, watched)
        running.enter_context(run_publisher(published))
        running.enter_context(run_watcher(watched))
        step("the server's peak")
        rate = LOAD_SHARE * measure_peak(bench)
        published.go.set()
        send_load(bench, draw_requests(bench, rate, TOPICS_FOUND_S))
        for number in range(rounds):
            step(f"round {number + 1}")
            requests = draw_requests(bench, rate, seconds)
            for turn in TURNS if number % 2 == 0 else TURNS[::-1]:
                set_publishing(published, turn)
                time.sleep(SETTLED_S)
                begun_s, rows_before = time.monotonic(), published.count.value
                with watch_while(watched, turn == "watched"):
                    outcomes[turn].append(send_load(bench, requests))
                if turn == "updated":
                    rows_per_s.append((published.count.value - rows_before) / (time.monotonic() - begun_s))
        visible_ms = [watched.visible_ms.get() for _ in range(watched.visible_ms.qsize())]
    return make_figures(outcomes, visible_ms, rows_per_s)


def make_live_repository(repo: Path, live: Path, brokers: str, state: Path) -> int:
    """Write `repo` with the code as it is now and tables that are updated; return its generation."""
    generation = relayout(repo, live, "ensemble")
    tables = find_stage_folder(live, "rank", generation) / "tables"
    for name in (PS_FILE, CONFIG_FILE):
        (tables / name).unlink()
    write_tables(tables, TableSettings(brokers=brokers, state=str(state)), 1, 64 * 1024)
    seal_again(live, generation, "rank")
    return generation


def choose_published(brokers: str, model: str, tables: Path, watched: Watched) -> Published:
    """Return the rows of the two largest tables as they are, without those that are watched."""
    arrays = {name: np.load(tables / f"{name}.npy") for name in (WATCHED_TABLE, OTHER_TABLE)}
    keys = {name: np.arange(len(rows)) for name, rows in arrays.items()}
    keys[WATCHED_TABLE] = np.setdiff1d(keys[WATCHED_TABLE], watched.keys)
    return Published(brokers, model, keys, {name: array[keys[name]] for name, array in arrays.items()})


def set_publishing(published: Published, turn: str) -> None:
    published.unread.set() if turn == "unread" else published.unread.clear()
    published.go.clear() if turn == "quiet" else published.go.set()


def send_load(bench: Bench, requests: Requests) -> Outcome:
    return run_load(bench.site.grpc_url, *requests)


@contextmanager
def watch_while(watched: Watched, active: bool) -> Iterator[None]:
    if active:
        watched.go.set()
    yield
    if active:
        watched.go.clear()
        if not watched.idle.wait(IDLE_S):
            raise ServerError(f"The watcher of new rows is still busy after {IDLE_S:g} s. Start again.")


def choose_watched(bench: Bench, tables: Path, table: str, brokers: str, model: str) -> Watched:
    """Choose candidates of one `rank` request whose rows no other candidate has. tables: the rank model's own."""
    request = draw(bench.requests, 1, bench.rng)
    inputs = compute_stage_inputs(bench.site.grpc_url, bench.specs, bench.site.generation, request)["rank"]
    candidate_ids = unpack_records(bench.specs["rank"].inputs, inputs)["candidate_ids"]
    positions = ItemIndex.load(tables.parent / "item_ids.npy").find_positions(candidate_ids)[0]
    keys = np.load(tables.parent / "item_rows.npy")[positions, 0].astype(np.int64)
    unique_keys, columns, counts = np.unique(keys, return_index=True, return_counts=True)
    chosen = np.flatnonzero(counts == 1)[-WATCHED:]
    rows = np.load(tables / f"{table}.npy", mmap_mode="r")[unique_keys[chosen]]
    spec, site = bench.specs["rank"], bench.site
    return Watched(
        site.grpc_url, brokers, model, table, spec, site.generation, inputs, columns[chosen], unique_keys[chosen], rows
    )


@contextmanager
def run_watcher(watched: Watched) -> Iterator[None]:
    """Run the process that watches while `go` is set."""

    def stop() -> None:
        watched.stop.set()
        watched.go.set()

    with run_beside("The watcher of new rows", watch, (watched,), stop):
        yield


def watch(watched: Watched) -> None:
    sender = Publisher(watched.brokers, watched.model, {watched.table: watched.rows.shape[1]})
    rng, number = np.random.default_rng(2), 0
    with open_local_client(watched.url) as client:
        while not watched.stop.is_set():
            watched.idle.set()
            watched.go.wait()
            watched.idle.clear()
            watched.visible_ms.put(1e3 * measure_visible_s(watched, number, client, sender, rng))
            number = (number + 1) % len(watched.keys)
            time.sleep(WATCH_PAUSE_S)


def measure_visible_s(watched: Watched, number: int, client: Any, sender: Publisher, rng: np.random.Generator) -> float:
    """Return seconds from a new row's acknowledgement to the first answer that uses it; infinite when it never does."""

    def read_score() -> float:
        answer = ask(client, watched.spec, str(watched.generation), watched.inputs)
        return float(unpack_records(watched.spec.outputs, answer)["rank_scores"][0, watched.columns[number]])

    before = read_score()
    row = watched.rows[number] + rng.standard_normal(watched.rows.shape[1], dtype=np.float32)
    sender.publish(watched.table, watched.keys[number : number + 1], row[None])
    sender.flush()
    acknowledged_s = time.monotonic()
    while time.monotonic() < acknowledged_s + VISIBLE_TIMEOUT_S:
        if read_score() != before:
            return time.monotonic() - acknowledged_s
    return float("inf")


def make_figures(outcomes: dict[str, list[Outcome]], visible_ms: list[float], rows_per_s: list[float]) -> list[Figure]:
    """Return the figures; ratios are taken within a round. visible_ms: infinite for a row that never showed"""
    p99_ms = {turn: [compute_p99_ms(outcome) for outcome in outcomes[turn]] for turn in TURNS}
    errors = sum(sum(outcome.errors.values()) for of_turn in outcomes.values() for outcome in of_turn)
    p50_visible_ms, p99_visible_ms = np.percentile(visible_ms, (50, 99), method="inverted_cdf").tolist()
    least_rows = LEAST_OF_ROWS * ROWS_PER_S
    ratios = [
        Figure(
            name=f"updates: p99 of recommend at half of the peak, {turn} over {base}",
            values=np.divide(p99_ms[turn], p99_ms[base]).tolist(),
            at_most=MOST_P99_UNDER_UPDATES if (turn, base) == RATIOS[0] else None,
        )
        for turn, base in RATIOS
    ]
    return [
        Figure(name="updates: rows updated", values=rows_per_s, unit="/s", at_least=least_rows),
        Figure(name="updates: p50 until a row shows in an answer of rank", values=[p50_visible_ms], unit="ms"),
        Figure(
            name="updates: p99 until a row shows in an answer of rank",
            values=[p99_visible_ms],
            unit="ms",
            at_most=MOST_VISIBLE_MS,
        ),
        *ratios,
        Figure(name="updates: failed requests", values=[float(errors)], at_most=0.0),
    ]
