"""Find the positives that repeat an earlier one."""

from __future__ import annotations

import numpy as np
import pandas as pd


def find_repeats(log: pd.DataFrame) -> np.ndarray:
    """Return bool [N]: whether an event is a positive and its user has an earlier positive with the same item.

    Only positives count, so a view does not make the purchase after it a repeat. log: events [N], sorted by time
    """
    positive = log["positive"].to_numpy()
    repeats = np.zeros(len(log), bool)
    repeats[positive] = log.loc[positive, ["user_id", "item_id"]].duplicated().to_numpy()
    return repeats
