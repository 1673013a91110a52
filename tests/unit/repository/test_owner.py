"""A server that runs as a user of its own can go on with whatever root does to its repository and its live store."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from repository.challenger import write_challenger
from repository.experiments import change_share, end_experiment, start_experiment
from repository.generations import pin, write_pins
from repository.lock import LOCK_FILE
from repository.registry import RECORD_FILE, record_act
from repository.rounds import hold_round_lock, record_round
from serving.live.experiment import Experiment
from serving.live.store import find_live_folder
from tests.unit.server.shops import make_shop

ACTS: dict[str, Callable[[Path], object]] = {
    "a pin": lambda repo: pin(repo, 2),
    "a challenger": lambda repo: write_challenger(repo, 2),
    "both generations": lambda repo: write_pins(repo, 1),
    "a tag": lambda repo: record_act(repo, "tagged", 1, "spring"),
    "an experiment": lambda repo: start_experiment(repo, Experiment("spring", 1, 2, 0.5)),
    "its share": lambda repo: change_share(repo, 0.2),
    "its end": lambda repo: end_experiment(repo, "enough"),
    "a round": lambda repo: run_round(repo),
}


def run_round(repo: Path) -> None:
    """Do what `python -m export follow` does around each round, also around one that is refused."""
    with hold_round_lock(repo):
        record_round(repo, "failed", "root does not own the live store")


def list_entries(repo: Path) -> dict[int, Path]:
    """Return the files and folders of a repository and of its live store, by inode."""
    live = find_live_folder(repo)
    return {path.lstat().st_ino: path for folder in (repo, live) for path in (folder, *folder.rglob("*")) if folder.exists()}


def test_what_root_makes_belongs_to_the_owner_of_the_repository(tmp_path, monkeypatch):
    """Whoever runs this test is taken for root."""
    repo, given = make_shop(tmp_path / "shop", generations=2), {}
    for name in (LOCK_FILE, RECORD_FILE):
        (repo / name).unlink(missing_ok=True)
    owner = repo.stat()
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(os, "chown", lambda path, uid, gid, **_: given.update({os.lstat(path).st_ino: (uid, gid)}))
    for act, carry_out in ACTS.items():
        before = list_entries(repo)
        given.clear()
        carry_out(repo)
        made = {inode: path for inode, path in list_entries(repo).items() if inode not in before}
        assert made, act
        assert [path for inode, path in made.items() if given.get(inode) != (owner.st_uid, owner.st_gid)] == [], act
