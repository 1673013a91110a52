"""The settings of the ranker's tables, as a version folder holds them."""

from __future__ import annotations

import json
from pathlib import Path

from serving.contract.artifacts import stage_folder

SETTINGS = Path("tables") / "tiers.json"


def tables_settings(repository: Path, generation: int) -> Path:
    """Return where the settings of a generation's tables are, whether or not it has any."""
    return stage_folder(repository, "rank", generation) / SETTINGS


def has_update_source(repository: Path, generation: int) -> bool:
    """Return whether rows of a generation are updated while they are served."""
    try:
        return bool(json.loads(tables_settings(repository, generation).read_text())["updates"])
    except FileNotFoundError:  # not one of our repositories, or one of before there were such settings
        return False
