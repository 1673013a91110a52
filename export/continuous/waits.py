"""Say how long rounds of continuous training wait after generations that were not as good, or that users were spared."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from repository.experiments import NOT_PROMOTED, STOPPED
from repository.registry import CHOSEN, REASON, SERVER, Act, read_acts

MOST_DOUBLED = 3  # refused candidates, each of which doubles the wait
REFUSED = ("rolled back", STOPPED, NOT_PROMOTED)  # acts that end an experiment and leave the champion
REST_S = 86_400  # after such an act, before users meet another candidate; doubled likewise


def count_awaited(repo: Path, serving: int, least_events: int) -> int:
    """Return how many events must be newer than generation `serving` before a round trains.

    After 0, 1, 2, 3, 4, 5, … candidates that were not as good, that not every server moved to, or that users were
    spared (`find_refused`), it is 1, 2, 4, 8, 16, 24, … times `least_events`: a shop whose taste does not change trains less
    often, but does not stop.
    """
    refused = sum(act.action == "not published" and act.generation == serving for act in read_acts(repo))
    refused += len(find_refused(repo, serving))
    return least_events * (2 ** min(refused, MOST_DOUBLED) + 2**MOST_DOUBLED * max(0, refused - MOST_DOUBLED))


def find_refused(repo: Path, serving: int) -> dict[int, Act]:
    """Return the generations newer than `serving` that users were spared, with the acts that did so.

    These are challengers that were not promoted, and generations from which a person went back to `serving`. Shadows are left
    out, and so are experiments of persons that were stopped: they say nothing against the challenger.
    """
    acts = read_acts(repo)
    refused = {act.generation: act for act in acts if act.action in REFUSED and act.generation > serving and not is_test(act)}
    return find_left(acts, serving) | refused


def find_left(acts: Sequence[Act], serving: int) -> dict[int, Act]:
    """Return the generations of rounds from which a person went back to `serving`, with the acts that did so.

    acts: the record, oldest first
    """
    left: dict[int, Act] = {}
    newest = 0
    for act in acts:
        if act.action == "published" and act.generation > serving and REASON in act.facts:
            newest = act.generation
        elif newest and act.action in CHOSEN and act.author != SERVER and act.generation == serving:
            left.setdefault(newest, act)
    return left


def is_test(act: Act) -> bool:
    """Return whether an experiment was a shadow, or was started by a person and then stopped. act: that ended it"""
    is_own = act.facts.get("experiment") == name_experiment(act.generation)
    return act.facts.get("mode") == "shadow" or (act.action == STOPPED and not is_own)


def name_experiment(generation: int) -> str:
    """Return the name of the experiment in which a round shows its generation to a share of the users."""
    return f"generation-{generation}"


def find_rest(repo: Path, serving: int, now_s: float) -> str:
    """Return why, and until when, to wait after generations that users were spared (`find_refused`); "" for no wait.

    The next candidate learns nearly the same log as the last, and would be shown to users who were just spared it. So it comes
    1, 2, 4, 8, 8, … days later. now_s: unix seconds
    """
    refused = find_refused(repo, serving)
    past = {place: act for place, act in refused.items() if act.time_s <= now_s + REST_S}  # the clock of the others was wrong
    if not past:
        return ""
    generation, last = max(past.items(), key=lambda item: (item[1].time_s, item[0]))
    rest_s = REST_S * 2 ** min(len(refused) - 1, MOST_DOUBLED)
    if now_s >= last.time_s + rest_s:
        return ""
    fact = f"challenger {generation} was not promoted ({last.reason})"
    if last.generation == serving:
        fact = f"{last.author} went back from generation {generation} to {serving}"
    return f"{fact}, and another one would be much like it. The next round trains from {format_time(last.time_s + rest_s)} on"


def format_time(time_s: float) -> str:
    return datetime.fromtimestamp(time_s, UTC).strftime("%Y-%m-%d %H:%M UTC")
