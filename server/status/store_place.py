"""Notice a repository that was moved without its live store: the record says with which one it was served before."""

from __future__ import annotations

import os
from pathlib import Path

from repository.experiments import find_experiment_folder
from repository.registry import SERVER, read_acts, record_act
from serving.contract.errors import RecommenderError
from serving.contract.tensors import OBSERVE
from serving.live.store import has_store

SERVED, LIVE_FOLDER = "served", "live_folder"  # the act, and the key of its facts


def describe_left_store(repo: Path) -> str:
    """Return a message if a server would begin an empty live store, and the record names another one; "" otherwise."""
    try:
        folder = find_experiment_folder(repo)
        served_folders = list_served_folders(repo)
        if not served_folders or str(folder) in served_folders or has_store(folder):
            return ""
    except (RecommenderError, OSError):  # what starts or checks the repository says why
        return ""
    return (
        f"{repo} was served with the live store {served_folders[-1]} before, and begins with an empty one in {folder}. If the "
        "repository was moved or renamed, stop the server, and put that folder in the place of the new one (docs/operating.md)"
    )


def record_store(repo: Path, generation: int) -> None:
    """Record the live store with which a server serves a repository, once, where this user can write into the repository.

    Raises RecommenderError.
    """
    if not (repo / OBSERVE).is_dir() or not os.access(repo, os.W_OK):  # without events; pods that only read it
        return
    folder = str(find_experiment_folder(repo))
    if folder not in list_served_folders(repo):
        record_act(repo, SERVED, generation, reason=f"with {folder}", facts={LIVE_FOLDER: folder}, author=SERVER)


def list_served_folders(repo: Path) -> list[str]:
    """Return the live stores with which a repository was served, by first use. Raises ConfigError."""
    return [act.facts[LIVE_FOLDER] for act in read_acts(repo) if act.action == SERVED]
