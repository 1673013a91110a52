"""Faults of a served repository, by name. Each is a context that causes the fault, and ends it if nothing else repairs it."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from experiments.fault_backends import Broker, RedisNode, keep_paused
from experiments.served import Served
from server.control import list_supervisors
from server.helpers import generation_helpers
from server.processes import SHM_DIR, find_server_members, read_command
from server.start.ports import is_free
from serving.contract.tensors import LIVE_MODELS, STAGES
from serving.live.store import DATA_FILE, find_live_folder

CGROUP = Path("/sys/fs/cgroup")
CPU_GROUPS = CGROUP / "cpu" if (CGROUP / "cpu").is_dir() else CGROUP  # of version 1 or 2
THROTTLED = "a tenth of a core"
PERIOD_US = 100_000
SHARE = 0.1  # of one core that remains
MAPPED = ("retrieve", "item_vectors.npy")  # a file that a stage maps and reads for every answer
READ_BY_GATEWAY = ("preprocess", "store/user_ids.npy")
HALF_GENERATION = 99
SERVER, GATEWAY, SUPERVISOR = "server", "gateway", "supervisor"
POLL_S = 0.01


@dataclass(frozen=True)
class Site:
    """A server with its gateway and supervisor, and what they depend on."""

    served: Served
    node: RedisNode
    broker: Broker

    @property
    def supervisor(self) -> psutil.Process:
        (process,) = self.find_supervisors()
        return process

    def find_supervisors(self) -> list[psutil.Process]:
        """Return the supervisor, without the process that starts it again; empty while it does not run."""
        supervisors = list_supervisors(self.served.state.tag)
        return [process for process in supervisors if "server.supervisor" not in read_command(process)]

    @property
    def live_folder(self) -> Path:
        return find_live_folder(self.served.repo)

    def find_artifact(self, model: str, name: str) -> Path:
        """Return a file of the generation that answers."""
        return self.served.repo / model / str(self.served.state.generation) / name


@dataclass(frozen=True)
class Fault:
    """A fault and its expected effects.

    cause: context that causes the fault, and ends it if nothing else repairs it
    revived: what must be started again automatically: the server, the gateway or the supervisor; "": nothing, and the fault
        ends after `lasts_s`
    fails_readiness: whether `/readyz` must fail; None if it may
    delays_messages: whether messages of Kafka arrive only after the fault
    refuses_events: whether the fault ends only after an event was refused: LMDB first uses up the free pages of its file
    is_shown: whether the metrics pages must show it; False if callers notice nothing and nobody has to repair anything
    """

    cause: Callable[[Site], AbstractContextManager[None]]
    revived: str = SERVER
    lasts_s: float = 0.0
    fails_readiness: bool | None = True
    delays_messages: bool = False
    refuses_events: bool = False
    is_shown: bool = True


@contextmanager
def kill_stub(model: str, site: Site) -> Iterator[None]:
    site.served.find_stub(model).kill()
    yield


def pause_stub(model: str, site: Site) -> AbstractContextManager[None]:
    return keep_paused(site.served.find_stub(model).pid)


@contextmanager
def kill_server(site: Site) -> Iterator[None]:
    os.kill(site.served.state.pid, signal.SIGKILL)
    yield


def pause_server(site: Site) -> AbstractContextManager[None]:
    return keep_paused(site.served.state.pid)


@contextmanager
def kill_gateway(site: Site) -> Iterator[None]:
    site.served.find_gateway_processes()[-1].kill()
    yield


def pause_gateway(site: Site) -> AbstractContextManager[None]:
    return keep_paused(site.served.find_gateway_processes()[-1].pid)


@contextmanager
def kill_supervisor(site: Site) -> Iterator[None]:
    site.supervisor.kill()
    yield


@contextmanager
def kill_consumer(site: Site) -> Iterator[None]:
    for process in generation_helpers.find_helpers(site.served.state.tag):
        if "consume" in process.cmdline() and "server.supervisor" not in process.cmdline():
            process.kill()
    yield


@contextmanager
def keep_down(backend: RedisNode | Broker) -> Iterator[None]:
    backend.kill()
    try:
        yield
    finally:
        backend.start()


@contextmanager
def fill_disk(tag: str, live_folder: Path) -> Iterator[None]:
    """Keep the live store's file from growing, by a limit on all processes that write to it, in place of a full disk."""
    limit_files(tag, (live_folder / DATA_FILE).stat().st_size)
    try:
        yield
    finally:
        limit_files(tag, psutil.RLIM_INFINITY)


def limit_files(tag: str, size: int) -> None:
    """Limit the files of a server's processes to `size` bytes. The processes are listed anew, because some end meanwhile."""
    for process in find_server_members(tag) + generation_helpers.find_helpers(tag):
        with suppress(psutil.NoSuchProcess):
            process.rlimit(psutil.RLIMIT_FSIZE, (size, psutil.RLIM_INFINITY))


@contextmanager
def change_for_now(path: Path, change: Callable[[Path], None]) -> Iterator[None]:
    """Change a published file, and restore it at the end."""
    content, mode = path.read_bytes(), path.stat().st_mode
    path.chmod(0o644)
    change(path)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        path.write_bytes(content)
        path.chmod(mode)


