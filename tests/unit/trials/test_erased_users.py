"""An erasure takes the clicks as well, so what is left of a user's answers in an experiment says nothing."""

import pytest

from serving.live.experiment import Experiment
from tests.unit.trials.logs import NOW_MS, events, exposures
from trials.guard import judge
from trials.off_policy import TrialError
from trials.progress import measure_progress
from trials.unseen import pair_answers

USERS, ANSWERS = 400, 4_000  # users of each arm with one answer each; answers to one more user, who was erased


@pytest.mark.parametrize(("arm", "generation"), [("champion", 1), ("challenger", 2)])
def test_answers_to_an_erased_user_make_no_generation_look_worse(arm, generation):
    arms = {"champion": 1, "challenger": 2}
    rows = [
        {"request_id": f"{name}{user}", "user_id": user, "arm": name, "generation": number, "item_ids": [1 + user % 30]}
        for name, number in arms.items()
        for user in range(USERS)
    ]
    erased = [
        {"request_id": f"x{number}", "user_id": None, "arm": arm, "generation": generation, "item_ids": [1 + number % 30]}
        for number in range(ANSWERS)
    ]
    log = events(*((f"{name}{user}", 1 + user % 30, True, 1.0, 1) for name in arms for user in range(0, USERS, 2)))
    experiment = Experiment("e", 1, 2, 0.5, promotes=True, changed_ms=NOW_MS)
    assert judge(experiment, exposures(*rows, *erased), log) == ("running", "")
    progress = measure_progress(experiment, exposures(*rows, *erased), log)
    assert {name: (summary.count, summary.clicked) for name, summary in progress.arms.items()} == {
        name: (USERS, USERS // 2) for name in arms
    }
    assert progress.looks[-1][1].difference == 0


def test_answers_to_an_erased_user_are_no_users_to_judge_a_list_by():
    shown = exposures(*({"request_id": f"x{number}", "user_id": None, "item_ids": [1]} for number in range(ANSWERS)))
    judged = {f"x{number}": [1] for number in range(ANSWERS)}
    with pytest.raises(TrialError, match="No shown answer has a request id of the judged lists"):
        pair_answers(shown, [], judged)
