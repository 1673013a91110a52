"""Do answers of a lowered pipeline agree with fp32's, as far as the precision allows? What an export is rehearsed with.

fp32: the same lists, scores within 1e-4. fp16: scores within 2e-3, and only items whose scores are that close change places.
int8: no score is promised; nine of ten served items are the same.
"""

from __future__ import annotations

import numpy as np

from export.precision.calibration import Arrays
from export.repository.recorded import compare_answers

EXACT, HALF = 1e-4, 2e-3  # of scores, absolute or relative
MOST_MOVED = 0.01  # share of requests in which fp16 moves items further: rules make small differences large
LEAST_COMMON = 0.9


def disagreement(precision: str, got: Arrays, expected: Arrays) -> str:
    """got, expected: `item_ids` int64 [R, K] and `scores` float32 [R, K] of R requests -> "" or what differs."""
    if precision == "fp32":
        return compare_answers(got, expected, EXACT)
    if precision == "fp16":
        moved = np.mean([moved_apart(got, expected, row) for row in range(len(got["item_ids"]))])
        return f"{moved:.1%} of the lists differ by more than close scores explain" if moved > MOST_MOVED else ""
    common = np.mean([np.isin(a, b).mean() for a, b in zip(got["item_ids"], expected["item_ids"], strict=True)])
    return f"only {common:.1%} of the served items are the same" if common < LEAST_COMMON else ""


def moved_apart(got: Arrays, expected: Arrays, row: int) -> bool:
    """Is a score off by more than fp16's share, or an item at another place whose exact score is not that of a close rival?"""
    ids, exact_ids, scores, exact = got["item_ids"][row], expected["item_ids"][row], got["scores"][row], expected["scores"][row]
    near = 2 * HALF * (1 + np.abs(exact))
    if (np.abs(scores - exact) > near / 2).any():
        return True
    for place in np.flatnonzero(ids != exact_ids):
        here = np.flatnonzero(exact_ids == ids[place])
        rival = exact[here[0]] if len(here) else exact[-1]  # an item that was not in the list was just behind it
        if abs(rival - exact[place]) > near[place]:
            return True
    return False
