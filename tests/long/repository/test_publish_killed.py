"""A publication that is killed leaves nothing for long."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest

from repository.lock import LOCK_FILE
from repository.publish import find_served_generation
from serving.contract.tensors import ENSEMBLE
from tests.unit.repository.publishing import publish_once


def publish_and_die(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kill a process that publishes once the first draft in the repository is written."""
    if (process_id := os.fork()) == 0:
        monkeypatch.setattr(os, "replace", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        publish_once(repository)
    assert os.waitpid(process_id, 0)[1] == signal.SIGKILL


@pytest.mark.parametrize("draft", ["of a warm-up request", "of a config"])
def test_drafts_of_killed_publications_do_not_pile_up(tmp_path, draft, monkeypatch):
    repository = tmp_path / "repository"
    publish_once(repository)
    for _ in range(3):
        if draft == "of a warm-up request":
            shutil.rmtree(repository / ENSEMBLE / "warmup")  # otherwise only the first publication writes it
        publish_and_die(repository, monkeypatch)
    assert find_served_generation(repository) == 1
    publish_once(repository)
    assert [path.name for path in repository.iterdir() if path.name.startswith(".")] == [LOCK_FILE]
