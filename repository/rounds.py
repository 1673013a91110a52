"""Record beside the models that a round of continuous training runs, and how the last one ended, for metrics.

    .follow.running.json   while a round runs; a process that is killed leaves it behind
    .follow.json           the last round that ended

The record of acts (registry.py) has what was published and what was refused; a round that waits or fails is no act.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal, get_args

import psutil

from repository.owner import copy_owner
from serving.contract.locks import try_lock
from serving.contract.rounds import ROUND_LOCK_FILE

ROUND_FILE = ".follow.json"  # tritonserver ignores it
RUNNING_FILE = ".follow.running.json"
SAME_PROCESS_S = 1.0  # two readings of one process's creation time differ by less
Outcome = Literal["published", "not published", "waits", "failed"]


@dataclass(frozen=True)
class EndedRound:
    """The last round. ended_s: unix seconds; report: what it printed, one line"""

    outcome: Outcome
    ended_s: float
    report: str


@dataclass(frozen=True)
class RunningRound:
    """A round that has not ended. began_s, created_s: unix seconds at which the round and its process began

    machine: host and namespace of process ids, within which `pid` identifies a process
    """

    began_s: float
    pid: int
    created_s: float
    machine: str

    @property
    def is_dead(self) -> bool:
        """Whether its process is gone. That of another machine counts as alive, because nobody here can tell."""
        if self.machine != find_machine():
            return False
        try:
            process = psutil.Process(self.pid)
            is_other = abs(process.create_time() - self.created_s) > SAME_PROCESS_S  # a new process with its number
            return is_other or process.status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True

    def describe_death(self) -> str:
        began = datetime.fromtimestamp(self.began_s, UTC).strftime("%Y-%m-%d %H:%M:%S")
        return (
            f"the round that began at {began} UTC never ended: process {self.pid} on {self.machine} was killed, perhaps for "
            "lack of memory, or its machine went down"
        )


@contextmanager
def hold_round_lock(repo: Path) -> Iterator[bool]:
    """Hold the lock of a repository's rounds while the block runs. Yield False, without it, if another round holds it."""
    with open(repo / ROUND_LOCK_FILE, "wb") as file:  # closing it, or dying, releases the lock
        copy_owner(repo / ROUND_LOCK_FILE, repo)
        yield try_lock(file.fileno())


@contextmanager
def mark_round(repo: Path) -> Iterator[None]:
    """Record that a round runs, until the block ends. A former one, whose mark is still there, is recorded as failed.

    The caller holds the lock of the repository's rounds, so a former round was killed, wherever it ran. Raises OSError.
    """
    if former := read_mark(repo):
        record_round(repo, "failed", former.describe_death())
    process = psutil.Process()
    replace_file(repo / RUNNING_FILE, RunningRound(time.time(), process.pid, process.create_time(), find_machine()))
    try:
        yield
    finally:
        (repo / RUNNING_FILE).unlink(missing_ok=True)


def record_round(repo: Path, outcome: Outcome, report: str) -> None:
    """Replace the record of the round before by one rename. Raises OSError."""
    replace_file(repo / ROUND_FILE, EndedRound(outcome, time.time(), report))


def read_round(repo: Path) -> EndedRound | None:
    """Return the last round, None if none ever ended. One that was killed, or whose record cannot be read, counts as failed."""
    running = read_mark(repo)
    if running and running.is_dead:
        return EndedRound("failed", running.began_s, running.describe_death())
    path = repo / ROUND_FILE
    try:
        ended = EndedRound(**json.loads(path.read_text()))
        if ended.outcome not in get_args(Outcome) or not isinstance(ended.ended_s, float):
            raise ValueError(f"outcome {ended.outcome!r}, ended {ended.ended_s!r}")
        return ended
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        return EndedRound("failed", path.stat().st_mtime, f"{path} cannot be read: {error}")


def read_running(repo: Path) -> RunningRound | None:
    """Return the round that runs, as far as this machine can tell."""
    running = read_mark(repo)
    return running if running and not running.is_dead else None


def read_mark(repo: Path) -> RunningRound | None:
    """Return the round that left its mark, dead or alive. One whose mark cannot be read is of an unknown machine."""
    path = repo / RUNNING_FILE
    try:
        return RunningRound(**json.loads(path.read_text()))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError):
        return RunningRound(path.stat().st_mtime, 0, 0.0, "an unknown machine")


def replace_file(path: Path, record: EndedRound | RunningRound) -> None:
    """Write a record by one rename. Raises OSError."""
    new = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        new.write_text(json.dumps(asdict(record)) + "\n")
        copy_owner(new, path.parent)
        os.rename(new, path)
    finally:
        new.unlink(missing_ok=True)


def find_machine() -> str:
    """Return the name of this host, with the namespace of its process ids: containers of one host may share its name."""
    return f"{socket.gethostname()} ({os.readlink('/proc/self/ns/pid')})"
