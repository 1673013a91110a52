"""Tell whether this machine's clock is behind: events that a shop has already had are later than it."""

from __future__ import annotations

import time
from contextlib import closing
from pathlib import Path

from repository.applied_rules import find_rules_folder
from serving.contract.artifacts import find_stage_folder, read_stage
from serving.contract.errors import RecommenderError
from serving.contract.generations import read_pinned_generation
from serving.contract.tensors import STAGES
from serving.live.reader import Reader

MOST_BEHIND_S = 86_400  # as for a clock that is set while events come (serving/live/writer.py)


def describe_wrong_clock(repo: Path) -> str:
    """Return a message if the newest event of a repository is far ahead of the clock; "" otherwise, or if none can be read.

    A clock that is ahead cannot be told from a shop that had no events for a while.
    """
    now_s = time.time()
    newest = {"the pinned generation's log": read_generation_clock_s(repo), "the live store": read_latest_event_s(repo)}
    place = max(newest, key=lambda name: newest[name])
    if newest[place] - now_s <= MOST_BEHIND_S:
        return ""
    return (
        f"this machine's clock says {format_time(now_s)}, and the newest event of {place} is of {format_time(newest[place])}. "
        "If the clock is wrong, correct it, and restart the server, because it takes new events for old ones. If the clock is "
        "right, that event has a wrong time (docs/live.md says what follows)"
    )


def read_generation_clock_s(repo: Path) -> int:
    """Return the time of the newest event that the pinned generation learned from, unix seconds; 0 where it cannot be read."""
    try:
        return read_stage(find_stage_folder(repo, STAGES[1], read_pinned_generation(repo))).settings["as_of_s"]
    except RecommenderError:  # what starts or checks the repository says why
        return 0


def read_latest_event_s(repo: Path) -> int:
    """Return the time of the latest event of the live store, unix seconds; 0 without one, or where it cannot be read."""
    try:
        with closing(Reader(find_rules_folder(repo).parent)) as reader:
            if not reader.exists():
                return 0
            with reader.snapshot() as snapshot:
                return snapshot.read_progress().latest_ms // 1_000
    except (RecommenderError, OSError):  # another user's; its server reads it
        return 0


def format_time(time_s: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(time_s))
