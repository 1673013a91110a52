"""Remove the scratch folders of killed rounds of continuous training. They hold a candidate generation and events of users."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from serving.contract.errors import DependencyError
from serving.contract.locks import try_lock

ROUND_LOCK_FILE = ".follow.lock"  # in the repository, where tritonserver ignores it; a running round holds the lock


def make_scratch_prefix(repo: Path) -> str:
    """Return the prefix of the names of scratch folders, which are beside the repository. `tempfile` adds the rest."""
    return f".{repo.resolve().name}.follow-"


def remove_abandoned(repo: Path) -> int:
    """Remove all scratch folders, unless a round is running: it removes its own at its end. Return the number of removed ones.

    Raises DependencyError for a folder that cannot be removed.
    """
    lock = repo / ROUND_LOCK_FILE
    if not lock.exists():  # no round is running; the lock is not made, because the repository may be gone, or read-only here
        return remove_scratch(repo)
    with lock.open("rb") as file:
        return remove_scratch(repo) if try_lock(file.fileno()) else 0


def remove_scratch(repo: Path) -> int:
    """Remove all scratch folders, and return their number. The caller holds the lock, or knows that no round is running.

    Raises DependencyError for a folder that cannot be removed.
    """
    parent, name = repo.resolve().parent, re.compile(re.escape(make_scratch_prefix(repo)) + "[a-z0-9_]{8}")
    abandoned = [path for path in parent.iterdir() if name.fullmatch(path.name)]
    for path in abandoned:
        try:
            shutil.rmtree(path)
        except OSError as error:
            raise DependencyError(
                f"{path}, which a killed round of `export follow` left, cannot be removed: {error}. Remove it, and try again."
            ) from error
    return len(abandoned)
