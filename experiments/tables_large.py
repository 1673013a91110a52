"""Measure `recommend` over a table far larger than its RAM, against a server with all rows in RAM.

Two servers serve the repository with the large table in its rank stage (tables_large_model.py). One has all rows in RAM, the
other a tenth of them: it waits for the rows that it lacks, so that answers are exact. The candidates of every request have keys
drawn by Zipf's law; all else is the repository's own.

The servers take turns, under two loads: one client, and open-loop arrivals at half of the peak of the server that waits. Under
the second load all get the same requests at the same instants. Each server goes through one sequence of keys at its own pace,
so in one turn they look up different keys.
"""

from __future__ import annotations

import os
import shutil
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from experiments.harness import Figure, draw_zipf_keys
from experiments.tables_device import read_through
from experiments.tables_lookups import FROM_MEMORY
from experiments.tables_workload import (
    RAM_SHARE,
    TABLE,
    WAITS,
    WIDTH,
    choose_levels,
    compute_ram_share,
    make_settings,
    write_table,
)
from export.relayout import relayout
from perf.bench import Bench, new_bench
from perf.load import schedule
from perf.load.open_loop import Outcome, run_load
from perf.load.workload import draw, serialise
from perf.observe import REPORTED_AFTER_S, read_samples
from perf.target import Turns, own_server, read_site, take_turns
from perf.tune.variant import seal_again
from serving.contract.artifacts import find_stage_folder, read_stage
from serving.contract.errors import ConfigError, ServerError
from serving.contract.generations import read_pinned_generation
from serving.contract.tensors import ENSEMBLE
from serving.stages.rank import TABLES_FOLDER
from serving.tables.config import LevelsConfig, read_config
from serving.tables.leveled import CONFIG_FILE

LARGE = "item_0"  # the table of the repository that the large one replaces
MODEL = Path(__file__).with_name("tables_large_model.py")
KEYS = 80_000  # requests with keys of their own
WARM_CLIENTS, WARM_S = 8, 5.0
LOAD_SHARE, PEAK_CLIENTS, WINDOW_S = 0.5, (8, 16, 32), 1.5  # of the peak
MOST_OF_ALL_IN_RAM = 2.0
ROWS_LOOKED_UP, BYTES_HELD = "recommender_table_rows_total", "recommender_table_resident_bytes"

Requests = tuple[list[bytes], np.ndarray]  # serialised; the instants at which they are due, float64 [N] seconds


@dataclass
class Side:
    """One server. p99_ms: by load, a value per round."""

    case: str
    bench: Bench
    turns: Turns
    p99_ms: dict[str, list[float]] = field(default_factory=lambda: {"one client": [], "half of the peak": []})

    def read_answers(self) -> Counter[str]:
        """Count the rows of the large table so far, by what answered."""
        answers: Counter[str] = Counter()
        for answer, rows in self.read_metric(ROWS_LOOKED_UP, "answer"):
            answers[answer] += int(rows)
        return answers

    def read_ram_share(self, rows: int) -> float:
        """Return memory over the large table's bytes: RocksDB of every instance, and L2, which they share."""
        l2_bytes = [int(n_bytes) for level, n_bytes in self.read_metric(BYTES_HELD, "level") if level == "l2"]
        return compute_ram_share(rows, max(l2_bytes), processes=len(l2_bytes))

    def read_metric(self, name: str, label: str) -> list[tuple[str, float]]:
        """Return the label and the value of each sample of the large table. Raises ServerError where there is none."""
        with self.turns.turn():
            time.sleep(REPORTED_AFTER_S)
            samples = read_samples(self.bench.site.metrics_url)
        labelled = [
            (dict(pair.split("=", 1) for pair in labels.split(",")), value)
            for (metric, labels), value in samples.items()
            if metric == name
        ]
        values = [(labels[label], value) for labels, value in labelled if labels["table"] == TABLE]
        if not values:
            raise ServerError(f"{self.case}: the server's metrics lack {name} of {TABLE}. Expected a rank stage over it.")
        return values

    def measure_round(self, requests: Requests) -> None:
        with self.turns.turn():
            one = self.bench.measure_clients(1, WINDOW_S)
            self.p99_ms["one client"].append(one.latency.p99_ms)
            outcome = run_load(self.bench.site.grpc_url, *requests)
        if outcome.errors:
            raise ServerError(f"Requests failed: {dict(outcome.errors)}. Expected none: the p99 of the others says nothing.")
        self.p99_ms["half of the peak"].append(compute_p99_ms(outcome))


