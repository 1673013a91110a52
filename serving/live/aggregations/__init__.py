"""Streaming aggregations, declared once: the same features for training and for serving.

    [[aggregations]] of dataset.toml ─▶ Aggregation ─▶ EntityPlan ─┬▶ point_in_time   training: at any moments of a log
         (spec.py)                                   (plan.py)     └▶ update, read    serving: one record per user, item, …

Both sides run the same compiled loops (`loops.py`): training replays them over the log, entity by entity. They are checked
against a slow twin that computes each feature from its definition (`tests/unit/live/aggregations/twin.py`).

What a feature means, in plain words
------------------------------------
An *instant* is a pair (time, sequence). Its features are computed from the accepted events with a smaller sequence. They are
as of its time, or of the entity's newest such event if that is later (an event may arrive before its time has come).

Window      Time is cut into buckets of a sixtieth of the window, counted from the epoch. A window holds the current bucket and
            the 59 before it, so it reaches back between 59 and 60 sixtieths of its length.
Half-life   Every event counts in full when it happens and half as much after each half-life.
Session     The events since the last pause that was longer than the gap. A session that has been idle for longer than the gap
            is over: it is empty. A late event that is older than the session's first event does not change it.
Late        An event that is older than the newest event before it counts in the bucket of its own time. If it is older by
            more than the allowed lateness, it stays in the log but is not aggregated. `accept_events` decides that.
Missing     An event without a value (no amount, no price, no category) does not take part in what is made of that value.
Empty       Counts and sums of nothing are 0. Means and last values of nothing are NaN.
Distinct    An estimate (linear counting): ids are hashed to SLOTS slots, and the number of slots hit within the window tells
            how many ids there were. Exact for a few ids; the standard error is 5 % at 50 and 6 % at 300.
"""

from serving.live.aggregations.plan import (
    EVENT,
    EntityPlan,
    Instants,
    accept_events,
    compile_aggregations,
    entity_keys,
    hash_categories,
)
from serving.live.aggregations.spec import Aggregation, parse_aggregations
from serving.live.aggregations.states import StateTable

__all__ = [
    "EVENT",
    "Aggregation",
    "EntityPlan",
    "Instants",
    "StateTable",
    "accept_events",
    "compile_aggregations",
    "entity_keys",
    "hash_categories",
    "parse_aggregations",
]
