"""A generation that another version published: its declared aggregations have a key that is gone."""

from __future__ import annotations

import json

import numpy as np

from perf.tune.variant import seal_again
from serving.pipeline import Pipeline
from tests.repositories import copy_lean_repository


def test_a_generation_whose_aggregations_have_the_key_ranker_answers_as_one_without(tmp_path):
    users = {"user_id": np.arange(40).reshape(-1, 1)}
    repo = copy_lean_repository(tmp_path / "shop")
    expected = Pipeline.load(repo)(users)
    path = repo / "rank" / "1" / "trends" / "trends.json"
    settings = json.loads(path.read_text())
    for declared in settings["aggregations"]:
        declared["ranker"] = True
    path.write_text(json.dumps(settings))
    seal_again(repo, 1, "rank")
    answer = Pipeline.load(repo)(users)
    for name, values in expected.items():
        np.testing.assert_array_equal(answer[name], values)
