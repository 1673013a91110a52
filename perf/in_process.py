"""The in-process baseline: the published pipeline in processes of its own, without a server. One thread each.

    with InProcess(repo, generation, rows, workers=cores) as pipeline:
        pipeline.measure(batch=1, seconds=2.0, workers=1)       one caller, one request per call
        pipeline.measure(batch=32, seconds=2.0)                 all cores

The processes live as long as the block, so that rounds alternate with served ones without loading anything again.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np

from server.start.environment import THREAD_VARIABLES
from serving.contract.errors import ServerError

WORKER = Path(__file__).with_name("in_process_worker.py")
BATCHES = (1, 8, 32)


@dataclass(frozen=True)
class Speed:
    p50_ms: float  # of one call
    rate: float  # requests/s, all workers together


class InProcess:
    """Worker processes. rows: the ensemble's inputs, each [R, *dims]."""

    def __init__(self, repo: Path, generation: int, rows: dict[str, np.ndarray], workers: int) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="perf-")
        rows_file = Path(self._folder.name) / "rows.npz"
        np.savez(rows_file, **{name: array.astype(bytes) if array.dtype == object else array for name, array in rows.items()})
        self._command = [sys.executable, "-P", str(WORKER), str(repo), str(generation), str(rows_file)]
        self._count = workers
        self._workers: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Self:
        env = os.environ | dict.fromkeys(THREAD_VARIABLES, "1") | {"PYTHONDONTWRITEBYTECODE": "1"}
        self._workers = [self._start(env) for _ in range(self._count)]
        try:
            for worker in self._workers:
                _answer(worker)
        except BaseException:
            self.__exit__()
            raise
        return self

    def _start(self, env: dict[str, str]) -> subprocess.Popen[str]:
        pipe = subprocess.PIPE
        return subprocess.Popen(self._command, env=env, stdin=pipe, stdout=pipe, stderr=pipe, text=True)

    def __exit__(self, *exc: object) -> None:
        for worker in self._workers:
            worker.kill()
            worker.communicate()
        self._folder.cleanup()

    def measure(self, batch: int, seconds: float, workers: int | None = None, pause_s: float = 0.0) -> Speed:
        """Measure `workers` of the processes (default: all) at the same time.

        pause_s: idle time between calls, which cools caches.
        """
        chosen = self._workers[:workers]
        for worker in chosen:
            assert worker.stdin is not None  # a pipe
            worker.stdin.write(json.dumps({"batch": batch, "seconds": seconds, "pause_s": pause_s}) + "\n")
            worker.stdin.flush()
        answers = [_answer(worker) for worker in chosen]
        latency_ns = np.concatenate([answer["latency_ns"] for answer in answers])
        return Speed(float(np.median(latency_ns)) / 1e6, sum(answer["rows"] / answer["seconds"] for answer in answers))

    def find_best_batch(self, seconds: float) -> int:
        """Return the batch size of BATCHES with the highest rate on all cores."""
        return max(BATCHES, key=lambda batch: self.measure(batch, seconds).rate)


def _answer(worker: subprocess.Popen[str]) -> dict:
    assert worker.stdout is not None  # pipes
    assert worker.stderr is not None
    line = worker.stdout.readline()
    if not line:
        lines = worker.stderr.read().strip().splitlines()[-1:]
        raise ServerError(f"The pipeline does not run in its own process: {''.join(lines) or 'it ended without a message'}.")
    return json.loads(line)
