"""A repository with an experiment, and a generation that has no part in it."""

from __future__ import annotations

from pathlib import Path

from repository.challenger import write_challenger
from repository.experiments import start_experiment
from repository.generations import write_pins
from serving.live.experiment import Experiment
from tests.repositories import copy_lean_repository, copy_to_change


def make_repository_with_experiment(repo: Path) -> Path:
    """Make a repository of generations 1, 2 and 3, in which the experiment "spring" compares 3 with the pinned 2. Return it."""
    copy_lean_repository(repo)
    for model in list(repo.glob("*/1")):
        for generation in ("2", "3"):
            copy_to_change(model, model.with_name(generation))
    write_challenger(repo, 3)
    write_pins(repo, 2)
    start_experiment(repo, Experiment("spring", 2, 3, 0.5))
    return repo
