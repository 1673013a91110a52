"""The train/test split of everything that learns or is judged: at one moment for all users, as a server meets them.

                    the moment
    user 1  ─•──•────•──┼──•──•─     earlier │ later
    user 2  ───•──•─────┼────•──     earlier │ later
    user 3  ────────────┼─•───•─             later: nothing is known of this user at the moment

Whoever asks a server asks now, however long ago their last event was, and nothing is known of what others will do. A split of
each user's own events would tell a model when the user came back, and what was in fashion then.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from serving.contract.errors import DataError

FEWEST_RETURNING = 200  # users. Raters of films, for instance, name hundreds in one visit and rarely return


def split_log(interactions: pd.DataFrame, later_share: float = 0.2) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return (earlier, later): at one moment if FEWEST_RETURNING users of `earlier` have a positive in `later`, else by user.

    Raises DataError unless 0 < later_share < 1.
    """
    earlier, later = split_at_moment(interactions, later_share)
    returning = keep_known(later, earlier)
    if returning.loc[returning["positive"].to_numpy(), "user_id"].nunique() >= FEWEST_RETURNING:
        return earlier, later
    return split_by_user(interactions, later_share)


def keep_known(later: pd.DataFrame, earlier: pd.DataFrame) -> pd.DataFrame:
    """Return the events of `later` whose users have an event in `earlier`."""
    return later[later["user_id"].isin(earlier["user_id"].unique()).to_numpy()]


def split_at_moment(interactions: pd.DataFrame, later_share: float = 0.2) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return (earlier, later): `later` has the last `later_share` of the events, and others of the same second as its first.

    Both parts are sorted by time. Raises DataError unless 0 < later_share < 1.
    """
    ordered = sort_by_time(interactions, later_share)
    times_s = ordered["timestamp"].to_numpy()
    moment_s = times_s[int(len(times_s) * (1 - later_share))] if len(times_s) else 0
    earlier, later = (ordered[part] for part in (times_s < moment_s, times_s >= moment_s))
    return earlier.reset_index(drop=True), later.reset_index(drop=True)


def split_by_user(interactions: pd.DataFrame, later_share: float = 0.2) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return (earlier, later): of each user's n events, the last ceil(n * later_share) in time are `later`.

    At least one event of every user stays in `earlier`. Events with equal times keep the order of `interactions`. Both parts
    are sorted by time. Raises DataError.
    """
    ordered = sort_by_time(interactions, later_share)
    by_user = ordered.groupby("user_id", sort=False)["user_id"]
    position = by_user.cumcount().to_numpy()  # 0 = the user's first event
    n_events = by_user.transform("size").to_numpy()
    n_later = np.minimum(np.ceil(n_events * later_share - 1e-9), n_events - 1)  # 1e-9: 0.2 * 35 is 7.000000000000001
    is_later = position >= n_events - n_later
    return ordered[~is_later].reset_index(drop=True), ordered[is_later].reset_index(drop=True)


def sort_by_time(interactions: pd.DataFrame, later_share: float) -> pd.DataFrame:
    """Return the events sorted by time, those of equal times in their order. Raises DataError for an impossible share."""
    if not 0 < later_share < 1:
        raise DataError(f"later_share is {later_share}. Expected a share of the events, 0 < later_share < 1, such as 0.2.")
    if interactions["timestamp"].is_monotonic_increasing:
        return interactions
    return interactions.sort_values("timestamp", kind="stable", ignore_index=True)
