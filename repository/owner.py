"""Give what root writes to the user who serves the repository, who must be able to read, replace and remove it."""

from __future__ import annotations

import os
from pathlib import Path


def copy_owner(path: Path, source: Path) -> None:
    """Give `path`, and everything below it, the owner of `source`. Does nothing unless this process is root."""
    if os.geteuid() == 0:
        owner = source.stat()
        for each in (path, *path.rglob("*")):
            os.chown(each, owner.st_uid, owner.st_gid, follow_symlinks=False)
