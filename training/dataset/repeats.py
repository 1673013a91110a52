"""Find the positives that repeat an earlier one."""

from __future__ import annotations

import numpy as np
import pandas as pd


def find_repeats(log: pd.DataFrame) -> np.ndarray:
    """Return which events are positives of a user who has an earlier positive with the item, bool [N].

    A view does not make the purchase after it a repeat. log: sorted by time
    """
    positive = log["positive"].to_numpy()
    repeats = np.zeros(len(log), bool)
    repeats[positive] = log.loc[positive, ["user_id", "item_id"]].duplicated().to_numpy()
    return repeats
