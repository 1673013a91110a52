"""What the answers look like, for /openapi.json. Answers are made as plain dictionaries; tests hold them to these forms."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from gateway.events import EventBody

Id = int | str


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Item(Strict):
    """id: as the shop writes it; title: null where none was published."""

    id: Id
    title: str | None


class Scored(Item):
    """score: null where popular items stand in for an answer."""

    score: float | None


class Recommendations(Strict):
    """known: whether anything is known of the user; null without one. degraded: which parts came from a fallback."""

    request_id: str
    generation: int
    known: bool | None
    degraded: list[str]
    items: list[Scored]


class Error(Strict):
    code: str
    message: str


class Failed(Strict):
    error: Error


class Accepted(Strict):
    """The event is durable: its place in the log, and its id."""

    sequence: int
    id: str


class Results(Strict):
    results: list[Accepted | Failed]


Recorded = Accepted | Results


class Changed(Strict):
    sequence: int


class SimilarItem(Scored):
    source: Literal["bought_together", "similar_vectors"]


class Similar(Strict):
    item: Item
    known: bool
    items: list[SimilarItem]


class Place(Strict):
    """rank: from 1, null where the stage did not keep the item."""

    stage: Literal["retrieve", "rank", "rerank", "rules"]
    rank: int | None
    of: int
    score: float | None


class RuleMove(Strict):
    """rank_before, rank_after: from 1, null where the item is out of the list."""

    rule: str
    rank_before: int | None
    rank_after: int | None


class Speaker(Item):
    """weight: what the item of the history adds to the retrieval score."""

    weight: float


class Explanation(Strict):
    user: Id
    known: bool
    item: Item
    shown: bool
    why: str
    generation: int
    places: list[Place]
    rules: list[RuleMove]
    source: list[str]
    because: list[Speaker]


class Seen(Item):
    time: str


class User(Strict):
    user: Id
    known: bool
    events: int
    history: list[Seen]


class ExperimentFacts(Strict):
    """share: of the users, 0 … 1; champion, challenger: generations; reason: why the state is what it is."""

    name: str
    mode: Literal["ab", "shadow", "interleave"]
    state: Literal["running", "stopped", "rolled back"]
    reason: str
    share: float
    champion: int
    challenger: int
    started: str


class ArmCounts(Strict):
    """Answers of an arm and their feedback. clicked, converted: how many answers were, by any event on a shown item."""

    arm: str
    answers: int
    clicked: int
    click_rate: float
    converted: int
    conversion_rate: float


class Look(Strict):
    """The answers given until `time`: challenger - champion, with an interval that holds at every look; null: not known yet.

    Compared are click rates; when interleaving, the share of answers whose challenger's items were clicked more, less that of
    the champion's.
    """

    time: str
    difference: float | None
    low: float | None
    high: float | None


class ExperimentReport(Strict):
    """experiment: null where none was ever started; decision: the verdict, or how the experiment ended, in words."""

    experiment: ExperimentFacts | None
    arms: list[ArmCounts]
    looks: list[Look]
    verdict: Literal["better", "worse", "undecided"]
    decision: str


def _json_body(schema: dict[str, Any]) -> dict[str, Any]:
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


_EVENT = EventBody.model_json_schema()
EVENTS_BODY = _json_body({"anyOf": [_EVENT, {"type": "array", "items": _EVENT}]})
COLUMNS_BODY = _json_body({"type": "object"})
