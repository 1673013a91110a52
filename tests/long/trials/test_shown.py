"""A log that is read part by part gives the same reports as one that is read at once."""

from __future__ import annotations

import json
import shutil
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from live.exposures import Exposure, ExposureLog
from repository.experiments import find_experiment_folder
from tests.unit.live.shops import repository_with_kinds
from tests.unit.trials.logs import observe
from trials.__main__ import app

ANSWERS, USERS = 300, 60
COMMANDS = [
    ("report",),
    ("report", "--by", "arm"),
    ("report", "spring", "--by", "position"),
    ("report", "--by", "category"),
    ("report", "--by", "source"),
    ("report", "--generation", "2", "--days", "4.5"),
    ("compare", "spring"),
]


@pytest.fixture(scope="module")
def repo(tmp_path_factory) -> Path:
    """A shop whose answers of eight days are in as many files. Users come on many days; some do not say who they are."""
    repo = Path(shutil.copytree(repository_with_kinds(), tmp_path_factory.mktemp("shown") / "repository"))
    generator, now_ms = np.random.default_rng(0), time.time_ns() // 1_000_000
    for day in range(8):
        day_ms = now_ms - (8 - day) * 86_400_000
        log = ExposureLog(find_experiment_folder(repo), 1.0, 100, 1 << 30, now=partial(float, day_ms / 1_000 + 1))
        clicked = []
        for number in range(ANSWERS):
            challenger, user = bool(generator.integers(2)), int(generator.integers(USERS))
            items = generator.choice(np.arange(1, 30), 3, replace=False).tolist()
            answer = Exposure(f"{day}/{number}", day_ms, user if number % 7 else None, 1 + challenger, items, [1.0] * 3, [])
            if number % 10:
                arm = "challenger" if challenger else "champion"
                log.add(replace(answer, experiment="spring", arm=arm, assignment=0.5))
            else:
                log.add(replace(answer, degraded=["ranker"], sources=[1, 2, 6]))
            if number % 4 == 0:
                clicked.append((user, items[0], answer.request_id.encode()))
        users, items, request_ids = zip(*clicked, strict=True)
        given = {"user_id": users, "item_id": items, "request_id": request_ids, "value": [2.0] * len(users)}
        observe(repo, given, day_ms + 1_000)
        log.close()
    return repo


def tell(repo: Path, *command: str) -> dict:
    result = CliRunner().invoke(app, [*command, "--repo", str(repo), "--json"], catch_exceptions=False)
    return json.loads(result.stdout, parse_float=lambda text: round(float(text), 9))


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_reports_do_not_depend_on_how_much_is_in_memory(repo, monkeypatch, command):
    whole = tell(repo, *command)
    monkeypatch.setattr("trials.shown.PART_ANSWERS", 70)
    assert tell(repo, *command) == whole
    if command[0] == "report":
        assert sum(group["clicked"] for group in whole.values()) > 20
