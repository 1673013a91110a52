"""Replace a folder as a whole."""

from __future__ import annotations

import shutil
from pathlib import Path


def replace_folder(new: Path, old: Path) -> None:
    """Put `new` in the place of `old`. A server that runs on the old folder keeps its open files until it is stopped."""
    aside = old.parent / f".{old.name}.replaced"
    shutil.rmtree(aside, ignore_errors=True)
    if old.exists():
        old.rename(aside)
    new.rename(old)
    shutil.rmtree(aside, ignore_errors=True)
