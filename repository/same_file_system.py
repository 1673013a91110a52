"""Check that a folder is on the file system of a repository, and in the same mount, so that files can be renamed into it."""

from __future__ import annotations

import errno
from pathlib import Path

from serving.contract.errors import ExportError


def can_rename(staging: Path, repository: Path) -> bool:
    """Return whether both folders are on one file system, and in one mount; also True where nothing can be written at all."""
    try:
        try_rename(staging, repository)
    except OSError as error:
        return error.errno != errno.EXDEV
    return True


def try_rename(staging: Path, repository: Path) -> None:
    """Raise OSError when no file can be renamed from one folder into the other."""
    staged, placed = staging / ".probe", repository / f".{repository.name}.probe"
    staged.touch()
    try:
        staged.rename(placed)
    finally:
        staged.unlink(missing_ok=True)
    placed.unlink()


def refuse_other_file_system(staging: Path, repository: Path) -> None:
    """Raise ExportError when no file can be renamed from one folder into the other, as publication must.

    This is checked before training, which may take hours.
    """
    try:
        try_rename(staging, repository)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise ExportError(
                f"Nothing can be written into {repository}: {error.strerror}. "
                "Make it writable for this user, or choose another REPO."
            ) from error
        raise ExportError(
            f"Nothing can be renamed from {staging.parent} into {repository}, which is another file system or a mount of its "
            f"own. A generation is built beside its repository: choose a REPO inside of the mount, {repository / 'repository'}."
        ) from error
