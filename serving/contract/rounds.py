"""Remove what killed exports and rounds of continuous training left. It holds a candidate generation and events of users."""

from __future__ import annotations

import logging
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from serving.contract.errors import DependencyError
from serving.contract.locks import try_lock
from serving.contract.tensors import ENSEMBLE

log = logging.getLogger(__name__)

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
    """Remove the folders beside a repository that killed rounds and exports left. Return their number.

    Those of a running one stay: it removes them at its end. A staging folder inside the repository stays too, with a warning:
    an export on another machine may write it, and its lock cannot be seen here. The next export removes it.

    Raises DependencyError for a folder that cannot be removed.
    """
    staging, inside = find_staging(repo)
    with hold_if_free(repo / ROUND_LOCK_FILE) as is_no_round, hold_if_free(find_staging_lock(repo)) as is_no_export:
        scratch = list_scratch(repo) if is_no_round else []
        count = _remove([*scratch, staging] if is_no_export and staging.exists() else scratch)
    if inside.exists():
        log.warning(
            "%s stays, with events of users: an export on any machine that has this mount may write it. If none runs, "
            "remove it; the next export does so, too.",
            inside,
        )
    return count


def remove_scratch(repo: Path) -> int:
    """Remove all scratch folders of rounds. Return their number. The caller holds the lock of rounds.

    Raises DependencyError for a folder that cannot be removed.
    """
    return _remove(list_scratch(repo))


def list_scratch(repo: Path) -> list[Path]:
    """Return all scratch folders of rounds."""
    parent, name = repo.resolve().parent, re.compile(re.escape(make_scratch_prefix(repo)) + "[a-z0-9_]{8}")
    return [path for path in parent.iterdir() if name.fullmatch(path.name)]


@contextmanager
def hold_if_free(lock: Path) -> Iterator[bool]:
    """Hold a lock while the block runs, unless another process does. Yield whether no other process holds it.

    A file that is missing is not made: the repository may be gone, or read-only here.
    """
    if not lock.exists():
        yield True
        return
    with lock.open("rb") as file:
        yield try_lock(file.fileno())


def _remove(folders: Sequence[Path]) -> int:
    for path in folders:
        try:
            shutil.rmtree(path)
        except OSError as error:
            raise DependencyError(
                f"{path}, which a killed export or round left, cannot be removed: {error}. Remove it, and try again."
            ) from error
    return len(folders)
