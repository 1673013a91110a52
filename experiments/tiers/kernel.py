"""A real repository over a table far larger than its RAM: p99 of a request against all rows in RAM.

In one process: the four stages as `recommend` runs them, and the rank stage among them, which reads the table.

The candidates' item ids become keys of the large table, drawn by Zipf's law: a catalogue of that many items. Everything else is
the repository's own: the requests, the other tables, the network. Beside the cases stands what the SSD alone takes (floor.py).
"""

from __future__ import annotations

import os
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from experiments.tiers.big import WAITS, cases_of, shares
from experiments.tiers.device import read_through
from experiments.tiers.floor import WithRawReads
from experiments.tiers.large_catalogue import over
from experiments.tiers.native_device import NativeDevice
from experiments.tiers.ram import ram_share
from experiments.tiers.traffic import TABLE, WIDTH, opened, settings, warm, warm_keys, write_table, zipf_keys
from perf.load.workload import Arrays, draw, read_requests
from perf.progress import progress
from serving.contract.artifacts import stage_folder
from serving.contract.errors import ConfigError
from serving.pipeline import Pipeline
from serving.stages.rank import TABLES_FOLDER, Rank
from serving.tables.config import TiersConfig, read_config
from serving.tables.metrics import TableCounts
from serving.tables.store.tiers import CONFIG_FILE, Tiers

LARGE = "item_0"  # whose place the large table takes
FLOOR = "all in RAM, and raw reads of what that waits for"
WARM_REQUESTS, REQUESTS, ROUNDS, DRAWN = 1_500, 250, 8, 200  # of each case; REQUESTS in every round
REST_OF_REQUEST_S = 0.002  # the network, a server


@dataclass
class Timed:
    """The rank stage, and how long each of its calls took."""

    rank: Rank | WithRawReads
    ms: list[float] = field(default_factory=list)

    def faults(self, inputs: Arrays) -> dict[int, str]:
        return self.rank.faults(inputs)

    def __call__(self, inputs: Arrays) -> Arrays:
        begun_s = time.perf_counter()
        outputs = self.rank(inputs)
        self.ms.append(1e3 * (time.perf_counter() - begun_s))
        return outputs


@dataclass
class Case:
    name: str
    tiers: Tiers
    rank: Timed
    pipeline: Pipeline
    ms: list[float] = field(default_factory=list)  # of the whole request
    before: TableCounts | None = None

    @property
    def counts(self) -> TableCounts:
        return self.tiers.metrics().tables[TABLE].counts

    @property
    def lacking(self) -> int:
        """Rows that were not in memory, so far."""
        return self.tiers._tables[TABLE].lacked

    def warm(self, warming: np.ndarray, requests: list[Arrays]) -> None:
        warm(self.tiers, warming)
        for number in range(WARM_REQUESTS):
            self.pipeline(requests[number % len(requests)])
        self.tiers.settle()
        self.rank.ms.clear()
        self.before = self.counts

    def ask(self, request: Arrays) -> None:
        begun_s = time.perf_counter()
        self.pipeline(request)
        self.ms.append(1e3 * (time.perf_counter() - begun_s))


def bench_kernel(repo: Path, folder: Path, rows: int, rng: np.random.Generator, exponent: float) -> list[dict]:
    source = write_table(folder, rows, rng)
    with ExitStack() as open_now:
        pipeline = Pipeline.load(repo)
        open_now.callback(pipeline.close)
        drawn = draw(read_requests(repo, pipeline.info.generation), DRAWN, rng)
        requests = [{name: values[row : row + 1] for name, values in drawn.items()} for row in range(DRAWN)]
        warming = warm_keys(rows, exponent, rng)
        keys = zipf_keys(rows, exponent, (WARM_REQUESTS + REQUESTS * ROUNDS, pipeline.info.axes.candidates), rng)
        with progress(2 + len(cases_of(rows)) + ROUNDS) as step:
            step("the tables are opened")
            cases = open_cases(pipeline, tiers_of(repo, pipeline.info.generation), rows, source, keys, open_now)
            waits = next(case for case in cases if case.name == WAITS)
            floor = with_floor(pipeline, cases, keys, source, open_now)
            read_through(source)
            for case in cases:
                step(f"warmed: {case.name}")
                case.warm(warming, requests)
            for number in range(ROUNDS):
                step(f"round {number + 1}")
                for case in cases:
                    for asked in range(REQUESTS):
                        before = waits.lacking
                        case.ask(requests[asked % DRAWN])
                        if case is waits:
                            floor.misses.append(waits.lacking - before)
                        time.sleep(REST_OF_REQUEST_S)
        return [described(case, cases[0]) for case in cases]


