"""Run perf_analyzer: its command line, one process per level, and its raw export as arrays.

Version 2.51 behaves as follows:
- a level that does not settle within --stability-percentage ends with exit code 2 and exports nothing, so the threshold is set
  out of reach, and we report the spread over the windows instead;
- so does a level with a window in which nothing was answered, as when a busy machine stalls; it is measured again;
- once in some hundred levels it hangs over HTTP, and is started again;
- any error answer ends the run;
- the export file must not exist before;
- the export repeats every input and output, so we keep only its times.
"""

from __future__ import annotations

import json
import subprocess
import warnings
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from perf.observe import Latency, compute_times, read_counters
from perf.report.results import Closed
from server.keys import GRPC_HEADER, HEADER, find_key
from server.start.environment import build_perf_analyzer_env
from server.start.private_arguments import start_privately
from serving.contract.errors import ConfigError, ServerError

TRANSPORTS = ("grpc", "http")
WINDOWS = 3  # perf_analyzer always measures three before it calls a level stable
UNSTABLE_PERCENT = 1_000
UNSTABLE = "Failed to obtain stable measurement"
COMPLAINTS = ("error", "failed", "no valid requests")
ATTEMPTS = 2
TIME_LIMIT_S = 60.0  # beyond the windows: connecting, the first requests, the export


@dataclass(frozen=True)
class Target:
    """One model of one server. model_version "" lets the server choose."""

    model: str
    grpc_url: str
    http_url: str
    input_data: Path
    transport: str = "grpc"  # one of TRANSPORTS
    model_version: str = ""

    @property
    def key_header(self) -> str:
        """The header that opens the server's statistics, "" for a server without a known key."""
        key = find_key(self.grpc_url)
        return f"{HEADER if self.transport == 'http' else GRPC_HEADER}:{key}" if key else ""

    def __post_init__(self) -> None:
        require_transport(self.transport)


def require_transport(transport: str) -> None:
    """Raise ConfigError for a transport that there is not."""
    if transport not in TRANSPORTS:
        raise ConfigError(f"There is no transport {transport!r}; these are: {', '.join(TRANSPORTS)}.")


def build_command(target: Target, mode: str, value: float, window_s: float, output: Path) -> list[str]:
    """Return the command line. mode: "concurrency" (value = clients) or "request_rate" (value = Poisson requests/s)."""
    http = target.transport == "http"
    arguments = [
        *("perf_analyzer", "-m", target.model, "-a"),
        *("-i", "http" if http else "grpc", "-u", target.http_url if http else target.grpc_url),
        *("--input-data", str(target.input_data)),
        *("--measurement-interval", str(int(window_s * 1e3)), "--stability-percentage", str(UNSTABLE_PERCENT)),
        *("--max-trials", str(WINDOWS)),
        *("--profile-export-file", str(output)),
    ]
    if target.model_version:
        arguments += ["-x", target.model_version]
    if mode == "concurrency":
        return [*arguments, "--concurrency-range", str(int(value))]
    return [*arguments, "--request-rate-range", f"{value:g}", "--request-distribution", "poisson"]


def measure(target: Target, mode: str, value: float, window_s: float, raw: Path) -> Closed:
    """Run one level against the server; raw requests go to `raw` (.npz). Raises ServerError with perf_analyzer's complaints."""
    output = raw.with_suffix(".json")
    output.unlink(missing_ok=True)
    before = read_counters(target.grpc_url)
    arguments = build_command(target, mode, value, window_s, output)
    text = run(arguments, (WINDOWS + 1) * window_s * 2 + TIME_LIMIT_S, target.key_header)
    after = read_counters(target.grpc_url)
    if not output.exists():
        remedy = " A longer --window-s may help." if UNSTABLE in text else ""
        raise ServerError(f"perf_analyzer measured nothing: {extract_complaints(text)} ({' '.join(arguments)}).{remedy}")
    requests = parse_export(output.read_text())
    output.unlink()
    np.savez_compressed(raw, start_ns=requests.start_ns, latency_ns=requests.latency_ns)
    return Closed(
        model=target.model,
        transport=target.transport,
        mode=mode,
        value=value,
        achieved_rate=requests.rate,
        spread=requests.spread,
        latency=Latency.of(requests.latency_ns),
        stages=compute_times(before, after),
        raw=raw.name,
    )


def run(arguments: list[str], limit_s: float, private_header: str = "") -> str:
    """Return the program's output. It is started again, with a warning, when it does not end within `limit_s`, or is UNSTABLE.

    private_header: hidden from other users of the machine, unlike an argument
    Raises ServerError when it cannot be started, or does not end in any of its attempts.
    """
    header_option, private_values = (["-H"], [private_header]) if private_header else ([], [])
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    for attempt in range(1, ATTEMPTS + 1):
        try:
            process = start_privately([*arguments, *header_option], private_values, build_perf_analyzer_env(), **pipes)
        except OSError as error:
            raise ServerError(f"perf_analyzer cannot be started: {error}. Run `make setup`.") from error
        with process:
            try:
                text = "".join(process.communicate(timeout=limit_s))
                if UNSTABLE not in text or attempt == ATTEMPTS:
                    return text
                warnings.warn(f"perf_analyzer got no answer in one of its windows: {' '.join(arguments)}", stacklevel=2)
            except subprocess.TimeoutExpired:
                process.kill()
                warnings.warn(f"perf_analyzer did not end within {limit_s:g} s: {' '.join(arguments)}", stacklevel=2)
    raise ServerError(f"perf_analyzer did not end in {ATTEMPTS} attempts: {' '.join(arguments)}. Is the server answering?")


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


def parse_export(text: str) -> Requests:
    """Return the times of one level's export. Requests count when their answers arrived within the windows.

    Raises ServerError for an export of another form, and when nothing was answered in one of the windows.
    """
    try:
        (experiment,) = json.loads(text)["experiments"]
        bounds_ns = np.array(experiment["window_boundaries"], np.int64)
        requests = [request for request in experiment["requests"] if request["response_timestamps"]]
        start_ns = np.array([request["timestamp"] for request in requests], np.int64)
        end_ns = np.array([request["response_timestamps"][-1] for request in requests], np.int64)
    except (KeyError, ValueError, IndexError) as error:
        raise ServerError(f"perf_analyzer's export has an unknown form ({error!r}); 2.51 is expected.") from error
    if len(bounds_ns) < 2:
        raise ServerError("perf_analyzer's export has no measurement window: the server answered nothing. Is it ready?")
    inside = (end_ns >= bounds_ns[0]) & (end_ns < bounds_ns[-1])
    counts, _ = np.histogram(end_ns[inside], bounds_ns)
    if not counts.all():
        raise ServerError("Nothing was answered in one of perf_analyzer's windows. Lower the load or lengthen --window-s.")
    return Requests(start_ns[inside], (end_ns - start_ns)[inside], counts / (np.diff(bounds_ns) / 1e9))


def extract_complaints(output: str) -> str:
    """Return the error lines of perf_analyzer's output, or the end of the output if it has none."""
    lines = [line.strip() for line in output.splitlines() if any(word in line.lower() for word in COMPLAINTS)]
    return "; ".join(dict.fromkeys(lines)) or output.strip()[-500:]
