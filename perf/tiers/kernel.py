"""The rank stage of a real repository over a table far larger than its RAM: p99 of a request against all rows in RAM.

The candidates' item ids become keys of the large table, drawn by Zipf's law: a catalogue of that many items. Everything else is
the repository's own: the requests, the other tables, the network.
"""

from __future__ import annotations

import os
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from perf.tiers.big import cases_of, shares
from perf.tiers.traffic import ROW_BYTES, TABLE, WIDTH, opened, settings, write_table, zipf_keys
from perf.workload import draw, read_requests
from stages.artifacts import stage_folder
from stages.embeddings.config import TiersConfig, read_config
from stages.embeddings.metrics import TableCounts
from stages.embeddings.tiers import CONFIG_FILE, Tiers
from stages.errors import ConfigError
from stages.pipeline import Pipeline
from stages.rank import TABLES_FOLDER, Rank

LARGE = "item_0"  # whose place the large table takes
WARM_REQUESTS, REQUESTS, ROUNDS = 2_000, 300, 8  # of each case; REQUESTS in every round
REST_OF_REQUEST_S = 0.002  # the network, the other stages


class ItemRows:
    """`Rank.item_rows` of a larger catalogue: every request's candidates have the next keys of the large table."""

    def __init__(self, rows: np.ndarray, keys: np.ndarray) -> None:
        """rows: int [n_items + 1, S] of the repository; keys: int64 [R, C]."""
        self.shape, self._rows, self._keys, self._next = rows.shape, rows, keys, 0

    def __getitem__(self, candidates: np.ndarray) -> np.ndarray:
        """int [1, C] -> int64 [1, C, S]"""
        rows = self._rows[candidates].astype(np.int64)
        rows[..., 0] = self._keys[self._next % len(self._keys)]
        self._next += 1
        return rows


@dataclass
class Case:
    name: str
    tiers: Tiers
    rank: Rank
    before: TableCounts | None = None

    @property
    def counts(self) -> TableCounts:
        return self.tiers.metrics().tables[TABLE].counts


def bench_kernel(repo: Path, folder: Path, rows: int, rng: np.random.Generator, exponent: float) -> list[dict]:
    source = write_table(folder, rows, rng)
    pipeline = Pipeline.load(repo)
    inputs = rank_inputs(pipeline, repo, rng)
    shape = (WARM_REQUESTS + REQUESTS * ROUNDS, pipeline.info.axes.candidates)
    keys = zipf_keys(rows, exponent, shape, rng)
    with ExitStack() as open_now:
        open_now.callback(pipeline.close)
        small = Path(open_now.enter_context(tempfile.TemporaryDirectory()))
        own = tiers_of(repo, pipeline.info.generation)
        link_tables(own, source, small)
        cases = []
        for name, (threshold, levels) in cases_of(rows, WIDTH).items():
            config = with_large(
                own, settings(rows, source, threshold, **levels), small, f"bench-kernel-{os.getpid()}-{len(cases)}"
            )
            tiers = open_now.enter_context(opened(config))
            cases.append(Case(name, tiers, over(pipeline.stages["rank"], tiers, keys)))
        for case in cases:
            for number in range(WARM_REQUESTS):
                case.rank(inputs[number % len(inputs)])
            case.tiers.settle()
            case.before = case.counts
        taken_ms = in_turns(cases, inputs)
        return [described(case, ms, taken_ms[0]) for case, ms in zip(cases, taken_ms, strict=True)]


def rank_inputs(pipeline: Pipeline, repo: Path, rng: np.random.Generator, count: int = 200) -> list[dict[str, np.ndarray]]:
    """What the stages before hand to `rank`, one request each."""
    requests = draw(read_requests(repo, pipeline.info.generation), count, rng)
    traces = [pipeline.trace({name: values[row : row + 1] for name, values in requests.items()}) for row in range(count)]
    return [{tensor.name: trace[tensor.name] for tensor in pipeline.specs["rank"].inputs} for trace in traces]


def tiers_of(repo: Path, generation: int) -> TiersConfig:
    """The settings of the repository's own tables. Raises ConfigError where the large table cannot take the place of one."""
    config = read_config(stage_folder(repo, "rank", generation) / TABLES_FOLDER / CONFIG_FILE)
    widths = {table.name: table.width for table in config.tables}
    if widths.get(LARGE) != WIDTH:
        raise ConfigError(
            f"{repo} has the tables {widths}. Expected {LARGE} of width {WIDTH}. Export with [ranker] width = {WIDTH}."
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


def over(rank: Rank, tiers: Tiers, keys: np.ndarray) -> Rank:
    """The same stage, its first item table the large one."""
    named = replace(rank.settings, item_tables=(TABLE, *rank.settings.item_tables[1:]))
    return replace(rank, settings=named, tables=tiers, item_rows=ItemRows(rank.item_rows, keys))


def in_turns(cases: list[Case], inputs: list[dict[str, np.ndarray]]) -> list[list[float]]:
    """-> milliseconds of every request, by case."""
    taken_ms: list[list[float]] = [[] for _ in cases]
    for _ in range(ROUNDS):
        for case, ms in zip(cases, taken_ms, strict=True):
            for number in range(REQUESTS):
                begun_s = time.perf_counter()
                case.rank(inputs[number % len(inputs)])
                ms.append(1e3 * (time.perf_counter() - begun_s))
                time.sleep(REST_OF_REQUEST_S)
    return taken_ms


def described(case: Case, ms: list[float], of_all_in_ram: list[float]) -> dict:
    table = case.tiers.metrics().tables[TABLE]
    p50_ms, p99_ms = (round(float(np.percentile(ms, q)), 3) for q in (50, 99))
    result = {
        "case": case.name,
        "ram_share": round((table.l1_bytes + table.l2_bytes) / (case.tiers.config.tables[0].rows * ROW_BYTES), 4),
        **shares(case.before, case.counts),
        "p50_ms": p50_ms,
        "p99_ms": p99_ms,
        "p99_ratio": round(p99_ms / float(np.percentile(of_all_in_ram, 99)), 2),
    }
    print(
        "{case:30} RAM {ram_share:6.1%}  in memory {memory_hit_rate:.1%}  late {late:.1%}  "
        "p50 {p50_ms:6.2f}  p99 {p99_ms:6.2f} ms  ({p99_ratio} of all in RAM)".format(**result)
    )
    return result
