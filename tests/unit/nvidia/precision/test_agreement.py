"""Answers that count as the same in each precision."""

import numpy as np
import pytest

from export.nvidia.precision.agreement import describe_disagreement, measure_moved_share

IDS = np.array([[7, 3, 5, 9]] * 200)
SCORES = np.array([[2.0, 1.0, 0.999, 0.5]] * 200, np.float32)
EXPECTED = {"item_ids": IDS, "scores": SCORES}


def answer(ids=(7, 3, 5, 9), scores=(2.0, 1.0, 0.999, 0.5), rows: int = 200) -> dict[str, np.ndarray]:
    """Return EXPECTED with its first `rows` rows replaced."""
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
        ("fp16", answer(scores=(2.0019, 1.0, 0.999, 0.5)), True),
        ("fp16", answer(scores=(2.0021, 1.0, 0.999, 0.5), rows=1), False),
        ("fp16", answer(ids=(7, 5, 3, 9), scores=(2.0, 0.9995, 0.9995, 0.5)), True),  # scores a thousandth apart
        ("fp16", answer(ids=(3, 7, 5, 9), rows=1), False),
        ("fp16", answer(ids=(3, 7, 5, 9), scores=(2.0, 1.999, 0.999, 0.5), rows=1), False),
        ("fp16", answer(ids=(7, 3, 5, 4)), True),  # the last place went to a close rival from behind it
        ("fp16", answer(ids=(7, 3, 5, 4), scores=(2.0, 1.0, 0.999, 0.4)), False),
        ("int8", answer(scores=(1.8, 1.9, 0.9, 0.4)), True),  # no score is promised
        ("int8", answer(ids=(7, 3, 9, 5), rows=1), True),  # 0.03 of 200 lists
        ("int8", answer(ids=(7, 3, 9, 5), rows=40), False),
        ("int8", answer(ids=(7, 5, 3, 9), scores=(2.0, 0.9995, 0.9995, 0.5)), True),  # as fp16 would
    ],
)
def test_answers_agree_as_far_as_the_precision_promises(precision, got, agrees):
    assert (describe_disagreement(precision, got, EXPECTED) == "") is agrees


def test_what_differs_is_said():
    assert "200 of 200 id lists differ" in describe_disagreement("fp32", answer(ids=(7, 5, 3, 9)), EXPECTED)
    assert describe_disagreement("fp16", answer(ids=(3, 7, 5, 9)), EXPECTED).startswith(
        "200 of 200 lists differ by more than 0.002 explains"
    )
    assert "of the first 10 places moved, at most 0.2% may" in describe_disagreement("int8", answer(ids=(3, 7, 9, 5)), EXPECTED)


def one(ids, scores=(2.0, 1.0, 0.999, 0.5)) -> dict[str, np.ndarray]:
    return {"item_ids": np.array([ids]), "scores": np.array([scores], np.float32)}


def test_the_moved_share_is_what_ndcg_could_lose():
    """Items 3 and 5 swap: 1 / log2(3) - 1 / log2(4) each, of the four places' 2.56."""
    places = 1 / np.log2([2, 3, 4, 5])
    expected = 2 * (places[1] - places[2]) / places.sum()
    exactly = {name: values[:1] for name, values in EXPECTED.items()}
    assert measure_moved_share(one((7, 5, 3, 9)), exactly, 1e-4) == pytest.approx(expected)
    assert measure_moved_share(one((7, 5, 3, 9)), exactly, 2e-3) == 0.0  # their scores are a thousandth apart
    assert measure_moved_share(exactly, exactly, 1e-4) == 0.0
    padded = one((7, -1, -1, -1))
    assert measure_moved_share(padded, padded, 1e-4) == 0.0
    nothing_in_common = one((1, 2, 4, 6), (3.0, 2.0, 1.0, 0.9))
    assert measure_moved_share(nothing_in_common, exactly, 1e-4) == pytest.approx(2.0)  # all left, all came
