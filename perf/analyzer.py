"""perf_analyzer: its command line, one process per level, and its raw export as arrays.

What its 2.51 does, found by trying: a level that does not settle within --stability-percentage ends with exit code 2 and
exports nothing, so the threshold is set out of reach and the spread over the windows is reported instead; the export file must
not exist; it repeats every input and output, so it is cut down to times; system shared memory wants every optional input
present; any error answer ends the run.
"""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from perf.latency import Latency
from perf.results import Closed
from perf.server_stats import between, read_counters
from server.environment import perf_analyzer_env
from stages.errors import ConfigError, ServerError

WINDOWS = 3  # perf_analyzer always measures three before it calls a level stable
UNSTABLE_PERCENT = 1_000
TIME_LIMIT_S = 60.0  # beyond the windows: connecting, the first requests, the export


@dataclass(frozen=True)
class Target:
    """One model of one server. model_version "" lets the server choose; shared memory needs `complete` input data."""

    model: str
    grpc_url: str
    http_url: str
    input_data: Path
    transport: str = "grpc"  # grpc, http, grpc+shm
    model_version: str = ""

    def __post_init__(self) -> None:
        if self.transport not in ("grpc", "http", "grpc+shm"):
            raise ConfigError(f"There is no transport {self.transport!r}; these are: grpc, http, grpc+shm.")


def command(target: Target, mode: str, value: float, window_s: float, export: Path) -> list[str]:
    """mode: "concurrency" (value = clients) or "request_rate" (value = Poisson requests/s)."""
    http = target.transport == "http"
    arguments = [
        *("perf_analyzer", "-m", target.model, "-a"),
        *("-i", "http" if http else "grpc", "-u", target.http_url if http else target.grpc_url),
        *("--input-data", str(target.input_data)),
        *("--measurement-interval", str(int(window_s * 1e3)), "--stability-percentage", str(UNSTABLE_PERCENT)),
        *("--max-trials", str(WINDOWS), "--percentile", "95"),
        *("--profile-export-file", str(export)),
    ]
    if target.model_version:
        arguments += ["-x", target.model_version]
    if target.transport == "grpc+shm":
        arguments += ["--shared-memory", "system"]
    if mode == "concurrency":
        return [*arguments, "--concurrency-range", str(int(value))]
    return [*arguments, "--request-rate-range", f"{value:g}", "--request-distribution", "poisson"]


def measure(target: Target, mode: str, value: float, window_s: float, raw: Path) -> Closed:
    """Run one level against the server; raw requests go to `raw` (.npz). ServerError with what perf_analyzer said."""
    export = raw.with_suffix(".json")
    export.unlink(missing_ok=True)
    before = read_counters(target.grpc_url)
    arguments = command(target, mode, value, window_s, export)
    try:
        done = subprocess.run(
            arguments,
            env=perf_analyzer_env(),
            capture_output=True,
            text=True,
            timeout=(WINDOWS + 1) * window_s * 2 + TIME_LIMIT_S,
        )
    except subprocess.TimeoutExpired as error:
        raise ServerError(f"perf_analyzer did not end: {' '.join(arguments)}. Is the server answering?") from error
    except OSError as error:
        raise ServerError(f"perf_analyzer cannot be started: {error}. Run `make setup`.") from error
    after = read_counters(target.grpc_url)
    if not export.exists():
        raise ServerError(f"perf_analyzer measured nothing: {what_it_said(done.stdout + done.stderr)} ({' '.join(arguments)})")
    export_text = export.read_text()
    export.unlink()
    requests = parse_export(json.loads(export_text))
    np.savez_compressed(raw, start_ns=requests.start_ns, latency_ns=requests.latency_ns)
    return Closed(
        model=target.model,
        transport=target.transport,
        mode=mode,
        value=value,
        achieved_rate=requests.rate,
        spread=requests.spread,
        latency=Latency.of(requests.latency_ns),
        late_share=late_share(done.stdout),
        stages=between(before, after),
        raw=raw.name,
    )


@dataclass(frozen=True)
class Requests:
    """Requests answered within the measurement windows."""

    start_ns: np.ndarray  # int64 [N] unix time
    latency_ns: np.ndarray  # int64 [N]
    window_rates: np.ndarray  # float64 [W] answers/s in each window

    @property
    def rate(self) -> float:
        return float(self.window_rates.mean())

    @property
    def spread(self) -> float:
        return float(np.ptp(self.window_rates) / np.median(self.window_rates))


def parse_export(document: dict) -> Requests:
    """The export of one level -> times. A request belongs to the windows when its answer arrived within them."""
    try:
        (experiment,) = document["experiments"]
        bounds_ns = np.array(experiment["window_boundaries"], np.int64)
        answered = [request for request in experiment["requests"] if request["response_timestamps"]]
        start_ns = np.array([request["timestamp"] for request in answered], np.int64)
        end_ns = np.array([request["response_timestamps"][-1] for request in answered], np.int64)
    except (KeyError, ValueError, IndexError) as error:
        raise ServerError(f"perf_analyzer's export is not of the form known ({error!r}); 2.51 is expected.") from error
    if len(bounds_ns) < 2:
        raise ServerError("perf_analyzer's export has no measurement window: the server answered nothing. Is it ready?")
    inside = (end_ns >= bounds_ns[0]) & (end_ns < bounds_ns[-1])
    if not inside.any():
        raise ServerError("No request was answered within perf_analyzer's windows. Lower the load or lengthen --window-s.")
    counts, _ = np.histogram(end_ns[inside], bounds_ns)
    return Requests(start_ns[inside], (end_ns - start_ns)[inside], counts / (np.diff(bounds_ns) / 1e9))


def late_share(stdout: str) -> float:
    """Of a request rate: the share of requests perf_analyzer says it sent late."""
    for line in stdout.splitlines():
        if "of the requests were delayed" in line:
            return float(line.split("request rate.")[1].split("%")[0]) / 100
    return 0.0


def what_it_said(output: str) -> str:
    """Its error lines, without the settings it echoes."""
    lines = [line.strip() for line in output.splitlines() if "error" in line.lower() or "failed" in line.lower()]
    return "; ".join(dict.fromkeys(lines)) or output.strip()[-500:]
