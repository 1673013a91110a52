"""Streaming aggregations, declared once: the same features for training and for serving.

    [[aggregations]] of dataset.toml ─▶ Aggregation ─▶ EntityPlan ─┬▶ point_in_time   training: at any moments of a log
         (spec.py)                                   (plan.py)     └▶ update, read    serving: one record per user, item, …

Both sides run the same compiled loops (`loops.py`): training replays them over the log, entity by entity. They are checked
against a slow twin that computes each feature from its definition (`tests/unit/live/aggregations/twin.py`).

What a feature means
--------------------
An *instant* is a pair (time, sequence). Its features are computed from the entity's events with a smaller sequence, as of its
time, or as of the newest of these events if that is later (clocks of devices differ).

Window      Time is cut into buckets of a sixtieth of the window, counted from the epoch. A window holds the current bucket and
            the 59 before it, so it reaches back between 59 and 60 sixtieths of its length.
Half-life   Every event counts in full when it happens and half as much after each half-life.
Session     The events since the last pause that was longer than the gap. A session that has been idle for longer than the gap
            is over: it is empty. A late event that is older than the session's first event does not change it.
Late        An event that is older than the entity's newest one counts in the bucket of its own time. If it is older by more
            than a day (ALLOWED_LATENESS_MS), it stays in the log but is not aggregated. Only the entity's own events decide
            that, so neither other entities nor how the log is cut into batches changes a feature.
Missing     An event without a value (no amount, no price, no category) is left out of the features of that value.
Empty       Counts and sums of nothing are 0. Means and last values of nothing are NaN.
Distinct    An estimate (linear counting): ids are hashed to SLOTS slots, and the number of ids is estimated from the number of
            slots hit within the window. It is exact for a few ids; the standard error is 5 % at 50 and 6 % at 300.
"""

from serving.live.aggregations.loops import ALLOWED_LATENESS_MS
from serving.live.aggregations.plan import (
    EVENT,
    EntityPlan,
    Instants,
    compile_aggregations,
    hash_categories,
    join_keys,
    make_entity_keys,
)
from serving.live.aggregations.spec import Aggregation, is_of_users, parse_aggregations, read_published
from serving.live.aggregations.states import StateTable

__all__ = [
    "ALLOWED_LATENESS_MS",
    "EVENT",
    "Aggregation",
    "EntityPlan",
    "Instants",
    "StateTable",
    "compile_aggregations",
    "hash_categories",
    "is_of_users",
    "join_keys",
    "make_entity_keys",
    "parse_aggregations",
    "read_published",
]
