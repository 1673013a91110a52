"""The schemas of the answers, for /openapi.json. The gateway builds plain dictionaries, which tests check against these."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from pydantic.json_schema import models_json_schema

from gateway.events.shapes import BODIES, SHAPES, ChangeBody, Int64
from serving.live.experiment import Mode, State

Id = Int64 | str


class Strict(BaseModel):
    """Base of all schemas: an answer has no other fields."""

    model_config = ConfigDict(extra="forbid")


class Item(Strict):
    """id: as the shop writes it; title: null where none was published."""

    id: Id
    title: str | None


class Scored(Item):
    """score: null where popular items replace the answer."""

    score: float | None


class Contributor(Item):
    """An item of the history. weight: how much it adds to the retrieval score."""

    weight: float


class Reasons(Strict):
    """source: the retrieval sources that propose the item; because: the items of the history that it is bought with."""

    source: list[str]
    because: list[Contributor]


class Recommended(Scored):
    """reasons: only with `reasons=true`; null where they are not known, as for popular items."""

    reasons: Reasons | None = None


class Recommendations(Strict):
    """known: whether anything is known of the user; null without a user. degraded: which parts came from a fallback.

    warnings: sentences about items of `history`, `exclude` and `among` that are not in the catalogue, and so have no effect,
        and about a `category` that no item has
    """

    request_id: str
    generation: Int64
    known: bool | None
    degraded: list[str]
    warnings: list[str]
    items: list[Recommended]


class Generation(Strict):
    """The generation that answers. log: number of events, first and last day of what it learned from

    quality: NDCG@10 and Recall@20 of the ranker on validation requests, and the number of these; empty where the log held none.
        Items that retrieval missed do not count, so this says nothing about retrieval, nor which of two generations is better.
    """

    generation: Int64
    dataset: str
    log: dict[str, int | str]
    quality: dict[str, float]


class Error(Strict):
    code: str
    message: str


class Failure(Strict):
    """The answer of any route to a request that fails. code: the name of a gRPC status, or another one for what HTTP refuses"""

    error: Error


class Failed(Strict):
    """The event is not known to be durable. id: to send it again with, so that it counts once; absent if it was unreadable."""

    error: Error
    id: str | None = None


class Accepted(Strict):
    """The event is durable. sequence: its place in the log; warning: only if its item is not in the catalogue."""

    sequence: Int64
    id: str
    warning: str | None = None


class Results(Strict):
    results: list[Accepted | Failed]


Recorded = Accepted | Results
NotRecorded = Failed | Results


class Changed(Strict):
    """The change is durable. sequence: its place in the log; warning: only if no row is left for a new item."""

    sequence: Int64
    warning: str | None = None


class ChangeResults(Strict):
    """The outcome of each change of a list: it is durable, or not known to be."""

    results: list[Changed | Failure]


class SimilarItem(Scored):
    """source: whether the item is bought together with the other one, or has a similar vector."""

    source: Literal["bought_together", "similar_vectors"]


class Similar(Strict):
    item: Item
    known: bool
    items: list[SimilarItem]


class Place(Strict):
    """An item's place after a stage. rank: counted from 1, null if the stage dropped the item; of: how many it kept."""

    stage: Literal["retrieve", "rank", "rerank", "rules"]
    rank: int | None
    of: int
    score: float | None


class RuleMove(Strict):
    """The effect of one rule on an item. rank_before, rank_after: counted from 1, null where the item is not in the list."""

    rule: str
    rank_before: int | None
    rank_after: int | None


class Explanation(Strict):
    """Why a visitor is shown an item or not. user: null for a session or a history; known: null where neither is given

    why: the reason in words; source: what proposes the item (docs/gateway.md); because: the history's contributors
    generation: the explained one; experiment: a sentence if an experiment shows the visitor items of another one too, else null
    """

    user: Id | None
    known: bool | None
    item: Item
    shown: bool
    why: str
    generation: Int64
    experiment: str | None
    places: list[Place]
    rules: list[RuleMove]
    source: list[str]
    because: list[Contributor]


class KnownItem(Strict):
    """The present state of an item in recommendations. known: whether the export has it or it was added since

    exported: whether it was trained on; why_not: why it cannot be shown, in words, else null
    popularity_rank: its place among the items that can be shown, by what sold lately, from 1; null if it is not among them
    pinned_place: the place in each list that the rules give it, from 1; null without one
    """

    item: Item
    known: bool
    exported: bool
    can_be_shown: bool
    why_not: str | None
    category: str | None
    popularity_rank: int | None
    pinned_place: int | None


class Seen(Item):
    """An item of a user's or session's history. time: of the event, ISO 8601."""

    time: str


