"""A repository that nothing can be written into, also for root."""

from __future__ import annotations

from pathlib import Path

from repository.lock import LOCK_FILE
from repository.registry import RECORD_FILE


def make_unwritable(repo: Path) -> None:
    """Let the lock and the record fail to open, as on a read-only volume."""
    for name in (LOCK_FILE, RECORD_FILE):
        (repo / name).unlink(missing_ok=True)
        (repo / name).symlink_to(repo / "read-only" / name)
