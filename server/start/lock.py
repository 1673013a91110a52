"""Allow one command at a time to start a server on a port."""

from __future__ import annotations

import fcntl
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from serving.contract.locks import try_lock


@contextmanager
def hold_start_lock(run_dir: Path, grpc_port: int) -> Iterator[None]:
    """Hold a lock on starting a server at this gRPC port. Print a line if another command holds it."""
    path = run_dir / "servers" / f"{grpc_port}.lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        if not try_lock(file.fileno()):
            print(f"waiting for another command that starts a server on gRPC port {grpc_port}", file=sys.stderr)
            fcntl.flock(file.fileno(), fcntl.LOCK_EX)
        yield
