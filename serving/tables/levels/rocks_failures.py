"""Turn errors of RocksDB into errors of the service, and tell damage from a full or inaccessible disk."""

from __future__ import annotations

from collections.abc import Callable

from serving.contract.errors import DataError, DependencyError


class DamagedError(DependencyError):
    """The database on disk is damaged. Waiting does not help."""


def is_damage(error: Exception) -> bool:
    """Return whether an error of RocksDB (mostly a bare Exception) means damage, not a full or inaccessible disk."""
    text = str(error)
    # Files of other names may be missing because the writer has just replaced them.
    lacks = "No such file or directory" in text and ("/MANIFEST" in text or "/CURRENT" in text)
    return text.startswith("Corruption") or lacks


class Failures:
    """Turns any error of RocksDB inside a `with` block into a DependencyError."""

    def __init__(self, doing: str, damaged: Callable[[str], DamagedError]) -> None:
        self._doing, self._damaged = doing, damaged

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type | None, error: BaseException | None, _: object) -> None:
        if not isinstance(error, Exception) or isinstance(error, DependencyError):
            return
        if is_damage(error):
            raise self._damaged(str(error)) from error
        remedy = (
            str(error)
            if isinstance(error, DataError)
            else "Expected a database that can be read, with room to write. Check the disk and the permissions."
        )
        raise DependencyError(f"{self._doing}: {error!r}. {remedy}") from error
