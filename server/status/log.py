"""Read tritonserver's log: which model failed first, and why."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from server.signals import name_signal

# Each pattern finds (model, reason) on one line; the reason is quoted in the log, its newlines written as \n.
FAILURES = (
    re.compile(r"failed to load '(?P<model>[^']+)' version \d+: (?P<reason>.*)"),
    re.compile(r"Poll failed for model directory '(?P<model>[^']+)': (?P<reason>.*)"),
    re.compile(r"failed to load model '(?P<model>[^']+)': (?P<reason>.*)"),
    re.compile(r"(?P<reason>.*ensemble '?(?P<model>(?!tensor\b)\w+)'?.*)"),
)
ERROR_LINE = re.compile(r"^[EF]\d{4} ")
PREFIX = re.compile(r'^[EFWI]\d{4} [\d:.]+ \d+ [\w./]+:\d+\] "?')
ENDED = re.compile(r"^Signal \((\d+)\) received\.", re.MULTILINE)
# Harmless lines that the server logs on every machine without a GPU.
HARMLESS = (
    "CUDA driver version is insufficient",
    "CudaDriverHelper has not been initialized",
    "Failed to initialize NVML",
    "DCGM unable to start",
    "CUDA memory pool disabled",
)
CRASHES = ("SIGABRT", "SIGSEGV", "SIGBUS", "SIGFPE", "SIGILL")
CRASH_LINES = 5  # lines before a crash that show the exception
TABLE_LINE = re.compile(r"[|+]")
SERVES = "Started GRPCInferenceService"
TAIL_LINES = 20
KEPT_LOGS = 5
UNHEALTHY = "is not healthy"  # the server's only message about a model process that ended, or was too slow to answer it
LOST = "Its Python process ended while loading: it crashed, or was killed for lack of memory."


@dataclass(frozen=True)
class Failure:
    model: str | None  # None: the server failed as a whole
    reason: str

    def __str__(self) -> str:
        return (
            f"model {self.model} failed to load:\n{self.reason}" if self.model else f"the last lines of its log:\n{self.reason}"
        )


def find_first_failure(log: str) -> Failure | None:
    """Return the first model that failed according to `log`, None when none did."""
    for line in log.splitlines():
        if not ERROR_LINE.match(line):
            continue
        message = PREFIX.sub("", line).rstrip('"')
        for pattern in FAILURES:
            if match := pattern.search(message):
                reason = match["reason"].replace("\\n", "\n").strip()
                return Failure(match["model"], f"{LOST} {reason}" if UNHEALTHY in reason else reason)
    return None


def find_unfinished(log: str, dead: int) -> Failure:
    """Return the models that did not finish loading, after `dead` model processes ended without a message."""
    begun = re.findall(r'"loading: ([^":]+):\d+"', log)
    loaded_names = set(re.findall(r"successfully loaded '([^']+)'", log))
    waiting = [name for name in dict.fromkeys(begun) if name not in loaded_names]
    last = "\n".join(log.splitlines()[-TAIL_LINES:])
    reason = f"{dead} Python model process(es) ended while loading: crashed, or out of memory. The last log lines:\n{last}"
    return Failure(", ".join(waiting), reason)


def find_ending_signal(log: str) -> str:
    """Return the last signal in the server's log, such as SIGABRT; "" without one. SIGKILL leaves no trace.

    The log is the only source: the server is not our child process.
    """
    numbers = ENDED.findall(log)
    return name_signal(int(numbers[-1])) if numbers else ""


def explain_end(log: str) -> str:
    """Return how a server ended, according to its log."""
    name = find_ending_signal(log)
    if name in ("SIGTERM", "SIGINT"):
        return f"it was stopped ({name})"
    if name:
        return f"it crashed: ended by {name}"
    if SERVES in log:
        return "it ended without a message, as after SIGKILL: sent by hand, or by the kernel for lack of memory (dmesg)"
    return "it ended before it served"


def explain(log: str) -> Failure:
    """Return why a server ended: the first failed model, else the lines before a crash, error lines, or the last lines."""
    if failure := find_first_failure(log):
        return failure
    if find_ending_signal(log) in CRASHES:
        crash = log[: [match.start() for match in ENDED.finditer(log)][-1]].splitlines()[-CRASH_LINES:]
        return Failure(None, "\n".join(line for line in crash if not TABLE_LINE.match(line)))
    lines = [line for line in log.splitlines() if not any(remark in line for remark in HARMLESS)]
    errors = [line for line in lines if ERROR_LINE.match(line) or line.startswith("error:")]
    return Failure(None, "\n".join((errors or lines)[-TAIL_LINES:]) or "(nothing was written)")


def rotate(path: Path) -> None:
    """Move a log to PATH.1, the previous one to PATH.2, …; delete those beyond KEPT_LOGS."""
    for number in range(KEPT_LOGS, 0, -1):
        older = path.with_name(f"{path.name}.{number - 1}") if number > 1 else path
        if older.exists():
            older.replace(path.with_name(f"{path.name}.{number}"))
