"""The results of a run: perf/results/<stamp>/run.json, with raw requests beside it."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel, ValidationError

from perf.observe import Latency, ProcessMemory, StageTimes, sum_mib
from server.start.environment import PROJECT
from serving.contract.errors import ConfigError
from serving.contract.tensors import ENSEMBLE, STAGES

RESULTS = PROJECT / "perf" / "results"
RUN_FILE = "run.json"
MODELS = (*STAGES, ENSEMBLE)
HALF = "poisson 50 %"  # of the peak: the load whose percentiles the SLO bounds


class Closed(BaseModel, frozen=True):
    """One level of a closed loop or of perf_analyzer's request rate."""

    model: str
    transport: str  # grpc, http
    mode: str  # concurrency, request_rate
    value: float  # clients, or requests/s offered
    achieved_rate: float  # answers/s
    spread: float  # of the rate over the measurement windows: (max - min) / median
    latency: Latency
    stages: dict[str, StageTimes]
    raw: str  # file with start_ns and latency_ns

    @property
    def computing_models(self) -> dict[str, StageTimes]:
        """Times of the stages, or else of the fused `recommend`. An ensemble computes nothing itself."""
        return {name: self.stages[name] for name in STAGES if name in self.stages} or dict(self.stages)


class Open(BaseModel, frozen=True):
    """One open-loop load. Latency counts from the instant each request was due."""

    name: str
    offered_rate: float
    achieved_rate: float  # answers without error, over the load's duration
    duration_s: float
    latency: Latency | None
    by_class: dict[str, Latency]  # "cold starts", "in a burst", …: where a load has more than one class
    errors: dict[str, int]  # message -> count
    error_share: float
    unsent: int  # due but never sent: no connection, flow control, or too many in flight; counted as errors
    send_late: Latency | None  # delay between due and sent: the generator's own
    generator_cores: float  # CPU time the generator took, in cores
    compared: int = 0  # answers to recorded requests; cold starts have no recorded answer
    differing_answers: str = ""  # the first difference from the recorded, in-process answers
    degraded: int = 0  # answers that say that they are
    stages: dict[str, StageTimes]
    raw: str


class Yardstick(BaseModel, frozen=True):
    """The same stages without a server, interleaved with served levels: one value per round."""

    in_process_p50_ms: list[float]  # one request per call, one thread
    served_p50_ms: list[float]  # one client
    in_process_rate: list[float]  # requests/s, all cores, one request after the other
    served_rate: list[float]
    differing_answers: str = ""  # difference from the recorded, in-process answers: ratios then do not count

    @property
    def overhead_p50_ms(self) -> float:
        return float(np.median(np.subtract(self.served_p50_ms, self.in_process_p50_ms)))

    @property
    def throughput_share(self) -> float:
        return float(np.median(np.divide(self.served_rate, self.in_process_rate)))


class Machine(BaseModel, frozen=True):
    cpu: str
    cores: int
    load_before: float  # 1-minute load average at the start: above 0, other programs took part of the machine
    kernel: str
    python: str

    @classmethod
    def here(cls) -> Machine:
        return cls(
            cpu=_read_cpu_name(),
            cores=len(os.sched_getaffinity(0)),
            load_before=os.getloadavg()[0],
            kernel=platform.release(),
            python=platform.python_version(),
        )


class Run(BaseModel):
    """One run; lists grow during it, and the file is rewritten after every measurement."""

    started: str  # ISO, UTC
    label: str
    url: str
    repo: str
    generation: int
    commit: str
    config_hash: str  # of every config.pbtxt of the repository
    machine: Machine
    layout: str
    comparable: bool = True  # False: rows are updated while they are served, so answers are not the recorded ones
    floor_p50_ms: float | None = None  # a call that does nothing (ServerLive), one client: the cost of gRPC alone
    closed: list[Closed] = []
    open: list[Open] = []
    yardstick: Yardstick | None = None
    memory: list[ProcessMemory] = []  # at the peak of their sum
    hit_rates: dict[str, float] = {}

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        replace_text(folder / RUN_FILE, self.model_dump_json(indent=1))

    def select_curve(self, model: str, transport: str = "grpc", mode: str = "concurrency") -> list[Closed]:
        """Return the levels of one kind, in the order of clients or rate; of a level measured twice, the later one."""
        levels = {x.value: x for x in self.closed if (x.model, x.transport, x.mode) == (model, transport, mode)}
        return [levels[value] for value in sorted(levels)]

    def find_load(self, name: str) -> Open | None:
        return next((load for load in reversed(self.open) if load.name == name), None)

    @property
    def differing_answers(self) -> str:
        """The difference between served answers, alone or under load, and those computed in process; "" if there is none."""
        alone = self.yardstick.differing_answers if self.yardstick else ""
        return "; ".join(filter(None, [alone, self.differing_under_load]))

    @property
    def answers_compared(self) -> bool:
        return self.comparable and (self.yardstick is not None or self.compared_under_load > 0)

    @property
    def differing_under_load(self) -> str:
        prefix = f"{self.label}, " if self.label else ""
        return "; ".join(f"{prefix}{load.name}: {load.differing_answers}" for load in self.open if load.differing_answers)

    @property
    def compared_under_load(self) -> int:
        return sum(load.compared for load in self.open)

    @property
    def main_load(self) -> Open | None:
        """The load whose percentiles represent the run: half of the peak, or the only load of `perf load`."""
        return self.find_load(HALF) or (self.open[0] if len(self.open) == 1 else None)


