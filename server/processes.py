"""Find the processes of one server by its tag: tritonserver and a stub per Python model instance.

The tag is the prefix of the server's shared memory regions, an option of tritonserver and an argument of each stub. So stubs
are found even when the server was killed, and a process that reuses its pid is not.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import psutil

from serving.contract.errors import ServerError

SHM_DIR = Path("/dev/shm")
STUB_PROGRAM = "triton_python_backend_stub"
STUB_NAME = STUB_PROGRAM[:15]  # as the kernel truncates it
SHELLS = ("sh", "bash")
SERVER_NAMES = "triton"  # tritonserver and its stubs
PROCESS_NAMES = (SERVER_NAMES, "python")  # the others: gateway, supervisor, updaters of embedding tables
POLL_S = 0.05
STOP_TIMEOUT_S = 5.0  # for a gateway to answer what it has begun, and for an updater to commit what it applied
SETTLE_S = 1.0  # time for a server to reap the stubs of an unloaded generation


def find_members(tag: str) -> list[psutil.Process]:
    """Return the live processes of the server with `tag`: itself, stubs and updaters."""
    return [process for process in psutil.process_iter() if _carries(process, tag)]


def find_running(tag: str, *modules: str) -> list[psutil.Process]:
    """Return the live processes of a server that run one of these modules (`python -m …`), and their supervisors."""
    return [process for process in find_members(tag) if any(runs_module(process, module) for module in modules)]


def is_running(pid: int, tag: str) -> bool:
    """Return whether the server process is alive."""
    try:
        return _carries(psutil.Process(pid), tag)
    except psutil.NoSuchProcess:
        return False


def _carries(process: psutil.Process, tag: str) -> bool:
    try:
        return process.name().startswith(PROCESS_NAMES) and any(tag in argument for argument in process.cmdline())
    except psutil.Error:  # gone meanwhile, a zombie, or another user's
        return False


def _starts_stub(process: psutil.Process, tag: str) -> bool:
    """Return whether a process is the shell that tritonserver starts a stub with: it becomes the stub in a moment."""
    command = " ".join(read_command(process)) if read_process_name(process) in SHELLS else ""
    return STUB_PROGRAM in command and tag in command


def runs_module(process: psutil.Process, module: str) -> bool:
    """Return whether a Python process was started with `-m module`, or supervises one that was."""
    return ("-m", module) in pairwise(read_command(process))


def read_command(process: psutil.Process) -> list[str]:
    """Return the command line of a process; [] when it is gone."""
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def identify_process(pid: int | None = None) -> str:
    """Return a unique name of a process, by default of this one; "" when there is none with that pid."""
    try:
        return f"{pid or os.getpid()} since {psutil.Process(pid).create_time()}"
    except psutil.NoSuchProcess:
        return ""


def lives(name: str) -> bool:
    """Return whether the process that `identify_process` named is alive."""
    return identify_process(int(name.split()[0])) == name


def find_server_members(tag: str) -> list[psutil.Process]:
    """Return the live processes of tritonserver alone: itself and its stubs."""
    return [process for process in find_members(tag) if read_process_name(process).startswith(SERVER_NAMES)]


def find_helpers(tag: str) -> list[psutil.Process]:
    """Return the live processes of a server beside tritonserver: gateway, guard, updaters, and their supervisors."""
    return [process for process in find_members(tag) if not read_process_name(process).startswith(SERVER_NAMES)]


def read_process_name(process: psutil.Process) -> str:
    """Return the name of a process; "" when it is gone."""
    try:
        return process.name()
    except psutil.NoSuchProcess:
        return ""


def terminate(running: list[psutil.Process]) -> None:
    """Terminate processes, all at once, and kill those that do not end in STOP_TIMEOUT_S. Nothing acknowledged is lost.

    This process is left out: a supervisor that stops its server carries the server's tag too.
    """
    running = exclude_this_process(running)
    for process in running:
        with may_signal(process.pid):
            process.terminate()
    deadline_s = time.monotonic() + STOP_TIMEOUT_S
    while alive := [process for process in running if not _has_ended(process)]:
        if time.monotonic() > deadline_s:
            for process in alive:
                with may_signal(process.pid):
                    process.kill()
            return
        time.sleep(POLL_S)


@contextlib.contextmanager
def may_signal(pid: int) -> Iterator[None]:
    """Send a signal to a process of a server, unless it is gone. Raises ServerError where this user may not."""
    try:
        yield
    except (psutil.NoSuchProcess, ProcessLookupError):
        pass
    except (psutil.AccessDenied, PermissionError) as error:
        raise ServerError(
            f"Process {pid} of the server belongs to {find_owner(pid)}, and {find_owner(os.getpid())} may not stop it. "
            "Run the command as that user."
        ) from error


def find_owner(pid: int) -> str:
    """Return the name of a process's user."""
    try:
        return f"user {psutil.Process(pid).username()}"
    except psutil.Error:
        return "another user"


def exclude_this_process(running: list[psutil.Process]) -> list[psutil.Process]:
    return [process for process in running if process.pid != os.getpid()]


def _has_ended(process: psutil.Process) -> bool:
    """Return whether a process is gone, or is a zombie: its exit code is its parent's business, which may never ask for it."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def stop_processes(pid: int, tag: str, timeout_s: float, find: Callable[[str], list[psutil.Process]] = find_members) -> None:
    """Stop the server `pid` and its stubs: terminate, wait `timeout_s`, then kill. Remove their shared memory.

    find: returns the processes of a tag that are killed when the time is over, except this one
    """
    if is_running(pid, tag):
        with may_signal(pid):
            os.kill(pid, signal.SIGTERM)
        _wait_gone(pid, tag, timeout_s)
    # Stubs outlive a killed server by some seconds and ignore signals, because they only listen to their server.
    while left := exclude_this_process([*find(tag), *filter(lambda each: _starts_stub(each, tag), psutil.process_iter())]):
        for process in left:
            with may_signal(process.pid):
                process.kill()
        time.sleep(POLL_S)
    for region in SHM_DIR.glob(f"{tag}*"):
        try:
            region.unlink(missing_ok=True)
        except PermissionError as error:
            raise ServerError(
                f"The server has ended, but its shared memory {region} belongs to uid {region.stat().st_uid}. "
                "Remove it as that user."
            ) from error


def find_dead_stubs(pid: int) -> set[int]:
    """Return which Python model processes of the running server `pid` have died. The server waits for them forever."""
    try:
        children = psutil.Process(pid).children()
    except psutil.NoSuchProcess:
        return set()
    dead = set()
    for child in children:
        with contextlib.suppress(psutil.NoSuchProcess):
            if child.name().startswith(STUB_NAME) and child.status() == psutil.STATUS_ZOMBIE:
                dead.add(child.pid)
    return dead


def count_lost_stubs(pid: int) -> int:
    """Return how many stubs were killed or crashed: those that are dead, and still are after SETTLE_S.

    Their models fail every request. tritonserver does not restart stubs, so only a restart of the server helps. When it unloads
    a generation, its stubs end one after another, and each is dead for a moment.
    """
    if not (dead := find_dead_stubs(pid)):
        return 0
    time.sleep(SETTLE_S)
    return len(dead & find_dead_stubs(pid))


def _wait_gone(pid: int, tag: str, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while is_running(pid, tag) and time.monotonic() < deadline:
        time.sleep(POLL_S)
