"""What one server has of the cores: how long its processes ran, and how long they waited for a core when they could run."""

from __future__ import annotations

import contextlib
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import NamedTuple

from server.processes import STUB_NAME, members

PROC = Path("/proc")
KINDS = ("tritonserver", STUB_NAME)  # updaters of tables are neither: their work is not an answer's


class PerAnswer(NamedTuple):
    """Microseconds for each answer: of tritonserver itself, and of the processes that run its models."""

    server_us: float
    models_us: float
    server_waited_us: float
    models_waited_us: float


@dataclass(frozen=True)
class ProcessorTime:
    """Seconds since the processes started; those in which their threads waited for a core are of threads that live."""

    server_s: float
    models_s: float
    server_waited_s: float
    models_waited_s: float

    def per_answer(self, earlier: ProcessorTime, answers: int) -> PerAnswer:
        """What was spent since `earlier`, in which `answers` were given."""
        return PerAnswer(*(1e6 * (now - then) / answers for now, then in zip(astuple(self), astuple(earlier), strict=True)))


def processor_time(tag: str) -> ProcessorTime:
    """Of the server with `tag`, up to now."""
    ran_s, waited_s = dict.fromkeys(KINDS, 0.0), dict.fromkeys(KINDS, 0.0)
    for process in members(tag):
        kind = next((kind for kind in KINDS if process.name().startswith(kind)), None)
        if kind:
            times = process.cpu_times()
            ran_s[kind] += times.user + times.system
            waited_s[kind] += waited_for_a_core_s(process.pid)
    return ProcessorTime(*(ran_s[kind] for kind in KINDS), *(waited_s[kind] for kind in KINDS))


def waited_for_a_core_s(pid: int) -> float:
    """The second number of `schedstat` (Documentation/scheduler/sched-stats.rst), nanoseconds, of every thread."""
    waited_ns = 0
    for path in (PROC / str(pid) / "task").glob("*/schedstat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread that has ended meanwhile
            waited_ns += int(path.read_text().split()[1])
    return waited_ns / 1e9
