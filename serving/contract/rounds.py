"""Remove what killed rounds of continuous training left: a round's scratch folder holds a candidate, and events of users."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from serving.contract.errors import DependencyError
from serving.contract.locks import try_lock

ROUND_LOCK_FILE = ".follow.lock"  # in the repository; held by the round that runs. tritonserver ignores it


def make_scratch_prefix(repo: Path) -> str:
    """Return how the names of scratch folders begin; `tempfile` adds the rest. They are beside the repository."""
    return f".{repo.resolve().name}.follow-"


def remove_abandoned(repo: Path) -> int:
    """Remove all scratch folders unless a round runs, which removes its own at its end. Return how many they were.

    Raises DependencyError for one that cannot be removed.
    """
    lock = repo / ROUND_LOCK_FILE
    if not lock.exists():  # no round runs, and the repository may be gone, or read-only here
        return remove_scratch(repo)
    with lock.open("rb") as file:
        return remove_scratch(repo) if try_lock(file.fileno()) else 0


def remove_scratch(repo: Path) -> int:
    """Do what `remove_abandoned` says, for a caller that holds the lock."""
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
