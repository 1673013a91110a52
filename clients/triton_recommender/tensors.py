"""Models, reserved values and bits on the wire. docs/calling.md describes the same for callers in other languages."""

from __future__ import annotations

from enum import IntFlag

import numpy as np

RECOMMEND, OBSERVE, UPSERT = "recommend", "observe", "upsert"
CHALLENGER = "challenger"  # `recommend` of another generation, while an experiment runs; its version is the generation

NAME = "item_id"  # the column by which `upsert` takes the text of a new item's id, where ids are text
PAD_ID = -1  # fills unused places of `history`, `exclude` and `item_ids`; as `after`: wait for nothing
FROM_STORE = -2  # in every place of `history`: use the server's own history of the user
MISSING_INT = int(np.iinfo(np.int64).min)  # an integer that was not given
DEADLINE, BUDGET = "deadline_unix_ms", "budget_ms"  # request parameters: when the answer is no longer wanted, time allowed
TIMINGS = "timings"  # request parameter: the answer shall say how long each stage took
STAGES = ("preprocess", "retrieve", "rank", "rerank")  # the order of `stage_ms`
ANONYMOUS = MISSING_INT  # as `user_id`: nobody's id, served as a cold-start user
PROBE_USER_ID = MISSING_INT + 1  # the same, for asking whether a server answers: its measurements leave the request out


class Degraded(IntFlag):
    """Bits of `degraded`: which part of the answer came from a fallback."""

    NONE = 0
    PREPROCESS = 1  # the feature store did not answer
    RETRIEVE = 2  # fewer candidates than an answer has places, in a request without `category` and `among`
    RANK = 4
    RERANK = 8
    LIVE = 16  # the live state is behind `after`, or cannot be read


class Sources(IntFlag):
    """Bits of `sources`: what proposed an item."""

    NONE = 0
    SEQUENCE = 1
    GRAPH = 2
    TWO_TOWER = 4
    BOUGHT_TOGETHER = 8  # with items of the history
    LIVE_SALES = 16  # sold since the export, for users without a history
    LIVE_PAIRS = 32  # bought together with an item of the history since the export
    NEW_ITEMS = 64  # added since the export
    POPULAR = 128  # sold more than the mean item, or one of the gateway's own popular items
