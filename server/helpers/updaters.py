"""Run the updaters of a server's tables, one for each served generation with an update source.

A generation's tables name their update source (tables/levels.json). The updater runs the generation's published code, as its
models do, because both share the layout of rows in memory. A supervisor restarts a crashed updater. Both carry the server's
tag and end with the server.
"""

from __future__ import annotations

from pathlib import Path

import psutil

from repository.tables import find_tables_settings, has_update_source
from server import processes, supervisor
from server.state import ServerState
from server.supervised import start_supervised, wait_for_start
from serving.contract.errors import ArtifactError, ServerError

START_TIMEOUT_S = 20.0  # until it logs that it follows its source
MODULE = "serving.tables"


def follow(state: ServerState, run_dir: Path, waits: bool = True) -> None:
    """Run the updater of the served generation, if it has an update source, and stop others.

    Raises ServerError when it does not start; its supervisor keeps trying, as after a crash.
    waits: until it follows its source or fails; otherwise only its log tells
    """
    settings = find_served_settings(state)
    current = _find_current(state, settings)
    processes.terminate([process for process in find_updaters(state.tag) if process not in current])
    if settings is not None and not current:
        _start(state, run_dir, settings, waits)


def is_missing(state: ServerState) -> bool:
    """Return whether the served generation has an update source, and no supervisor runs its updater."""
    settings = find_served_settings(state)
    return settings is not None and not _find_current(state, settings)


def _find_current(state: ServerState, settings: Path | None) -> list[psutil.Process]:
    """Return the updater of these settings and its supervisor; nothing without one: the updater would not be restarted."""
    current = [process for process in find_updaters(state.tag) if _has_argument(process, str(settings))]
    return current if any(_has_argument(process, supervisor.__name__) for process in current) else []


def find_served_settings(state: ServerState) -> Path | None:
    """Return the settings of the served tables, None without an update source."""
    try:
        return find_tables_settings(state.repo, state.generation) if has_update_source(state.repo, state.generation) else None
    except ArtifactError:  # not one of our repositories
        return None


def find_updaters(tag: str) -> list[psutil.Process]:
    """Return all updaters of a server and their supervisors."""
    return [process for process in processes.find_members(tag) if processes.runs_module(process, MODULE)]


def _has_argument(process: psutil.Process, argument: str) -> bool:
    """Return whether a process was started with an argument."""
    try:
        return argument in process.cmdline()
    except psutil.Error:  # gone meanwhile
        return False


def _start(state: ServerState, run_dir: Path, settings: Path, waits: bool) -> None:
    log_path = run_dir / "logs" / f"updater-{state.ports.grpc}-{state.generation}.log"
    process = start_supervised(log_path, ["-m", MODULE, str(settings), "--tag", state.tag], _find_code(settings))
    if waits and (last_line := wait_for_start(process, log_path, "follows", START_TIMEOUT_S)):
        later = "the server's supervisor tries again, or `make serve`"
        tried = "is tried again, at most every 30 s" if process.poll() is None else f"has ended: {later}"
        raise ServerError(
            f"The updater of generation {state.generation} did not start: {last_line.rstrip('.')}. The server answers without "
            f"updates, and the updater {tried}. Correct what it names. Whole log: {log_path}."
        )


def _find_code(settings: Path) -> Path:
    """Return the folder with the generation's package `serving`: the stage's, or, in the fused layout, the model's."""
    folder = settings.parents[1]
    return folder if (folder / "serving").is_dir() else folder.parent