def load_run(folder: Path) -> Run:
    """Read a run. Raises ConfigError when there is no readable one."""
    try:
        return Run.model_validate_json((folder / RUN_FILE).read_text())
    except (OSError, ValidationError) as error:
        raise ConfigError(f"{folder} holds no readable {RUN_FILE}: {error}. Runs are in {RESULTS}.") from error


def find_latest_run(results: Path = RESULTS) -> Path:
    folders = sorted(path.parent for path in results.glob(f"*/{RUN_FILE}"))
    if not folders:
        raise ConfigError(f"There is no run in {results} yet. Make one with `make perf`.")
    return folders[-1]


def make_folder(results: Path = RESULTS) -> Path:
    """Make the folder of a new run, which no other run has, not even one of the same second. Raises ConfigError."""
    stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    try:
        results.mkdir(parents=True, exist_ok=True)
        for number in itertools.count(1):
            folder = results / (stamp if number == 1 else f"{stamp}-{number}")
            with contextlib.suppress(FileExistsError):
                folder.mkdir()
                break
    except OSError as error:
        raise ConfigError(
            f"Runs are kept in {results}, which cannot be written: {error.strerror}. Free or repair it."
        ) from error
    return folder


def summarise(run: Run) -> dict[str, Any]:
    """Return one flat document with the keys of slo.toml; those that were not measured are absent."""
    facts: dict[str, Any] = {
        "perf": "recommend",
        "started": run.started,
        "commit": run.commit,
        "config_hash": run.config_hash,
        "generation": run.generation,
        "layout": run.layout,
        "cores": run.machine.cores,
        "load_before": round(run.machine.load_before, 2),
    }
    if curve := run.select_curve("recommend"):
        best = max(curve, key=lambda level: level.achieved_rate)
        facts |= {"peak_rate": best.achieved_rate, "peak_clients": int(best.value)}
        facts |= {f"clients_{int(level.value)}_p50_ms": level.latency.p50_ms for level in curve if level.value == 1}
    if half := run.main_load:
        facts |= {"offered_rate": half.offered_rate, "achieved_rate": half.achieved_rate}
        if half.errors or half.latency:  # of no request, there is no share
            facts["error_share"] = half.error_share
        if half.latency:
            percentiles = {q: getattr(half.latency, f"{q}_ms") for q in ("p50", "p95", "p99")}
            facts |= {f"{q}_ms": value for q, value in percentiles.items()} | {
                "p99_over_p50": percentiles["p99"] / percentiles["p50"]
            }
    if (volleys := run.find_load("volleys of 8")) and volleys.latency:
        facts["volley_p99_ms"] = volleys.latency.p99_ms
    if run.yardstick:
        facts |= {
            "overhead_p50_ms": run.yardstick.overhead_p50_ms,
            "throughput_share": run.yardstick.throughput_share,
        }
    if run.answers_compared:
        facts["answers_equal"] = not run.differing_answers
    if run.memory:
        facts["memory_mib"] = sum_mib(run.memory)
    if run.hit_rates:
        facts["hit_rates"] = {name: round(rate, 4) for name, rate in run.hit_rates.items()}
    return {name: round(value, 4) if isinstance(value, float) else value for name, value in facts.items()}


def read_commit(folder: Path = PROJECT) -> str:
    """Return the short hash of a checkout, with "+" when files were changed since; "" outside git."""
    try:
        head = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=folder, capture_output=True, text=True, check=True)
        changed = subprocess.run(["git", "status", "--porcelain", "-uno"], cwd=folder, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return head.stdout.strip() + ("+" if changed.stdout.strip() else "")


def read_machine() -> dict[str, Any]:
    """Return the code's commit, the cores and the load. Call it before the measurement adds its own load."""
    machine = Machine.here()
    return {"commit": read_commit(), "cores": machine.cores, "load_before": round(machine.load_before, 2)}


def hash_configs(repo: Path) -> str:
    """Return a hash of every config.pbtxt, 12 hex digits: runs with equal ones measured the same serving settings."""
    digest = hashlib.sha256()
    for path in sorted(repo.glob("*/config.pbtxt")):
        digest.update(path.parent.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:12]


def replace_text(path: Path, text: str) -> None:
    """Write a text file as a whole: until then, and if writing fails, the former one stays."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_text(text)
    draft.replace(path)


def to_json_line(document: dict[str, Any]) -> str:
    return json.dumps(document, separators=(",", ":"))


def _read_cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()
