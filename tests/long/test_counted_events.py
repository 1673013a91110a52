"""`events` of a visitor counts as docs/gateway.md says: by the kinds of the interaction log, and not by the history."""

from __future__ import annotations

import time

from tests.repositories import FOLLOWED_SETTINGS
from tests.unit.gateway.conftest import Gateway
from tests.unit.small_shops import export, shop
from tests.unit.trials.logs import observe
from triton_recommender.ids import session_id

EVENTS = """
[events.purchase]
positive = true
[events.view]
weight = 0.1
[events.dismissal]
weight = 0.0
seen = true
"""


def test_views_are_in_the_history_of_a_session_and_not_among_its_counted_events(tmp_path):
    shown = shop(tmp_path / "data", users=12, items=30, events=60, more=EVENTS)
    door = Gateway(export(tmp_path, shown, "ensemble", **FOLLOWED_SETTINGS))
    now_ms = 1_000 * int(time.time())
    kinds = [b"purchase", b"view", b"dismissal"]
    times_ms = [now_ms - 60_000, now_ms - 30_000, now_ms]
    observe(door.repo, {"user_id": [session_id("a3f")] * 3, "item_id": [1, 2, 3], "event": kinds, "timestamp_ms": times_ms})
    told = door.ask("GET", "/v1/sessions/a3f").json()
    assert told["events"] == 1
    assert [item["id"] for item in told["history"]] == [2, 1]
