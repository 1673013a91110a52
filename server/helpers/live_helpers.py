"""Run the helpers of a server's live store (`python -m live …`), each under a supervisor that restarts it.

    maintain   every ten minutes: archive the log's older part, forget idle users
    consume    events of a Kafka topic, where [live] brokers names one
    share      the state of users and items in Redis, where [live] redis names nodes

They carry the server's tag and end with the server. Where several servers share a store, each has its own helpers, and locks
in the store's folder let only one of each kind work.
"""

from __future__ import annotations

from pathlib import Path

import psutil

from server import processes, supervisor
from server.state import ServerState
from server.supervised import start_supervised
from serving.contract.artifacts import StageInfo, find_stage_folder, make_stage_settings, read_stage
from serving.contract.errors import ArtifactError
from serving.contract.tensors import OBSERVE
from serving.stages.live.models import LiveSettings

MODULE = "live"
MAINTAIN_EVERY_S = 600.0


def follow(state: ServerState, run_dir: Path) -> None:
    """Start the helpers that the served generation needs, and stop those of another generation."""
    running, wanted = find_helpers(state.tag), list_commands(state)
    processes.terminate([process for process in running if not any(runs(process, command) for command in wanted.values())])
    for name in _find_unsupervised(wanted, running):
        _start(state, run_dir, name, wanted[name])


def list_missing(state: ServerState) -> set[str]:
    """Return the names of the helpers that the served generation needs and no supervisor runs."""
    return _find_unsupervised(list_commands(state), find_helpers(state.tag))


def _find_unsupervised(commands: dict[str, list[str]], running: list[psutil.Process]) -> set[str]:
    supervisors = [process for process in running if processes.runs_module(process, supervisor.__name__)]
    return {name for name, command in commands.items() if not any(runs(each, command) for each in supervisors)}


def list_commands(state: ServerState) -> dict[str, list[str]]:
    """Return the command of each helper by its name; none for a repository without `observe`."""
    found = read_settings(state)
    if found is None:
        return {}
    info, settings = found
    common = ["--repo", str(state.repo), "--tag", state.tag]
    commands = {"maintain": ["maintain", *common]}
    if settings.brokers:
        commands["consume"] = ["consume", str(state.generation), *common]
    if info.live_redis:
        commands["share"] = ["share", str(state.generation), *common]
    return commands


def read_settings(state: ServerState) -> tuple[StageInfo, LiveSettings] | None:
    """Return what the served generation says of its live store; None for a repository without `observe`."""
    try:
        folder = find_stage_folder(state.repo, OBSERVE, state.generation)
        info = read_stage(folder)
        return info, make_stage_settings(folder, info, LiveSettings)
    except ArtifactError:
        return None


def make_log_path(state: ServerState, run_dir: Path, name: str) -> Path:
    """Return the log of a helper. name: of the helper"""
    return run_dir / "logs" / f"live-{name}-{state.ports.grpc}.log"


def find_helpers(tag: str) -> list[psutil.Process]:
    """Return the helpers of a server and their supervisors."""
    return [process for process in processes.find_members(tag) if processes.runs_module(process, MODULE)]


def runs(process: psutil.Process, command: list[str]) -> bool:
    """Return whether a process runs a command, or supervises a process that does."""
    try:
        return process.cmdline()[-len(command) :] == command
    except psutil.Error:  # gone meanwhile
        return False


def _start(state: ServerState, run_dir: Path, name: str, command: list[str]) -> None:
    every_s = MAINTAIN_EVERY_S if name == "maintain" else None
    start_supervised(make_log_path(state, run_dir, name), ["-m", MODULE, *command], every_s=every_s)
