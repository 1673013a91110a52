"""One server, its requests, and the results of its run: every measurement of this package works on a `Bench`."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from perf.answers import is_comparable
from perf.load import analyzer
from perf.load.workload import Arrays, compute_stage_inputs, draw, read_recorded_requests, read_specs, write_analyzer_json
from perf.observe import PeakMemory, compute_hit_rates, read_samples
from perf.report.results import Closed, Machine, Run, hash_configs, make_folder, read_commit
from perf.target import Site
from repository.triton.config import CONFIG_FILE, read_layout
from repository.triton.models import read_config
from serving.contract.tensors import ENSEMBLE, STAGES

ROWS = 1_000  # of input data: perf_analyzer starts over at its end
SEED = 20260101
PEAK_CLIENTS = (8, 16, 32, 64, 128, 256)  # the peak is the best of these


@dataclass
class Bench:
    """One server, its requests, and the run whose results are written into `folder`.

    answers: the recorded ones, [R, *dims]; empty where they are not comparable (answers.py)
    """

    site: Site
    run: Run
    folder: Path
    rng: np.random.Generator

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.specs = read_specs(self.site.repo, self.site.generation)
        recorded = read_recorded_requests(self.site.repo, self.site.generation)
        self.requests = recorded.inputs
        self.answers = recorded.outputs if self.run.comparable else {}
        self._numbers = itertools.count()  # of raw files
        self._drawn: Arrays | None = None
        self._stage_rows: dict[str, Arrays] = {}

    @property
    def stages(self) -> tuple[str, ...]:
        """Stages that can be called on their own: none in the fused layout."""
        return tuple(name for name in STAGES if (self.site.repo / name).is_dir())

    def name_raw_file(self, label: str) -> str:
        """Return a new file name for each measurement, because a level may be measured again."""
        return f"{next(self._numbers):03d}-{label}.npz"

    def save(self) -> None:
        self.run.save(self.folder)

    def measure_clients(self, clients: int, window_s: float) -> Closed:
        """Measure `recommend` over gRPC with a number of clients, without adding the level to the run."""
        return self.measure_closed(ENSEMBLE, "grpc", "concurrency", clients, window_s)

    def measure_closed(self, model: str, transport: str, mode: str, value: float, window_s: float) -> Closed:
        """Measure one perf_analyzer level and return it, without adding it to the run."""
        raw = self.folder / self.name_raw_file(f"{model}-{transport}-{mode}-{value:g}")
        target = analyzer.Target(
            model=model,
            grpc_url=self.site.grpc_url,
            http_url=self.site.http_url,
            input_data=self._prepare_input(model),
            transport=transport,
            model_version="" if model == ENSEMBLE else str(self.site.generation),
        )
        return analyzer.measure(target, mode, value, window_s, raw)

    def add_closed(self, model: str, transport: str, mode: str, value: float, window_s: float) -> Closed:
        level = self.measure_closed(model, transport, mode, value, window_s)
        self.run.closed.append(level)
        self.save()
        return level

    def clear_inputs(self) -> None:
        """Remove perf_analyzer's input files: megabytes that can be generated again from the seed."""
        for path in self.folder.glob("input-*.json"):
            path.unlink()

    def _prepare_input(self, model: str) -> Path:
        path = self.folder / f"input-{model}.json"
        if not path.exists():
            write_analyzer_json(path, self.specs[model], self._prepare_rows(model))
        return path

    def _prepare_rows(self, model: str) -> Arrays:
        if self._drawn is None:
            self._drawn = draw(self.requests, ROWS, self.rng)
        if model == ENSEMBLE:
            return self._drawn
        if not self._stage_rows:
            self._stage_rows = compute_stage_inputs(self.site.grpc_url, self.specs, self.site.generation, self._drawn)
        return self._stage_rows[model]


def new_bench(site: Site, label: str, folder: Path | None = None) -> Bench:
    """Return a bench with an empty run. label: name of the run; folder: None for a new one"""
    run = Run(
        started=datetime.now(UTC).isoformat(timespec="seconds"),
        label=label,
        url=site.grpc_url,
        repo=str(site.repo),
        generation=site.generation,
        commit=read_commit(),
        config_hash=hash_configs(site.repo),
        machine=Machine.here(),
        layout=read_layout(read_config(site.repo / ENSEMBLE / CONFIG_FILE)),
        comparable=is_comparable(site.repo, site.generation),
    )
    return Bench(site, run, folder or make_folder(), np.random.default_rng(SEED))


@contextlib.contextmanager
def record_memory_and_hits(bench: Bench) -> Iterator[None]:
    """Add the memory peak and the cache hit rates during the block to the run."""
    before = read_samples(bench.site.metrics_url)
    with PeakMemory(bench.site.tag) as memory:
        yield
    bench.clear_inputs()
    bench.run.memory = memory.peak
    bench.run.hit_rates = compute_hit_rates(before, read_samples(bench.site.metrics_url))
    bench.save()
