"""A candidate beside the current settings on real servers: what is measured, and that settings do not change answers."""

import numpy as np

from perf.slo import read_slo
from perf.tune.__main__ import GOALS, MEASURED
from perf.tune.lab import Lab
from perf.tune.search import SERVER_THREADS
from tests.repositories import small_fused_repository


def test_a_heat_serves_variants_and_leaves_nothing():
    repository = small_fused_repository()
    before = {path.name for path in repository.parent.iterdir()}
    changes = {"serving.recommend.instances": 2, "compute.rank_threads": 2, SERVER_THREADS: 2}
    with Lab(repository, clients=4, window_s=0.2, rng=np.random.default_rng(0)) as lab:
        (trial,) = lab.measure([changes], turns=1)
        assert lab.offered_rate > 0
    assert trial.changes == changes
    assert trial.answers == ""
    for (turn,) in (trial.turns, trial.current_turns):
        assert turn.keys() == set(MEASURED)
        assert turn["error_share"] == 0.0
        assert all(turn[goal] > 0 for goal in GOALS)
    assert {path.name for path in repository.parent.iterdir()} == before


def test_what_is_measured_covers_the_goals_and_much_of_the_slo():
    assert set(GOALS) <= set(MEASURED)
    assert len(set(read_slo()) & set(MEASURED)) >= 6
