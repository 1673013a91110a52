"""Run the helpers that a served generation needs, each under a supervisor that restarts it.

    maintain   every ten minutes: archive the older part of the live log, forget idle users
    consume    events of a Kafka topic, where [live] brokers names one
    share      the state of users and items in Redis, where [live] redis names nodes
    updater    changed rows of the tables, where tables/levels.json names an update source; a challenger has one of its own

They carry the server's tag and end with the server. Where several servers share a live store, each has its own helpers, and
locks in the store's folder let only one of each kind work. The updater runs the generation's published code, as its models do,
because both share the layout of rows in memory.
"""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

import psutil

from repository.challenger import read_challengers
from repository.tables import find_tables_settings, has_update_source
from server import processes, supervisor
from server.start.environment import PROJECT
from server.state import ServerState
from server.supervised import start_supervised, wait_for_start
from serving.contract.artifacts import StageInfo, find_stage_folder, make_stage_settings, read_stage
from serving.contract.errors import ArtifactError, ServerError
from serving.contract.tensors import OBSERVE
from serving.stages.live.models import LiveSettings

LIVE_MODULE, UPDATER_MODULE = "live", "serving.tables"
UPDATER = "updater"
MAINTAIN_EVERY_S = 600.0
START_TIMEOUT_S = 20.0  # until an updater logs that it follows its source


@dataclass(frozen=True)
class Helper:
    """A helper's command: arguments of Python, the folder where it runs, and after how long it runs again (None: once)."""

    command: list[str]
    folder: Path = PROJECT
    every_s: float | None = None


def follow(state: ServerState, run_dir: Path, waits: bool = True) -> None:
    """Start the helpers that the served generation needs, and stop others: of another generation, or without a supervisor.

    Raises ServerError when the updater does not start; its supervisor keeps trying, as after a crash.
    waits: until the updater follows its source or fails; otherwise only its log tells
    """
    running, helpers = find_helpers(state.tag), list_helpers(state)
    kept_processes = {name: _find_supervised(helper, running) for name, helper in helpers.items()}
    processes.terminate([process for process in running if not any(process in each for each in kept_processes.values())])
    _remove_old_logs(state, run_dir)
    for name, helper in helpers.items():
        if kept_processes[name]:
            continue
        log_path = make_log_path(state, run_dir, name)
        process = start_supervised(log_path, helper.command, helper.folder, helper.every_s)
        if name == UPDATER and waits:
            _wait_for_updater(state, process, log_path)


def list_missing(state: ServerState) -> set[str]:
    """Return the names of the helpers that the served generation needs and no supervisor runs."""
    running = find_helpers(state.tag)
    return {name for name, helper in list_helpers(state).items() if not _find_supervised(helper, running)}


def is_one_left_over(state: ServerState) -> bool:
    """Return whether the updater of a generation runs that is not served, such as an earlier challenger."""
    served_paths = {str(find_tables_settings(state.repo, each)) for each in (state.generation, *read_challengers(state.repo))}
    commands = map(processes.read_command, processes.find_running(state.tag, UPDATER_MODULE))
    return any(command and served_paths.isdisjoint(command) for command in commands)


def find_helpers(tag: str) -> list[psutil.Process]:
    """Return the running helpers of a server and their supervisors."""
    return processes.find_running(tag, LIVE_MODULE, UPDATER_MODULE)


def list_helpers(state: ServerState) -> dict[str, Helper]:
    """Return the helpers that the served generation needs, by name; none for a repository that is not ours."""
    return _list_live_helpers(state) | _list_updaters(state)


def read_live_settings(state: ServerState) -> tuple[StageInfo, LiveSettings] | None:
    """Return what the served generation says of its live store; None for a repository without `observe`."""
    try:
        folder = find_stage_folder(state.repo, OBSERVE, state.generation)
        info = read_stage(folder)
        return info, make_stage_settings(folder, info, LiveSettings)
    except ArtifactError:
        return None


def make_log_path(state: ServerState, run_dir: Path, name: str) -> Path:
    """Return the log of a helper. name: of the helper"""
    port, (kind, _, generation) = state.ports.grpc, name.partition("-")
    file = f"updater-{port}-{generation or state.generation}.log" if kind == UPDATER else f"live-{name}-{port}.log"
    return run_dir / "logs" / file


def _remove_old_logs(state: ServerState, run_dir: Path) -> None:
    """Remove the logs of updaters of generations that are gone: a shop may publish one every hour."""
    for path in (run_dir / "logs").glob(f"{UPDATER}-{state.ports.grpc}-*.log*"):
        generation = path.name.split("-")[2].partition(".")[0]
        if not any(state.repo.glob(f"*/{generation}")):
            path.unlink(missing_ok=True)


def _list_live_helpers(state: ServerState) -> dict[str, Helper]:
    live_settings = read_live_settings(state)
    if live_settings is None:
        return {}
    info, settings = live_settings
    run, common = ["-m", LIVE_MODULE], ["--repo", str(state.repo), "--tag", state.tag]
    helpers = {"maintain": Helper([*run, "maintain", str(state.generation), *common], every_s=MAINTAIN_EVERY_S)}
    if settings.brokers:
        helpers["consume"] = Helper([*run, "consume", str(state.generation), *common])
    if info.live_redis:
        helpers["share"] = Helper([*run, "share", str(state.generation), *common])
    return helpers


def _list_updaters(state: ServerState) -> dict[str, Helper]:
    """Return the updater of the served generation, and of a challenger, with whose answers it is compared."""
    names = {challenger: f"{UPDATER}-{challenger}" for challenger in read_challengers(state.repo)} | {state.generation: UPDATER}
    updaters = {name: _find_updater(state, generation) for generation, name in names.items()}
    return {name: helper for name, helper in updaters.items() if helper is not None}


def _find_updater(state: ServerState, generation: int) -> Helper | None:
    try:
        if not has_update_source(state.repo, generation):
            return None
        settings = find_tables_settings(state.repo, generation)
    except ArtifactError:  # not one of our repositories
        return None
    stage = settings.parents[1]
    folder = stage if (stage / "serving").is_dir() else stage.parent  # the fused layout has the package once, above its stages
    return Helper(["-m", UPDATER_MODULE, str(settings), "--tag", state.tag], folder)


def _find_supervised(helper: Helper, running: list[psutil.Process]) -> list[psutil.Process]:
    """Return the processes of a helper; none without its supervisor, because nothing would restart it."""
    matches = [process for process in running if processes.read_command(process)[-len(helper.command) :] == helper.command]
    return matches if any(processes.runs_module(process, supervisor.__name__) for process in matches) else []


def _wait_for_updater(state: ServerState, process: subprocess.Popen, log_path: Path) -> None:
    if last_line := wait_for_start(process, log_path, "follows", START_TIMEOUT_S):
        later = "the server's supervisor tries again, or `make serve`"
        outcome = "is tried again, at most every 30 s" if process.poll() is None else f"has ended: {later}"
        raise ServerError(
            f"The updater of generation {state.generation} did not start: {last_line.rstrip('.')}. The server answers without "
            f"updates, and the updater {outcome}. Correct what it names. Whole log: {log_path}."
        )