def overwrite(path: Path) -> None:
    """Swap the halves of a file's array in place: each vector stays plausible, but belongs to another item."""
    array = np.load(path, mmap_mode="r+")
    array[:] = np.roll(array, len(array) // 2, axis=0)
    array.flush()


def replace_overwritten(path: Path) -> None:
    """Replace a file by an overwritten copy: unlike a write in place, this waits for no lease."""
    copy = path.with_name(f"{path.name}.copy")
    shutil.copy(path, copy)
    overwrite(copy)
    copy.replace(path)


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def damage(artifact: tuple[str, str], change: Callable[[Path], None], site: Site) -> AbstractContextManager[None]:
    return change_for_now(site.find_artifact(*artifact), change)


@contextmanager
def damage_and_kill(site: Site) -> Iterator[None]:
    """Damage a file and kill the server before the supervisor looks: the restart finds the damage."""
    supervisor, path = site.supervisor, site.find_artifact(*MAPPED)
    with ExitStack() as damaged:
        with keep_paused(supervisor.pid):
            damaged.enter_context(change_for_now(path, replace_overwritten))
            os.kill(site.served.state.pid, signal.SIGKILL)
        yield


@contextmanager
def leave_half_a_generation(site: Site) -> Iterator[None]:
    """Leave the files that a killed publication would leave, and kill the server, so that it is restarted with them."""
    repo = site.served.repo
    halves = [repo / model / str(HALF_GENERATION) for model in STAGES[:2]]
    for half in halves:
        shutil.copytree(half.with_name(str(site.served.state.generation)), half)
    (halves[-1] / "stage.json").unlink()
    os.kill(site.served.state.pid, signal.SIGKILL)
    try:
        yield
    finally:
        for half in halves:
            shutil.rmtree(half)


@contextmanager
def take_port(site: Site) -> Iterator[None]:
    """Kill the server, and listen at its port before the supervisor starts it again."""
    supervisor, state = site.supervisor, site.served.state
    with keep_paused(supervisor.pid):
        os.kill(state.pid, signal.SIGKILL)
        while not is_free(state.ports.grpc):  # until the killed server is gone
            time.sleep(POLL_S)
        listener = socket.create_server(("127.0.0.1", state.ports.grpc))
    with listener:
        yield


@contextmanager
def remove_shared_memory(site: Site) -> Iterator[None]:
    for path in SHM_DIR.glob(f"{site.served.state.tag}*"):
        path.unlink()
    yield


@contextmanager
def throttle(tag: str) -> Iterator[None]:
    """Limit a tritonserver with its stubs to SHARE of a core. Raises OSError where this user may make no control group."""
    group = CPU_GROUPS / f"throttled-{os.getpid()}"
    group.mkdir()
    try:
        if (group / "cpu.max").exists():
            (group / "cpu.max").write_text(f"{int(SHARE * PERIOD_US)} {PERIOD_US}")
        else:
            (group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
            (group / "cpu.cfs_quota_us").write_text(str(int(SHARE * PERIOD_US)))
        for process in find_server_members(tag):
            (group / "cgroup.procs").write_text(str(process.pid))
        yield
    finally:
        for pid in (group / "cgroup.procs").read_text().split():
            with suppress(ProcessLookupError):  # it ended meanwhile
                (CPU_GROUPS / "cgroup.procs").write_text(pid)
        group.rmdir()


STAYS: dict[str, Any] = {"revived": "", "lasts_s": 4.0, "fails_readiness": False}
BROKER_STAYS = STAYS | {"lasts_s": 8.0}  # a consumer reports after three to four seconds that no broker answers
FAULTS: dict[str, Fault] = {
    **{f"{model} killed": Fault(partial(kill_stub, model)) for model in STAGES},
    **{f"{model} paused": Fault(partial(pause_stub, model)) for model in STAGES},
    **{f"{model} killed": Fault(partial(kill_stub, model), fails_readiness=None) for model in LIVE_MODELS},
    **{f"{model} paused": Fault(partial(pause_stub, model), fails_readiness=None) for model in LIVE_MODELS},
    "tritonserver killed": Fault(kill_server),
    "tritonserver paused": Fault(pause_server),
    "gateway killed": Fault(kill_gateway, GATEWAY),
    "gateway paused": Fault(pause_gateway, GATEWAY),
    "supervisor killed": Fault(kill_supervisor, SUPERVISOR, fails_readiness=False, is_shown=False),
    "Redis killed": Fault(lambda site: keep_down(site.node), **STAYS),
    "Redis paused": Fault(lambda site: keep_paused(site.node.pid), **STAYS),
    "broker killed": Fault(lambda site: keep_down(site.broker), delays_messages=True, **BROKER_STAYS),
    "broker paused": Fault(lambda site: keep_paused(site.broker.pid), delays_messages=True, **BROKER_STAYS),
    "consumer of the broker killed": Fault(kill_consumer, delays_messages=True, is_shown=False, **STAYS),
    "disk of the live store full": Fault(
        lambda site: fill_disk(site.served.state.tag, site.live_folder), refuses_events=True, **STAYS
    ),
    "artifact overwritten": Fault(partial(damage, MAPPED, overwrite)),
    "artifact cut short": Fault(partial(damage, MAPPED, truncate)),
    "artifact missing": Fault(partial(damage, MAPPED, Path.unlink)),
    "artifact of the gateway cut short": Fault(partial(damage, READ_BY_GATEWAY, truncate)),
    "artifact damaged at a restart": Fault(damage_and_kill),
    "half-written generation at a restart": Fault(leave_half_a_generation),
    "port taken at a restart": Fault(take_port, "", lasts_s=4.0),
    "shared memory removed": Fault(remove_shared_memory, is_shown=False, **STAYS),
    THROTTLED: Fault(lambda site: throttle(site.served.state.tag), "", lasts_s=8.0, fails_readiness=None),
}
