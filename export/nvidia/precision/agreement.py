"""Compare a lowered pipeline's answers with those of fp32, by the tolerance of its precision.

The choice of nodes and the rehearsal of an export use it.

fp32: the same lists, scores within 1e-4. fp16: scores within 2e-3; only items may change places whose exact scores are closer
than twice that. int8: no bound on scores; the first ten items of a list hardly move (`measure_moved_share`), beyond
what fp16 may move. A network that does not tolerate int8 runs in fp16.
"""

from __future__ import annotations

import numpy as np

from export.nvidia.precision.calibration import Arrays
from repository.checks.recorded import compare_answers
from serving.contract.tensors import PAD_ID

EXACT, HALF = 1e-4, 2e-3  # of scores, absolute
MOST_MOVED = 0.001  # of the first TOP places, by their weight in NDCG
TOP = 10


def describe_disagreement(precision: str, actual: Arrays, expected: Arrays) -> str:
    """Return "" when answers agree within the precision's tolerance, else the difference.

    The tolerance is twice the one by which `lower.py` chooses nodes.

    actual, expected: `item_ids` int64 [R, K] and `scores` float32 [R, K] of the same R requests
    """
    if precision == "fp32":
        return compare_answers(actual, expected, EXACT)
    if precision == "fp16":
        differs, change = find_beyond(actual, expected, HALF), np.abs(actual["scores"] - expected["scores"]).max(initial=0.0)
        fact = f"{differs.sum()} of {len(differs)} lists differ by more than {HALF} explains, scores by up to {change:.2g}"
        return fact if differs.any() else ""
    share = measure_moved_share(actual, expected, HALF)
    return f"{share:.2%} of the first {TOP} places moved, at most {2 * MOST_MOVED:.1%} may" if share > 2 * MOST_MOVED else ""


def find_beyond(actual: Arrays, expected: Arrays, tolerance: float) -> np.ndarray:
    """Return bool [R]: a score differs by more than `tolerance`, or an item's exact score by twice that from its place's."""
    return np.array(
        [
            _exceeds(*row, tolerance)
            for row in zip(actual["item_ids"], actual["scores"], expected["item_ids"], expected["scores"], strict=True)
        ],
        bool,
    )


def _exceeds(ids: np.ndarray, scores: np.ndarray, exact_ids: np.ndarray, exact: np.ndarray, tolerance: float) -> bool:
    if not (np.abs(scores - exact) <= tolerance).all():
        return True
    for place in np.flatnonzero(ids != exact_ids):
        exact_places = np.flatnonzero(exact_ids == ids[place])
        if not len(exact_places):  # it was not in the exact list, so only its own score is known
            continue
        own_score = exact[exact_places[0]]
        if abs(own_score - exact[place]) > 2 * tolerance or abs(scores[place] - own_score) > tolerance:
            return True
    return False


def measure_moved_share(actual: Arrays, expected: Arrays, tolerance: float) -> float:
    """Return how far items moved among the first TOP places: the mean share of those places' NDCG weight.

    Lists whose changes are explained by close scores (`find_beyond`) count as unmoved. The share is the largest possible loss
    of NDCG: that of lists in which every moved item is relevant and moved down.
    """
    ids, exact_ids = (answers["item_ids"][:, :TOP] for answers in (actual, expected))
    weights = 1.0 / np.log2(np.arange(2, TOP + 2))[: ids.shape[1]]
    shares = [_measure_moved(a, b, weights) for a, b in zip(ids, exact_ids, strict=True)]
    return float(np.mean(shares * find_beyond(actual, expected, tolerance)))


def _measure_moved(ids: np.ndarray, exact_ids: np.ndarray, weights: np.ndarray) -> float:
    items, numbers = np.unique(np.concatenate([ids, exact_ids]), return_inverse=True)
    change = np.bincount(numbers, np.concatenate([weights, -weights]), len(items))
    return float(np.abs(change[items != PAD_ID]).sum() / weights.sum())
