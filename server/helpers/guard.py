"""Start and stop the guard of a server's experiment (`python -m trials guard`), which runs as long as the experiment.

The server's supervisor starts the guard under a supervisor of its own. Both carry the server's tag: they survive its restarts,
and are stopped with it.
"""

from __future__ import annotations

from pathlib import Path

import psutil

from repository.experiments import follow_experiment
from server import processes
from server.state import ServerState
from server.supervised import start_supervised

MODULE = "trials"


class ExperimentGuard:
    """Keeps the guard of one server running while an experiment runs."""

    def __init__(self, state: ServerState, run_dir: Path) -> None:
        self._state, self._run_dir = state, run_dir
        self._followed = follow_experiment(state.repo)

    def look(self) -> str:
        """Start the guard if an experiment runs without one. Return a message of what was done, or "".

        Raises ArtifactError, once, for an experiment that cannot be read. No gateway takes part in such an experiment.
        """
        experiment = self._followed.read_current() if self._followed else None
        if experiment is None or not experiment.runs or list_guards(self._state.tag):
            return ""
        path = log_path(self._run_dir, self._state)
        start_supervised(path, ["-m", MODULE, "guard", "--repo", str(self._state.repo), "--tag", self._state.tag])
        return f"experiment {experiment.name} runs: its guard is started, and logs to {path}"


def list_guards(tag: str) -> list[psutil.Process]:
    """Return the processes of a server's guard: itself and its supervisor."""
    return processes.find_running(tag, MODULE)


def log_path(run_dir: Path, state: ServerState) -> Path:
    return run_dir / "logs" / f"guard-{state.ports.grpc}.log"