def measure_large(
    repo: Path,
    folder: Path,
    scratch: Path,
    rows: int,
    rng: np.random.Generator,
    exponent: float,
    seconds: float,
    rounds: int,
    step: Callable[[str], None],
) -> list[Figure]:
    source = write_table(folder, rows, rng)
    keys = draw_zipf_keys(rows, exponent, (KEYS, read_candidate_count(repo)), rng).astype(np.int32)
    with ExitStack() as running:
        sides = []
        for number, case in enumerate(choose_levels(rows)):
            step(f"a server, {case}")
            sides.append(serve_case(repo, source, scratch / str(number), rows, case, keys, running))
        read_through(source)
        step("their peaks")
        peaks = {}
        for side in sides:  # all servers, so that all are equally warm
            with side.turns.turn():
                peaks[side.case] = measure_peak(side.bench)
        in_ram, waits = sides
        rate, before = LOAD_SHARE * peaks[WAITS], waits.read_answers()
        for number in range(rounds):
            step(f"round {number + 1}")
            requests = draw_requests(waits.bench, rate, seconds)
            for side in sides if number % 2 == 0 else sides[::-1]:
                side.measure_round(requests)
        return make_figures(waits, before, in_ram, rows)


def read_candidate_count(repo: Path) -> int:
    return read_stage(find_stage_folder(repo, "rank", read_pinned_generation(repo))).axes.candidates


def serve_case(repo: Path, source: str, scratch: Path, rows: int, case: str, keys: np.ndarray, running: ExitStack) -> Side:
    """Start a server and warm its caches; it is suspended until its turn."""
    make_large_repository(repo, scratch, source, rows, case, keys)
    server = running.enter_context(own_server(scratch / "repository"))
    bench = new_bench(read_site(server.state), case, scratch / "raw")
    bench.measure_clients(WARM_CLIENTS, WARM_S)
    return Side(case, bench, running.enter_context(take_turns(server.state.tag)))


def make_large_repository(repo: Path, scratch: Path, source: str, rows: int, case: str, keys: np.ndarray) -> None:
    """Write `scratch`/repository: `repo` with the code as it is now, its rank stage over the large table."""
    generation = relayout(repo, scratch / "repository", "ensemble")
    folder = find_stage_folder(scratch / "repository", "rank", generation)
    published, links = read_own_tables(folder), scratch / "tables"
    assert published.source is not None
    links.mkdir()
    for table in published.tables:
        (links / f"{table.name}.npy").symlink_to(Path(published.source, f"{table.name}.npy").resolve())
    (links / f"{TABLE}.npy").symlink_to(Path(source, f"{TABLE}.npy").resolve())
    large = make_settings(rows, source, l2_rows=choose_levels(rows)[case])
    others = tuple(replace(table, l1_rows=0, l2_rows=table.rows) for table in published.tables if table.name != LARGE)
    arena = f"bench-large-{os.getpid()}-{scratch.name}"
    (folder / "large").mkdir()
    config = replace(large, tables=(*large.tables, *others), source=str(links), arena=arena)
    config.write(folder / "large" / CONFIG_FILE)
    np.save(folder / "large" / "keys.npy", keys)
    shutil.copyfile(MODEL, folder / "model.py")
    seal_again(scratch / "repository", generation, "rank")


def read_own_tables(folder: Path) -> LevelsConfig:
    """Read the settings of a rank stage's own tables. Raises ConfigError where the large table cannot replace one."""
    config = read_config(folder / TABLES_FOLDER / CONFIG_FILE)
    widths = {table.name: table.width for table in config.tables}
    if widths.get(LARGE) != WIDTH:
        raise ConfigError(
            f"{folder} has the tables {widths}. Expected {LARGE} of width {WIDTH}. Export with --config experiments/wide.toml."
        )
    return config


def measure_peak(bench: Bench) -> float:
    return max(bench.measure_clients(clients, WINDOW_S).achieved_rate for clients in PEAK_CLIENTS)


def draw_requests(bench: Bench, rate: float, seconds: float) -> Requests:
    due_s = schedule.draw_poisson(rate, seconds, bench.rng)
    return serialise(bench.specs[ENSEMBLE], draw(bench.requests, len(due_s), bench.rng)), due_s


def compute_p99_ms(outcome: Outcome) -> float:
    return float(np.percentile(outcome.latency_ns, 99, method="inverted_cdf")) / 1e6


def make_figures(side: Side, before: Counter[str], all_in_ram: Side, rows: int) -> list[Figure]:
    """Return the figures of the server that waits for misses. before: its answers before the rounds"""
    after = side.read_answers()
    if after.total() > KEYS * read_candidate_count(side.bench.site.repo):
        raise ServerError(f"{side.case}: {after.total():,.0f} rows were looked up, more than were drawn. Raise KEYS.")
    answers = {answer: count - before[answer] for answer, count in after.items()}
    memory_share = (answers["l1"] + answers["l2"]) / sum(answers.values())
    name, (least, most) = f"large: {side.case}", FROM_MEMORY
    ratios = [
        Figure(
            name=f"{name}, p99 of recommend over all in RAM, {load}",
            values=np.divide(ms, all_in_ram.p99_ms[load]).tolist(),
            at_most=MOST_OF_ALL_IN_RAM,
        )
        for load, ms in side.p99_ms.items()
    ]
    return [
        Figure(name=f"{name}, RAM over the rows' bytes", values=[round(side.read_ram_share(rows), 4)], at_most=RAM_SHARE),
        Figure(name=f"{name}, rows from memory", values=[memory_share], at_least=least, at_most=most),
        *ratios,
    ]
