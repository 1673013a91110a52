"""Connect to the Dask cluster that fits NVTabular, and refuse one that cannot do it."""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from distributed import Client, KilledWorker
from distributed.comm import CommClosedError

from serving.contract.errors import ConfigError, DependencyError

ROWS_PER_FILE = 1 << 20
PACKAGE = "training"  # of this checkout
LOST = (KilledWorker, CancelledError, CommClosedError)
LONGEST_WITHOUT_WORKERS_S = 60.0  # Dask starts a worker that ended again within seconds
START = (
    "Start scheduler and workers in a checkout of this version: `PYTHONPATH=$PWD .venv/bin/dask worker ADDRESS` "
    "(docs/operating.md)."
)


@dataclass(frozen=True)
class Cluster:
    """scheduler: address, tcp://host:port. folder: shared by this process and all workers. rows_per_file: of training rows."""

    scheduler: str
    folder: Path
    rows_per_file: int = ROWS_PER_FILE


@contextmanager
def connect(scheduler: str, folder: Path) -> Iterator[Client]:
    """Connect, and make the cluster the one that Dask and NVTabular compute on, until the end of the context.

    folder: must be writable for every worker
    Raises DependencyError when the scheduler does not answer, has no worker, loses all for LONGEST_WITHOUT_WORKERS_S, is lost,
    or a process cannot import this project; and ConfigError when a worker cannot write the folder.
    """
    try:
        client = Client(scheduler)
    except TypeError as error:  # Dask's way to say that TLS is not set up
        raise DependencyError(
            f"The Dask scheduler {scheduler} cannot be reached by TLS: {error}. Set DASK_DISTRIBUTED__COMM__TLS__CA_FILE and "
            "the other TLS settings of Dask."
        ) from error
    except OSError as error:
        raise DependencyError(
            f"The Dask scheduler {scheduler} does not answer: {error}. Start it (`.venv/bin/dask scheduler`), "
            "correct [dask] scheduler, or leave it out to fit in this process."
        ) from error
    with client:
        try:
            _refuse_unfit(client, scheduler, folder)
            with _close_without_workers(client):
                yield client
        except Exception as error:
            if not isinstance(error, LOST) and client.status == "running":
                raise
            raise DependencyError(
                f"The Dask cluster {scheduler} was lost while it fitted NVTabular: {error}. Its workers' logs say why; "
                "give them more memory if it ran out. Then export again."
            ) from error


@contextmanager
def _close_without_workers(client: Client) -> Iterator[None]:
    """Close the client in the context once all workers are gone: Dask would wait for others without end, and say nothing."""
    ended = threading.Event()

    def watch() -> None:
        seen_s = time.monotonic()
        with suppress(OSError):  # the scheduler is lost, which the fit meets, too
            while not ended.wait(1):
                if client.nthreads():
                    seen_s = time.monotonic()
                elif time.monotonic() - seen_s > LONGEST_WITHOUT_WORKERS_S:
                    client.close()
                    return

    watcher = threading.Thread(target=watch, name="dask workers", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join()


def _refuse_unfit(client: Client, scheduler: str, folder: Path) -> None:
    found_by_process = {**client.run(find_spec, PACKAGE), scheduler: client.run_on_scheduler(find_spec, PACKAGE)}
    if len(found_by_process) == 1:
        raise DependencyError(f"The Dask scheduler {scheduler} has no worker. {START}")
    if unable := [address for address, package in found_by_process.items() if not package]:
        raise DependencyError(f"{', '.join(unable)} of the Dask cluster cannot import {PACKAGE}. {START}")
    if unable := [address for address, writable in client.run(can_write, str(folder)).items() if not writable]:
        raise ConfigError(
            f"[dask] folder: {folder.parent} cannot be written by {', '.join(unable)}. Mount the same folder at the same path "
            "on all workers, and run them as the user that exports."
        )


def can_write(folder: str) -> bool:
    """Return whether this process, a worker, can write a folder."""
    try:
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False
