"""Allow one process at a time to start a server on a port, or to move it to another generation."""

from __future__ import annotations

import fcntl
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from serving.contract.locks import try_lock


def make_lock_folder(run_dir: Path) -> Path:
    """Return the folder of a run folder's locks. Other users may not enter it: whoever can open a file can lock it for ever."""
    folder = run_dir / "locks"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.chmod(0o700)  # it may be older than this rule
    return folder


@contextmanager
def hold_start_lock(run_dir: Path, grpc_port: int) -> Iterator[None]:
    """Hold a lock on starting and moving the server at this gRPC port. Print a line if another process holds it.

    Who needs the publication lock too (repository/lock.py) takes this one first: otherwise two could wait for each other.
    """
    with (make_lock_folder(run_dir) / f"{grpc_port}.start.lock").open("w") as file:
        if not try_lock(file.fileno()):
            print(f"waiting for another command that starts or moves a server on gRPC port {grpc_port}", file=sys.stderr)
            fcntl.flock(file.fileno(), fcntl.LOCK_EX)
        yield
