"""A real server at half of its peak while 10,000 rows/s of its tables are updated.

Four kinds of turns. All of a round get the same requests of `recommend` at the same instants, Poisson at half of the peak:

    quiet      no updates
    unread     10,000 rows/s to topics that nobody reads: what the broker and the publisher take, which belong on other machines
    updated    10,000 rows/s to the server's own topics, the published rows again: what is served stays real
    watched    the same, and new rows of a few items, each looked for in the answers of `rank` until it shows

So updated over unread is what updates cost this machine; updated over quiet has the stand-ins in it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import psutil

from experiments.tiers import feed
from experiments.tiers.traffic import visible_quantile_ms
from experiments.tiers.watch import NEVER_S, Watched, watched, watcher
from export.relayout import relayout
from export.settings import TableSettings
from export.tables import PS_FILE, write_tables
from perf.bench import Bench, new_bench
from perf.load import schedule
from perf.load.open_loop import Outcome, run_load
from perf.load.workload import draw, serialised
from perf.progress import progress
from perf.target import own_server, site_of
from perf.variant import seal_again
from server import processes
from serving.contract.artifacts import stage_folder
from serving.contract.errors import ServerError
from serving.contract.tensors import ENSEMBLE
from serving.tables.config import read_config
from serving.tables.store.tiers import CONFIG_FILE

LOAD_SHARE = 0.5  # of the peak
PEAK_CLIENTS, WINDOW_S = (8, 16, 32), 1.5
TURNS = ("quiet", "unread", "updated", "watched")
RATIOS = (("updated", "unread"), ("updated", "quiet"), ("unread", "quiet"))
SETTLED_S = 0.5  # between two turns
IDLE_S = 4 * NEVER_S  # the last look for a row is over by then
FOUND_S = 8.0  # the updater looks for its topics, which the first message creates
WATCHED_TABLE, OTHER_TABLE = "item_0", "user_0"  # the largest


def bench_served(repo: Path, scratch: Path, seconds: float, rounds: int) -> dict:
    outcomes: dict[str, list[Outcome]] = {turn: [] for turn in TURNS}
    rows_per_s: dict[str, list[float]] = {turn: [] for turn in TURNS}
    with ExitStack() as running:
        step = running.enter_context(progress(2 + rounds))
        step("a server, a broker, who publishes and who watches")
        address, broker_pid = running.enter_context(feed.broker())
        generation = live_repository(repo, scratch / "live", address, scratch / "state")
        tables = stage_folder(scratch / "live", "rank", generation) / "tables"
        server = running.enter_context(own_server(scratch / "live"))
        bench = new_bench(site_of(server.state), "tiers", scratch / "raw")
        config = read_config(tables / CONFIG_FILE)
        watching = watched(bench, tables, WATCHED_TABLE, address, config.model)
        published = what_is_published(address, config.model, tables, watching)
        publisher_pid = running.enter_context(feed.publisher(published))
        running.enter_context(watcher(watching))
        step("the server's peak")
        rate = LOAD_SHARE * max(bench.closed(ENSEMBLE, "grpc", "concurrency", n, WINDOW_S).achieved_rate for n in PEAK_CLIENTS)
        published.go.set()
        load(bench, drawn(bench, rate, FOUND_S))
        cores = Cores({broker_pid: "broker", publisher_pid: "publisher", os.getpid(): "load"}, server.state.tag)
        for number in range(rounds):
            step(f"round {number + 1}")
            requests = drawn(bench, rate, seconds)
            for turn in TURNS if number % 2 == 0 else TURNS[::-1]:
                publish(published, turn)
                time.sleep(SETTLED_S)
                begun_s, rows_before = time.monotonic(), published.count.value
                with cores.counted(turn), watched_while(watching, turn == "watched"):
                    outcomes[turn].append(load(bench, requests))
                rows_per_s[turn].append((published.count.value - rows_before) / (time.monotonic() - begun_s))
        visible_ms = [watching.visible_ms.get() for _ in range(watching.visible_ms.qsize())]
    return described(rate, outcomes, visible_ms, cores) | {
        "rows_per_s_by_round": {turn: np.round(by_round).tolist() for turn, by_round in rows_per_s.items()}
    }


def live_repository(repo: Path, live: Path, brokers: str, state: Path) -> int:
    """`repo` with the code as it is now and tables that are updated -> its generation."""
    generation = relayout(repo, live, "ensemble")
    tables = stage_folder(live, "rank", generation) / "tables"
    for name in (PS_FILE, CONFIG_FILE):
        (tables / name).unlink()
    write_tables(tables, TableSettings(brokers=brokers, state=str(state)), 1, 64 * 1024)
    seal_again(live, generation, "rank")
    return generation


def what_is_published(brokers: str, model: str, tables: Path, watching: Watched) -> feed.Published:
    """Rows of the two largest tables as they are, without those that are watched."""
    arrays = {name: np.load(tables / f"{name}.npy") for name in (WATCHED_TABLE, OTHER_TABLE)}
    keys = {name: np.arange(len(rows)) for name, rows in arrays.items()}
    keys[WATCHED_TABLE] = np.setdiff1d(keys[WATCHED_TABLE], watching.keys)
    rows = {name: array[keys[name]] for name, array in arrays.items()}
    return feed.Published(brokers, model, keys, rows)


@contextmanager
def watched_while(watching: Watched, active: bool) -> Iterator[None]:
    if active:
        watching.go.set()
    yield
    if active:
        watching.go.clear()
        if not watching.idle.wait(IDLE_S):
            raise ServerError(f"Who watches for new rows does not say that it is done within {IDLE_S:g} s. Start again.")


def publish(published: feed.Published, turn: str) -> None:
    """What this kind of turn has published, from now on."""
    published.unread.set() if turn == "unread" else published.unread.clear()
    published.go.clear() if turn == "quiet" else published.go.set()


Requests = tuple[list[bytes], np.ndarray]  # serialised; float64 [N] due at, s


def drawn(bench: Bench, rate: float, seconds: float) -> Requests:
    due_s = schedule.poisson(rate, seconds, bench.rng)
    return serialised(bench.specs[ENSEMBLE], draw(bench.requests, len(due_s), bench.rng)), due_s


def load(bench: Bench, requests: Requests) -> Outcome:
    return run_load(bench.site.grpc_url, *requests)


class Cores:
    """Processor time by process and kind of turn."""

    def __init__(self, names: dict[int, str], tag: str) -> None:
        self._names = names | {process.pid: name_of(process) for process in processes.members(tag)}
        self.by_turn: dict[str, dict[str, float]] = {turn: {} for turn in TURNS}
        self._wall_s = dict.fromkeys(TURNS, 0.0)

    @contextmanager
    def counted(self, turn: str) -> Iterator[None]:
        before, begun_s = self._taken_s(), time.monotonic()
        yield
        self._wall_s[turn] += time.monotonic() - begun_s
        for name, taken_s in self._taken_s().items():
            self.by_turn[turn][name] = self.by_turn[turn].get(name, 0.0) + taken_s - before.get(name, 0.0)

    def _taken_s(self) -> dict[str, float]:
        taken: dict[str, float] = {}
        for pid, name in self._names.items():
            times = psutil.Process(pid).cpu_times()
            taken[name] = taken.get(name, 0.0) + times.user + times.system
        return taken

    def shares(self, turn: str) -> dict[str, float]:
        """Cores that each kind of process took."""
        return {name: round(taken_s / self._wall_s[turn], 3) for name, taken_s in self.by_turn[turn].items()}


def name_of(process: psutil.Process) -> str:
    if process.name().startswith("python"):
        return "updater"
    return "server" if process.name().startswith("tritonserver") else "models"


def described(rate: float, outcomes: dict[str, list[Outcome]], visible_ms: list[float], cores: Cores) -> dict:
    p99_ms = {turn: [p99_ms_of(outcome) for outcome in outcomes[turn]] for turn in TURNS}
    ratios = {f"{turn} / {base}": np.divide(p99_ms[turn], p99_ms[base]) for turn, base in RATIOS}
    result = {
        "rate": round(rate, 1),
        "p50_ms": {turn: round(float(np.median([_quantile_ms(o, 50) for o in outcomes[turn]])), 2) for turn in TURNS},
        "p99_ms": {turn: round(float(np.median(ms)), 2) for turn, ms in p99_ms.items()},
        "p99_ms_by_round": {turn: np.round(ms, 1).tolist() for turn, ms in p99_ms.items()},
        "p99_ratio": {name: round(float(np.median(by_round)), 2) for name, by_round in ratios.items()},
        "p99_ratio_by_round": {name: np.round(by_round, 2).tolist() for name, by_round in ratios.items()},
        "visible": len(visible_ms),
        "visible_p50_ms": visible_quantile_ms(visible_ms, 50),
        "visible_p99_ms": visible_quantile_ms(visible_ms, 99),
        "errors": {turn: sum(sum(outcome.errors.values()) for outcome in outcomes[turn]) for turn in TURNS},
        "cores": {turn: cores.shares(turn) for turn in TURNS},
    }
    print("recommend at {rate}/s: median over rounds of p50 {p50_ms} ms, p99 {p99_ms} ms".format(**result))
    for name, by_round in result["p99_ratio_by_round"].items():
        print(f"p99 {name:17} {result['p99_ratio'][name]:.2f}  by round {by_round}")
    print("{visible} new rows in an answer of rank after p50 {visible_p50_ms} ms, p99 {visible_p99_ms} ms".format(**result))
    for turn, shares in result["cores"].items():
        print(f"cores, {turn:8} " + "  ".join(f"{name} {share:.2f}" for name, share in shares.items()))
    return result


def p99_ms_of(outcome: Outcome) -> float:
    return _quantile_ms(outcome, 99)


def _quantile_ms(outcome: Outcome, q: float) -> float:
    return float(np.percentile(outcome.latency_ns, q, method="inverted_cdf")) / 1e6
