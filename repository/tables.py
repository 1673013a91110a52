"""Find the settings of the ranker's tables in a version folder."""

from __future__ import annotations

from pathlib import Path

from serving.contract.artifacts import find_stage_folder, read_json

SETTINGS = Path("tables") / "levels.json"


def find_tables_settings(repository: Path, generation: int) -> Path:
    """Return the path of the settings of a generation's tables, whether or not it exists."""
    return find_stage_folder(repository, "rank", generation) / SETTINGS


def has_update_source(repository: Path, generation: int) -> bool:
    """Return whether rows of a generation are updated while they are served. Raises ArtifactError for unreadable settings."""
    path = find_tables_settings(repository, generation)
    if not path.exists():  # not one of our repositories, or one without such settings
        return False
    return bool(read_json(path.parent, path.name).get("updates"))
