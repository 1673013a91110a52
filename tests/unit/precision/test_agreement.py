"""What counts as the same answer in each precision."""

import numpy as np
import pytest

from export.precision.agreement import disagreement

IDS = np.array([[7, 3, 5, 9]] * 200)
SCORES = np.array([[2.0, 1.0, 0.999, 0.5]] * 200, np.float32)
EXPECTED = {"item_ids": IDS, "scores": SCORES}


def answer(ids=(7, 3, 5, 9), scores=(2.0, 1.0, 0.999, 0.5), rows: int = 200) -> dict[str, np.ndarray]:
    """-> EXPECTED with its first `rows` rows replaced."""
    got = {name: values.copy() for name, values in EXPECTED.items()}
    got["item_ids"][:rows], got["scores"][:rows] = ids, np.float32(scores)
    return got


@pytest.mark.parametrize(
    ("precision", "got", "agrees"),
    [
        ("fp32", answer(), True),
        ("fp32", answer(scores=(2.0001, 1.0, 0.999, 0.5)), True),
        ("fp32", answer(scores=(2.001, 1.0, 0.999, 0.5)), False),
        ("fp32", answer(ids=(7, 5, 3, 9)), False),
        ("fp16", answer(scores=(2.001, 1.0, 0.999, 0.5)), True),
        ("fp16", answer(scores=(2.02, 1.0, 0.999, 0.5)), False),
        ("fp16", answer(ids=(7, 5, 3, 9)), True),  # scores a thousandth apart
        ("fp16", answer(ids=(3, 7, 5, 9)), False),
        ("fp16", answer(ids=(3, 7, 5, 9), rows=2), True),  # rules make small differences large, in few requests
        ("fp16", answer(ids=(7, 3, 5, 4)), True),  # the last place went to a close rival from behind it
        ("fp16", answer(ids=(4, 3, 5, 9)), False),
        ("int8", answer(ids=(3, 7, 5, 9), scores=(1.8, 1.9, 0.9, 0.4)), True),
        ("int8", answer(ids=(7, 3, 5, 4), rows=70), True),
        ("int8", answer(ids=(7, 3, 5, 4)), False),
    ],
)
def test_answers_agree_as_far_as_the_precision_promises(precision, got, agrees):
    assert (disagreement(precision, got, EXPECTED) == "") is agrees


def test_what_differs_is_said():
    assert "200 of 200 id lists differ" in disagreement("fp32", answer(ids=(7, 5, 3, 9)), EXPECTED)
    assert disagreement("fp16", answer(ids=(3, 7, 5, 9)), EXPECTED).startswith("100.0% of the lists differ")
    assert disagreement("int8", answer(ids=(7, 3, 1, 2)), EXPECTED) == "only 50.0% of the served items are the same"
