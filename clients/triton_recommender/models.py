"""Inputs and outputs of a call: plain values, shared by the blocking and the asyncio client."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, TypedDict

import numpy as np

from triton_recommender.errors import InvalidRequest
from triton_recommender.tensors import BUDGET, DEADLINE, OBSERVE, RECOMMEND, TIMINGS, UPSERT, Degraded, Sources

ContextValue = int | float | str | bytes | None

LONGEST_S = 1e6  # longest time limit: with a much longer one, gRPC gives up at once


@dataclass(frozen=True)
class Timeouts:
    """Time limits in seconds. None means no limit; `connect` must have one.

    request: one call of the client, with all its requests, attempts and pauses
    connect: reading a model's tensors before the first request to it, outside of `request`; also each exchange of `health`
    attempt: one attempt at one endpoint; when it expires, the next endpoint is tried in the time that is left
    queue:   the server drops a request that waited longer in its queue. This needs a repository that was exported with queue
             limits ([serving] queue_timeout_us; off by default)
    tell_server: send the deadline along, so that an overloaded server refuses at once what it cannot answer in time. The
             clocks of both machines must agree within some milliseconds. Without it, over gRPC, such a server also works on
             calls that nobody waits for any more, because they are not cancelled.
    """

    request: float | None = 2.0
    connect: float = 5.0
    attempt: float | None = None
    queue: float | None = None
    tell_server: bool = False

    def __post_init__(self) -> None:
        for name in ("request", "connect", "attempt", "queue"):
            value = getattr(self, name)
            if value is None and name != "connect":
                continue
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= LONGEST_S:
                expected = f"expected seconds above 0, and at most {LONGEST_S:,.0f}"
                raise InvalidRequest(f"Timeouts {name} is {value!r}; {expected}.")

    @property
    def queue_us(self) -> int | None:
        """`queue` in microseconds, the unit of Triton's request parameter `timeout`."""
        return None if self.queue is None else max(int(self.queue * 1e6), 1)


DEFAULT_TIMEOUTS = Timeouts()


@dataclass(frozen=True)
class Tls:
    """PEM files for an encrypted connection.

    root_certificates:                trusted authorities; None trusts those of the system
    client_key, client_certificate:   identity of the caller, where the server asks for it (mutual TLS); both or neither
    """

    root_certificates: str | Path | None = None
    client_key: str | Path | None = None
    client_certificate: str | Path | None = None

    def __post_init__(self) -> None:
        if (self.client_key is None) != (self.client_certificate is None):
            raise InvalidRequest("Tls has one of client_key and client_certificate; expected both, or neither.")
        for name in ("root_certificates", "client_key", "client_certificate"):
            path = getattr(self, name)
            if path is not None and not Path(path).is_file():
                raise InvalidRequest(f"Tls {name} is {str(path)!r}, which is not a file; expected a PEM file.")


@dataclass(frozen=True)
class Query:
    """One user's request for recommendations. Ids are the shop's own; text ids need a Catalogue.

    user_id: None for an anonymous visitor, whom only `history` and `context` describe
    history: item ids, newest first, in place of the server's own history of the user; None leaves it to the server,
             [] means "nothing yet". The server reads the newest H of them, and fixes H.
    exclude: item ids that must not come back, any number of them. The server excludes the first E of them (64 by default), and
             the client takes the others out of the answer, which may then be shorter
    context: column -> value, as the data set declares them; a column that is left out counts as missing
    after:   a sequence that `observe` or `upsert` returned. The answer reflects that event or change, or has LIVE in `degraded`
    session: the shop's name of an anonymous visitor's session, whose events the server has observed; user_id must be None
    category: the category of all items of the answer, as the data set or `upsert` names it; None: the whole catalogue
    among:   the item ids to recommend from, 1 to A of them (A is fixed by the server), also those that the user already had;
             None: the whole catalogue. An empty list is refused: there is nothing to ask. With `category`, both must hold.
    """

    user_id: int | str | None = None
    history: Sequence[int | str] | None = None
    exclude: Sequence[int | str] = ()
    context: Mapping[str, ContextValue] = field(default_factory=dict)
    after: int | None = None
    session: str | None = None
    category: str | None = None
    among: Sequence[int | str] | None = None


@dataclass(frozen=True)
class Event:
    """One interaction that happened.

    event:        a name of the data set's [events] section, such as "view"; None is the server's default, the positive one
    timestamp_ms: milliseconds since 1970 UTC; None is now, by the server's clock
    value:        quantity, rating or amount
    event_id:     idempotency key: a repeated one changes nothing and returns the first sequence; one of another user, item or
                  event is refused. Only events with a key are sent again after a failure.
    request_id:   the `request_id` of the answer that the event reacts to
    context:      column -> value, as in Query
    session:      for a visitor without a user id, as in Query; user_id must then be None
    """

    user_id: int | str | None
    item_id: int | str
    event: str | None = None
    timestamp_ms: int | None = None
    value: float | None = None
    event_id: str | None = None
    request_id: str | None = None
    context: Mapping[str, ContextValue] = field(default_factory=dict)
    session: str | None = None


