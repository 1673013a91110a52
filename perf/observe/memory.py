"""Memory of the server's processes while it is under load: each page counted once (PSS), the peak of the sum kept."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path
from typing import Self

import psutil
from pydantic import BaseModel

from server.processes import members

SAMPLE_EVERY_S = 1.0


class ProcessMemory(BaseModel, frozen=True):
    """MiB of one process, when the sum over all processes was highest."""

    name: str  # tritonserver, or the model instance whose stub it is
    pid: int
    pss_mib: float  # its own pages, and its share of those it shares
    rss_mib: float


def read_memory(tag: str) -> list[ProcessMemory]:
    """The processes of the server with this tag, tritonserver first."""
    found = []
    for process in members(tag):
        with contextlib.suppress(psutil.Error):  # ended meanwhile
            full = process.memory_full_info()
            found.append(
                ProcessMemory(name=_name(process), pid=process.pid, pss_mib=full.pss / 2**20, rss_mib=full.rss / 2**20)
            )
    return sorted(found, key=lambda entry: (entry.name != "tritonserver", entry.name))


def _name(process: psutil.Process) -> str:
    """A stub's arguments: its own path, the model file, shared memory names and sizes, ..., the instance's name, a kind."""
    arguments = process.cmdline()
    if not arguments[0].endswith("triton_python_backend_stub"):
        return Path(arguments[0]).name
    model = Path(arguments[1]).parents[1].name
    return next((text for text in arguments[2:] if text.startswith(f"{model}_")), model)


class PeakMemory:
    """Samples in the background: `with PeakMemory(tag) as memory: …; memory.peak`. Without a tag (a server that was not
    started here) the peak stays empty."""

    def __init__(self, tag: str | None) -> None:
        self.peak: list[ProcessMemory] = []
        self._tag = tag
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> Self:
        if self._tag:
            self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._done.set()
        if self._tag:
            self._thread.join()

    def _sample(self) -> None:
        while True:
            now = read_memory(self._tag)
            if total_mib(now) > total_mib(self.peak):
                self.peak = now
            if self._done.wait(SAMPLE_EVERY_S):
                return


def total_mib(processes: list[ProcessMemory]) -> float:
    return sum(process.pss_mib for process in processes)
