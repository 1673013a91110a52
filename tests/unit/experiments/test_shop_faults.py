"""Broken stages of the simulated shop answer wrongly once their fault has begun, and as published before."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from experiments import stage_faults
from experiments.shop_faults import STAGE_FAULTS, begin_fault, break_stage
from serving.contract.artifacts import verify_manifest
from tests.repositories import copy_lean_repository

RANKED = {"candidate_ids": np.array([[7, 8, -1]]), "user_id": np.array([[3]])}


@pytest.fixture
def broken(tmp_path, monkeypatch) -> tuple[Path, type]:
    """A repository whose ranks are reversed, and a stand-in for the stage, with what its model adds to it."""

    class Rank:
        def __call__(self, inputs):
            return {"rank_scores": np.array([[2.0, 1.0, -9.0]])}

    repo = copy_lean_repository(tmp_path / "repo")
    break_stage(repo, 1, "ranks reversed")
    folder = repo / "rank" / "1"
    verify_manifest(folder)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, "stage_faults", raising=False)
    added = (folder / "model.py").read_text().partition("TritonPythonModel = ")[2].partition("\n")[2]
    exec(added, {"Rank": Rank})
    return repo, Rank


def test_a_stage_is_broken_while_its_fault_lasts(broken):
    repo, stage = broken
    assert stage()(RANKED)["rank_scores"].tolist() == [[2.0, 1.0, -9.0]]
    with begin_fault(repo, 1):
        assert stage()(RANKED)["rank_scores"].tolist() == [[-2.0, -1.0, -9.0]]
    assert stage()(RANKED)["rank_scores"].tolist() == [[2.0, 1.0, -9.0]]
    verify_manifest(repo / "rank" / "1")


def answer(inputs):
    """Return a list of two items that depend on the user."""
    return {"item_ids": inputs["user_id"] + np.array([[10, 20]])}


@pytest.mark.parametrize(
    ("fault", "shown"),
    [
        ("users mixed up", [[[12, 22]], [[14, 24]]]),
        ("the same items for everybody", [[[13, 23]], [[13, 23]]]),
        ("empty lists", [[[-1, -1]], [[-1, -1]]]),
        ("ranking takes 10 times as long", [[[13, 23]], [[15, 25]]]),
    ],
)
def test_the_faults_show_wrong_items(fault, shown):
    _, change = STAGE_FAULTS[fault]
    assert [change(answer, {"user_id": np.array([[user]])})["item_ids"].tolist() for user in (3, 5)] == shown


def test_a_failing_stage_raises_for_all_requests_or_some():
    with pytest.raises(RuntimeError):
        stage_faults.fail(answer, RANKED)
    failed = 0
    for _ in range(400):
        try:
            stage_faults.fail_sometimes(answer, RANKED)
        except RuntimeError:
            failed += 1
    assert 40 < failed < 160  # a quarter is 100