class KnownVisitor(Strict):
    known: bool
    events: int = Field(
        description="how many events count in totals: those of kinds that the interaction log holds, not returns"
    )
    history: list[Seen] = Field(description="newest first; events that do not count, such as views, may also be here")


class User(KnownVisitor):
    user: Id


class Session(KnownVisitor):
    session: str


class ExperimentFacts(Strict):
    """share: of the enrolled users, 0 … 1; champion, challenger: generations; reason: why it has this state."""

    name: str
    mode: Mode
    state: State
    reason: str
    share: float
    champion: Int64
    challenger: Int64
    started: str


class ArmCounts(Strict):
    """Answers of an arm and their feedback. clicked, converted: answers with a click or a conversion on a shown item."""

    arm: str
    answers: int
    clicked: int
    click_rate: float
    converted: int
    conversion_rate: float


class Look(Strict):
    """The difference, challenger - champion, over the answers until `time`. null: not known yet.

    It is the difference of click rates; when interleaving, the share of answers in which the challenger's items got more
    clicks, minus the share in which the champion's did. low, high: its confidence interval, which holds at every look.
    """

    time: str
    difference: float | None
    low: float | None
    high: float | None


class ExperimentReport(Strict):
    """experiment: null if none was ever started; decision: the verdict, or how the experiment ended, in words.

    split: how many users met each arm of an A/B test, in words; wrong_split: whether the stated share cannot explain this.
    users_share: share of the users whose answers are counted here; below 1 where all would be too many to judge at once.
    """

    experiment: ExperimentFacts | None
    arms: list[ArmCounts]
    looks: list[Look]
    split: str
    wrong_split: bool
    verdict: Literal["better", "worse", "undecided"]
    decision: str
    users_share: float


class Alive(Strict):
    status: Literal["ok"]


class ServerHealth(Strict):
    """A server's reply to a real request. reason: why it is not ready, else empty; generation: null without an answer."""

    ready: bool
    reason: str
    generation: Int64 | None
    degraded: list[str]


class Ready(Strict):
    """ready: whether one of the servers is; pinned: generation that a start serves, null where its config is unreadable."""

    ready: bool
    pinned: Int64 | None
    servers: list[ServerHealth]


def _describe_json_body(schema: dict[str, Any]) -> dict[str, Any]:
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


_REFERENCE = "#/components/schemas/{model}"
_, _described = models_json_schema([(shape, "validation") for shape in BODIES], ref_template=_REFERENCE)
BODY_SCHEMAS: dict[str, Any] = _described["$defs"]  # by name, for components/schemas of /openapi.json
_EVENT = {"anyOf": [{"$ref": _REFERENCE.format(model=shape.__name__)} for shape in SHAPES]}
EVENTS_BODY = _describe_json_body({"anyOf": [_EVENT, {"type": "array", "items": _EVENT}]})
Responses = dict[int | str, dict[str, Any]]
_FAILURES: dict[int | str, str] = {
    400: "The request is malformed",
    401: "There is no valid token",
    429: "The caller sends too many requests: try again as Retry-After says",
    502: "The server failed on the request",
    503: "No server answers, or too many requests wait: try again as Retry-After says",
    "default": "HTTP refuses the request, or the gateway failed on it",
}
FAILURES: Responses = {
    status: {"$ref": f"#/components/responses/{status}", "description": said} for status, said in _FAILURES.items()
}
_FAILURE = {"application/json": {"schema": {"$ref": _REFERENCE.format(model=Failure.__name__)}}}
FAILURE_RESPONSES = {str(status): {"content": _FAILURE, "description": said} for status, said in _FAILURES.items()}
EVENT_FAILURES: Responses = FAILURES | {
    207: {"model": Results, "description": "The events of a list have different outcomes"},
    400: {"model": NotRecorded, "description": "The event is malformed"},
    502: {"model": NotRecorded, "description": "The server failed on the event: send it again with its id"},
    503: {"model": NotRecorded, "description": "No server confirmed the event: send it again with its id"},
}
COLUMNS_BODY = _describe_json_body({"type": "object"})
CHANGES_BODY = _describe_json_body({"type": "array", "items": {"$ref": _REFERENCE.format(model=ChangeBody.__name__)}})
CHANGE_FAILURES: Responses = FAILURES | {
    207: {"model": ChangeResults, "description": "The changes have different outcomes"},
    400: {"model": Failure | ChangeResults, "description": "The list or all its changes are malformed"},
    502: {"model": ChangeResults, "description": "The server failed on the changes"},
    503: {"model": Failure | ChangeResults, "description": "No server confirmed a change: try again as Retry-After says"},
}
NOT_READY: Responses = {503: {"model": Ready, "description": "No server answers"}}
