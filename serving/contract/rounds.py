"""Remove what killed exports and rounds of continuous training left. It holds a candidate generation and events of users."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

from serving.contract.errors import DependencyError
from serving.contract.locks import try_lock
from serving.contract.tensors import ENSEMBLE

ROUND_LOCK_FILE = ".follow.lock"  # in the repository, where tritonserver ignores it; a running round holds the lock


def make_scratch_prefix(repo: Path) -> str:
    """Return the prefix of the names of scratch folders, which are beside the repository. `tempfile` adds the rest."""
    return f".{repo.resolve().name}.follow-"


def find_staging(repo: Path) -> tuple[Path, Path]:
    """Return where an export builds a generation: beside the repository, or inside of one that is a mount of its own."""
    repo = repo.resolve()
    return repo.with_name(f".{repo.name}.staging"), repo / ENSEMBLE / ".staging"


def find_staging_lock(repo: Path) -> Path:
    """Return the file whose lock a running export holds."""
    repo = repo.resolve()
    return repo.with_name(f".{repo.name}.lock")


def remove_abandoned(repo: Path) -> int:
    """Remove the folders of rounds and exports that were killed. Return their number.

    Those of a running one stay: it removes them at its end. Raises DependencyError for a folder that cannot be removed.
    """
    return _call_unless_locked(repo / ROUND_LOCK_FILE, lambda: remove_scratch(repo)) + _call_unless_locked(
        find_staging_lock(repo), lambda: _remove(path for path in find_staging(repo) if path.exists())
    )


def remove_scratch(repo: Path) -> int:
    """Remove all scratch folders of rounds. Return their number. The caller holds the lock, or knows that no round is running.

    Raises DependencyError for a folder that cannot be removed.
    """
    parent, name = repo.resolve().parent, re.compile(re.escape(make_scratch_prefix(repo)) + "[a-z0-9_]{8}")
    return _remove(path for path in parent.iterdir() if name.fullmatch(path.name))


def _call_unless_locked(lock: Path, remove: Callable[[], int]) -> int:
    """Remove, unless a process holds the lock: then return 0."""
    if not lock.exists():  # nobody holds it; it is not made, because the repository may be gone, or read-only here
        return remove()
    with lock.open("rb") as file:
        return remove() if try_lock(file.fileno()) else 0


def _remove(folders: Iterable[Path]) -> int:
    abandoned = list(folders)
    for path in abandoned:
        try:
            shutil.rmtree(path)
        except OSError as error:
            raise DependencyError(
                f"{path}, which a killed export or round left, cannot be removed: {error}. Remove it, and try again."
            ) from error
    return len(abandoned)
