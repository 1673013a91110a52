"""Processor time of one server: of tritonserver itself, and of the processes that run its models."""

from __future__ import annotations

from dataclasses import dataclass

from server.processes import STUB_NAME, members


@dataclass(frozen=True)
class ProcessorTime:
    """Seconds since the processes started."""

    server_s: float
    models_s: float

    def us_per_answer(self, earlier: ProcessorTime, answers: int) -> tuple[float, float]:
        """-> microseconds of (server, models) for each of the answers given since `earlier`."""
        return tuple(
            1e6 * spent_s / answers for spent_s in (self.server_s - earlier.server_s, self.models_s - earlier.models_s)
        )


def processor_time(tag: str) -> ProcessorTime:
    """Of the server with `tag`, up to now."""
    server_s = models_s = 0.0
    for process in members(tag):
        times = process.cpu_times()
        if process.name().startswith(STUB_NAME):
            models_s += times.user + times.system
        else:
            server_s += times.user + times.system
    return ProcessorTime(server_s, models_s)