def open_cases(
    pipeline: Pipeline, own: TiersConfig, rows: int, source: str, keys: np.ndarray, open_now: ExitStack
) -> list[Case]:
    small = Path(open_now.enter_context(tempfile.TemporaryDirectory()))
    link_tables(own, source, small)
    cases = []
    for name, (threshold, levels) in cases_of(rows).items():
        large = settings(rows, source, threshold, **levels)
        tiers = open_now.enter_context(opened(with_large(own, large, small, f"bench-kernel-{os.getpid()}-{len(cases)}")))
        rank = Timed(over(pipeline.stages["rank"], tiers, keys))
        cases.append(Case(name, tiers, rank, replace(pipeline, stages=pipeline.stages | {"rank": rank})))
    return cases


def with_floor(pipeline: Pipeline, cases: list[Case], keys: np.ndarray, source: str, open_now: ExitStack) -> WithRawReads:
    """Appends FLOOR, over the first case's tiers, to the cases."""
    device = NativeDevice(f"{source}/{TABLE}.npy")
    open_now.callback(device.close)
    for count in (1, 2):  # compiles, for one thread and for several
        device.read(np.arange(count))
    floor = WithRawReads(over(pipeline.stages["rank"], cases[0].tiers, keys), device)
    rank = Timed(floor)
    cases.append(Case(FLOOR, cases[0].tiers, rank, replace(pipeline, stages=pipeline.stages | {"rank": rank})))
    return floor


def tiers_of(repo: Path, generation: int) -> TiersConfig:
    """The settings of the repository's own tables. Raises ConfigError where the large table cannot take the place of one."""
    config = read_config(stage_folder(repo, "rank", generation) / TABLES_FOLDER / CONFIG_FILE)
    widths = {table.name: table.width for table in config.tables}
    if widths.get(LARGE) != WIDTH:
        raise ConfigError(
            f"{repo} has the tables {widths}. Expected {LARGE} of width {WIDTH}. "
            "Export with --config experiments/tiers/wide.toml."
        )
    return config


def link_tables(own: TiersConfig, source: str, folder: Path) -> None:
    """All tables in one folder: the repository's own, and the large one."""
    for table in own.tables:
        (folder / f"{table.name}.npy").symlink_to(Path(own.source, f"{table.name}.npy").resolve())
    (folder / f"{TABLE}.npy").symlink_to(Path(source, f"{TABLE}.npy").resolve())


def with_large(own: TiersConfig, large: TiersConfig, folder: Path, arena: str) -> TiersConfig:
    """The large table's settings for it and the repository's other tables, which are small: those are wholly in memory."""
    others = tuple(replace(table, l1_rows=0, l2_rows=table.rows) for table in own.tables if table.name != LARGE)
    return replace(large, tables=(*large.tables, *others), source=str(folder), arena=arena)


def described(case: Case, all_in_ram: Case) -> dict:
    table = case.tiers.metrics().tables[TABLE]
    share = ram_share(case.tiers.config.tables[0].rows, table.l1_bytes, table.l2_bytes)
    result = {"case": case.name, "ram_share": share, **shares(case.before, case.counts)}
    for what, ms, of in (("request", case.ms, all_in_ram.ms), ("rank", case.rank.ms, all_in_ram.rank.ms)):
        p50_ms, p99_ms = (round(float(np.percentile(ms, q)), 3) for q in (50, 99))
        result |= {f"{what}_p50_ms": p50_ms, f"{what}_p99_ms": p99_ms}
        result[f"{what}_p99_ratio"] = round(p99_ms / float(np.percentile(of, 99)), 2)
    print(
        "{case:30} RAM {ram_share:6.1%}  in memory {memory_hit_rate:.1%}  late {late:.1%}  "
        "request p50 {request_p50_ms:5.2f}  p99 {request_p99_ms:5.2f} ms ({request_p99_ratio} of all in RAM)  "
        "rank p50 {rank_p50_ms:5.2f}  p99 {rank_p99_ms:5.2f} ms ({rank_p99_ratio})".format(**result)
    )
    return result
