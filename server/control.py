"""List, move and stop the servers that were started here, also those that were killed."""

from __future__ import annotations

from pathlib import Path

import psutil

from repository.registry import SERVER, record_act
from repository.triton.models import hash_manifest
from server import keys, processes
from server.generations import activation
from server.helpers import generation_helpers
from server.start.lock import hold_start_lock
from server.state import ServerState, make_state_path, read_known_servers, read_state
from server.status.drift import describe_drift
from server.status.health import find_held_versions
from serving.contract.errors import DependencyError, ServerError

STOP_TIMEOUT_S = 30.0
WATCH_MODULE = "server.watch"


def stop_server(state: ServerState, run_dir: Path, timeout_s: float = STOP_TIMEOUT_S) -> None:
    """Stop a server with its stubs and helpers, and remove its shared memory and state file; also after it was killed."""
    processes.terminate(list_supervisors(state.tag))  # first, because a supervisor would restart the server
    processes.terminate(processes.find_helpers(state.tag))
    processes.stop_processes(state.pid, state.tag, timeout_s)
    keys.forget_key(state.grpc_url, state.tag)
    state.forget(run_dir)


def end_server(state: ServerState, timeout_s: float = 0.0) -> None:
    """Stop tritonserver and its stubs, but leave its gateway, supervisor and updaters running for the next start."""
    processes.stop_processes(state.pid, state.tag, timeout_s, processes.find_server_members)


def list_supervisors(tag: str) -> list[psutil.Process]:
    """Return the processes of a server's supervisor (server/watch.py), if it has one: itself and what starts it again."""
    return processes.find_running(tag, WATCH_MODULE)


def find_running_servers(run_dir: Path, repo: Path | None = None) -> list[ServerState]:
    """Return the running servers that `run_dir` records: those of one repository, or all."""
    states = (state for state in read_known_servers(run_dir) if repo is None or state.repo == repo.resolve())
    return [state for state in states if processes.is_running(state.pid, state.tag)]


def find_held_generations(repo: Path, run_dir: Path) -> set[int] | None:
    """Return the generations of `repo` that running servers have loaded; None when one of the servers does not answer."""
    generations: set[int] = set()
    for state in find_running_servers(run_dir, repo):
        versions = find_held_versions(state.grpc_url)
        if not versions:
            return None
        generations |= versions
    return generations


def clear_stale(run_dir: Path) -> list[ServerState]:
    """Clean up after servers that were killed, and stop servers whose owner has ended. Return the stopped ones.

    A killed server with a supervisor is left to it. For all others, stubs, shared memory and state files are removed.
    """
    states = read_known_servers(run_dir)
    orphans = [state for state in states if state.owner and not processes.lives(state.owner)]
    for state in states:
        if state in orphans:
            stop_server(state, run_dir, timeout_s=0)  # without waiting: it may be suspended, and nobody needs its answers
        elif not processes.is_running(state.pid, state.tag) and not list_supervisors(state.tag):
            stop_server(state, run_dir)
    return orphans


def activate(state: ServerState, generation: int, run_dir: Path, writes: bool = True) -> int:
    """Move a running server and its helpers to another generation. Return the previous generation. Raises ServerError.

    writes: whether to pin the repository to it, and to fail where the move cannot be recorded there

    It also raises when the server has moved, and only what follows failed; the saved state then names the new generation.
    The caller holds the start lock: of two moves at once, the earlier one might be saved last, with the helpers of a generation
    that no longer answers.
    """
    failure: ServerError | None = None
    drift = describe_drift(f"http://{state.host}:{state.ports.metrics}/metrics", state.generation)
    try:
        before = activation.activate(state.grpc_url, state.repo, generation, writes)
    except ServerError as error:
        if not _answers_with(state.grpc_url, generation):
            raise
        before, failure = state.generation, error  # only the memory of the previous generation is not freed
    state = state.change(run_dir, content=hash_manifest(state.repo, generation), generation=generation, fault="")
    if before != generation:
        author, action = ("", "activated") if writes else (SERVER, "followed")
        try:
            record_act(state.repo, "replaced", before, reason=f"by {generation}: {drift}", author=author)
            record_act(state.repo, action, generation, reason=f"in place of {before}", author=author)
        except DependencyError:
            if writes:
                raise  # otherwise others write the repository, which may be read-only here
    saved = read_state(make_state_path(run_dir, state.ports.grpc))
    if saved is None or saved.tag != state.tag:  # no command would find helpers that were started now
        raise ServerError(
            f"The server at {state.grpc_url} was stopped while it moved to generation {generation}, as by `make stop`. "
            "Start it again."
        )
    generation_helpers.follow(state, run_dir)
    if failure is not None:
        raise failure
    return before


def move_servers(repo: Path, generation: int, run_dir: Path) -> None:
    """Move all servers of a repository to another generation. The supervisor of one that is down starts it with that one.

    A server that is being restarted is waited for. One that is out of service is left out: its supervisor follows the pin.
    Raises ServerError.
    """
    for known_state in read_known_servers(run_dir):
        if known_state.repo != repo.resolve():
            continue
        with hold_start_lock(run_dir, known_state.ports.grpc):
            state = read_state(make_state_path(run_dir, known_state.ports.grpc))
            if state is None or state.tag != known_state.tag or state.fault:  # stopped meanwhile, or out of service
                continue
            if processes.is_running(state.pid, state.tag):
                activate(state, generation, run_dir)
            else:
                state.change(run_dir, generation=generation)


def _answers_with(grpc_url: str, generation: int) -> bool:
    try:
        return activation.find_served_generation(grpc_url) == generation
    except ServerError:
        return False
