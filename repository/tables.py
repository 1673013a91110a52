"""Find the settings of the ranker's tables in a version folder."""

from __future__ import annotations

import json
from pathlib import Path

from serving.contract.artifacts import stage_folder

SETTINGS = Path("tables") / "levels.json"


def tables_settings(repository: Path, generation: int) -> Path:
    """Return the path of the settings of a generation's tables, whether or not it exists."""
    return stage_folder(repository, "rank", generation) / SETTINGS


def has_update_source(repository: Path, generation: int) -> bool:
    """Return whether rows of a generation are updated while they are served."""
    try:
        return bool(json.loads(tables_settings(repository, generation).read_text())["updates"])
    except FileNotFoundError:  # not one of our repositories, or one without such settings
        return False