class EventDetails(TypedDict, total=False):
    """The fields of Event that `observe` takes by name, so that a type checker finds a misspelt one."""

    timestamp_ms: int | None
    value: float | None
    event_id: str | None
    request_id: str | None
    context: Mapping[str, ContextValue]
    session: str | None


class Notice(NamedTuple):
    """A user or item in a query that the catalogue does not know.

    field: "user_id", "history", "exclude" or "among";  value: as the caller gave it;  message: for people
    """

    field: str
    value: str
    message: str


class Recommendation(NamedTuple):
    item_id: int
    score: float


class DescribedItem(NamedTuple):
    """rank: from 1; name: the shop's own text id; title: for people. name and title may be None, as in Recommendations."""

    rank: int
    item_id: int
    score: float
    name: str | None
    title: str | None


@dataclass(frozen=True)
class Recommendations:
    """The answer for one user, best first. Iterating gives (item_id, score) pairs; `items` has names and titles too.

    scores:     of the re-ranker, in the served order; rules may have moved items, so they need not descend
    degraded:   which stages answered with their fallback; falsy when none did
    generation: which published generation answered
    propensities: for each item, the probability that the server's random draws put it at its place, given the items before it:
                1.0 where nothing was drawn, None where it is not known. Empty if the answer went through a cache, or if the
                server does not send them
    sources:    for each item, which models or rules proposed it. Empty in the same cases
    stage_ms:   milliseconds that each stage of the server took, by name, from the end of the one before. Empty without
                `timings` of the client, and in the same cases
    names, titles: one per item, None where the catalogue does not know the item; empty if the client has no catalogue
    warnings:   users and items of the query that the catalogue does not know
    request_id: pass it to the events that the answer leads to
    """

    item_ids: tuple[int, ...]
    scores: tuple[float, ...]
    degraded: Degraded = Degraded.NONE
    generation: int = 0
    propensities: tuple[float | None, ...] = field(default=(), compare=False)
    sources: tuple[Sources, ...] = field(default=(), compare=False)
    stage_ms: Mapping[str, float] = field(default_factory=dict, compare=False)
    names: tuple[str | None, ...] = field(default=(), compare=False)
    titles: tuple[str | None, ...] = field(default=(), compare=False)
    warnings: tuple[Notice, ...] = ()
    request_id: str = field(default="", compare=False)

    def __iter__(self) -> Iterator[Recommendation]:
        return map(Recommendation, self.item_ids, self.scores)

    def __len__(self) -> int:
        return len(self.item_ids)

    @property
    def items(self) -> tuple[DescribedItem, ...]:
        unknown = (None,) * len(self)
        columns = (range(1, len(self) + 1), self.item_ids, self.scores, self.names or unknown, self.titles or unknown)
        return tuple(map(DescribedItem, *columns))


@dataclass(frozen=True)
class ModelDescription:
    """A served model. inputs, outputs: tensor -> (Triton's dtype, length without the batch axis)."""

    inputs: Mapping[str, tuple[str, int]]
    outputs: Mapping[str, tuple[str, int]]
    max_batch: int


@dataclass(frozen=True)
class Call:
    """One request as it goes over the wire. inputs: tensors [B, …] by name."""

    inputs: Mapping[str, np.ndarray]
    timeout_s: float | None = None
    queue_timeout_us: int | None = None
    priority: int = 0  # 1 is the highest, 0 the model's default
    request_id: str = ""
    model: str = RECOMMEND
    version: str = ""  # of the model; "" leaves it to the server
    headers: Mapping[str, str] = field(default_factory=dict)
    safe_to_repeat: bool = True  # if it arrives twice, the second one changes nothing
    tell_server: bool = False  # send the deadline along
    timings: bool = False  # ask how long each stage takes

    @property
    def is_read(self) -> bool:
        """Whether the call changes nothing on the server."""
        return self.model not in (OBSERVE, UPSERT)

    @property
    def parameters(self) -> dict[str, int | bool]:
        """Request parameters: the deadline in unix milliseconds, the time left in milliseconds, and whether to time stages."""
        parameters: dict[str, int | bool] = {TIMINGS: True} if self.timings and self.is_read else {}
        if self.tell_server and self.timeout_s is not None:
            parameters[DEADLINE] = int(1_000 * (time.time() + self.timeout_s))
            parameters[BUDGET] = int(1_000 * self.timeout_s)
        return parameters


@dataclass(frozen=True)
class Health:
    """One endpoint's reply to one real request.

    ready:      whether it answered with items;  reason: why not, else ""
    generation: the one that answered, None without an answer;  degraded: as in Recommendations
    """

    url: str
    ready: bool
    reason: str = ""
    generation: int | None = None
    degraded: Degraded = Degraded.NONE
