"""Allow one writer of a repository's configs at a time: a publication, a move between generations or a restart, never two.

The lock file is in the repository itself, so that all paths and mounts share it; tritonserver ignores files there. It is held
for seconds: an export takes it to publish, not while it trains.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from repository.owner import copy_owner
from serving.contract.errors import ConfigError, ServerError
from serving.contract.locks import try_lock

LOCK_FILE = ".publication.lock"
LOCK_TIMEOUT_S = 600.0  # a move loads two generations of every stage, and an export that is ready should wait for it
POLL_S = 0.05


@contextmanager
def hold_publication_lock(repo: Path, timeout_s: float = LOCK_TIMEOUT_S) -> Iterator[None]:
    """Lock `repo` against other publications and moves; not reentrant.

    Raises ServerError after `timeout_s` of waiting, ConfigError where there is no repository, or none that can be written.
    """
    if not repo.is_dir():
        raise ConfigError(f"There is no model repository at {repo}. Make one with `make export REPO={repo}`.")
    deadline_s = time.monotonic() + timeout_s
    is_new = not (repo / LOCK_FILE).exists()
    try:
        file = (repo / LOCK_FILE).open("w")
    except OSError as error:
        raise ConfigError(
            f"{repo / LOCK_FILE} cannot be written: {error.strerror}. A publication and a move write the repository's configs: "
            "make the folder writable for this user."
        ) from error
    with file:  # closing the file, or dying, releases the lock
        if is_new:
            copy_owner(repo / LOCK_FILE, repo)
        while not try_lock(file.fileno()):
            if time.monotonic() > deadline_s:
                raise ServerError(
                    f"Another publication or move has held {repo} for {timeout_s:.0f} s. Wait until it ends "
                    f"(`fuser {repo / LOCK_FILE}` names its process), then try again."
                )
            time.sleep(POLL_S)
        yield
