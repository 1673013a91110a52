"""Repositories that servers serve: of several generations, with an experiment, damaged, or such that nothing can be written."""

from __future__ import annotations

import json
from pathlib import Path

from repository.challenger import write_challenger
from repository.experiments import start_experiment
from repository.generations import write_pins
from repository.lock import LOCK_FILE
from repository.registry import RECORD_FILE
from repository.tables import find_tables_settings
from serving.contract.artifacts import find_stage_folder
from serving.live.experiment import Experiment
from tests.repositories import copy_lean_repository, copy_small_fused_repository, copy_to_change


def make_shop(repo: Path, generations: int = 1, layout: str = "ensemble") -> Path:
    """Make a repository of generations 1 to `generations`, all equal, of which 1 is pinned. Return it."""
    (copy_lean_repository if layout == "ensemble" else copy_small_fused_repository)(repo)
    for model in list(repo.glob("*/1")):
        for generation in range(2, generations + 1):
            copy_to_change(model, model.with_name(str(generation)))
    return repo


def begin_experiment(repo: Path, champion: int = 1, challenger: int = 2) -> Experiment:
    """Begin the experiment "spring", whose champion is pinned and whose challenger a server loads beside it."""
    write_challenger(repo, challenger)
    write_pins(repo, champion)
    return start_experiment(repo, Experiment("spring", champion, challenger, 0.5))


def damage(repo: Path, generation: int) -> Path:
    """Change a file of a generation, not its size. Return its path."""
    path = find_stage_folder(repo, "rank", generation) / "stage.json"
    path.chmod(0o644)
    path.write_bytes(path.read_bytes()[:-2] + b"\n\n")
    return path


def spoil_updater(repo: Path, generation: int) -> None:
    """Let the updater of a generation's tables fail to start."""
    tables = find_tables_settings(repo, generation)
    tables.write_text(json.dumps(json.loads(tables.read_text()) | {"updates": {"source": "nobody"}}))


def make_unwritable(repo: Path) -> None:
    """Let the lock and the record fail to open, as on a read-only volume, also for root."""
    for name in (LOCK_FILE, RECORD_FILE):
        (repo / name).unlink(missing_ok=True)
        (repo / name).symlink_to(repo / "read-only" / name)
