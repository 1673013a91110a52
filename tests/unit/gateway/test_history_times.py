"""Times of a history are those of the events, also where recommendations skip a long pause of the shop."""

import time
from datetime import datetime

from tests.unit.gateway.conftest import Gateway
from tests.unit.trials.logs import observe

USER = 7  # of the exported log, which ended years ago


def read_times_s(door: Gateway) -> dict[int, float]:
    history = door.ask("GET", f"/v1/users/{USER}").json()["history"]
    return {item["id"]: datetime.fromisoformat(item["time"]).timestamp() for item in history}


def test_an_event_of_today_is_of_today_and_those_before_stay_as_they_were(own_repo):
    door = Gateway(own_repo)
    exported_s = read_times_s(door)
    new = next(item for item in range(1, 31) if item not in exported_s)
    now_s = int(time.time())
    observe(door.repo, {"user_id": [USER], "item_id": [new], "timestamp_ms": [1_000 * now_s]})
    assert read_times_s(door) == exported_s | {new: now_s}


def test_a_late_event_of_the_pause_is_of_its_own_time(own_repo):
    door = Gateway(own_repo)
    exported_s, now_s = read_times_s(door), int(time.time())
    first, late = [item for item in range(1, 31) if item not in exported_s][:2]
    observe(door.repo, {"user_id": [USER], "item_id": [first], "timestamp_ms": [1_000 * now_s]})
    observe(door.repo, {"user_id": [USER], "item_id": [late], "timestamp_ms": [1_000 * (now_s - 40 * 86_400)]})
    assert read_times_s(door) == exported_s | {first: now_s, late: now_s - 40 * 86_400}


def test_late_events_of_one_item_in_the_pause_keep_a_time_each(own_repo):
    door = Gateway(own_repo)
    exported_s, now_s = read_times_s(door), int(time.time())
    first, late = [item for item in range(1, 31) if item not in exported_s][:2]
    late_s = [now_s - 86_400 * days for days in (40, 50, 60)]
    for item, time_s in [(first, now_s), *((late, moment) for moment in late_s)]:
        observe(door.repo, {"user_id": [USER], "item_id": [item], "timestamp_ms": [1_000 * time_s]})
    history = door.ask("GET", f"/v1/users/{USER}").json()["history"]
    assert [datetime.fromisoformat(item["time"]).timestamp() for item in history if item["id"] == late] == late_s
