"""What goes into a call and what comes out: plain values, shared by the blocking and the asyncio client."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from clients.errors import InvalidRequest
from serving.contract.tensors import Degraded


@dataclass(frozen=True)
class Timeout:
    """How long a call may take, in seconds.

    Timeout(0.5)                one answer within 0.5 s, retries included
    Timeout(0.5, connect=10.0)  10 s for the very first exchange, in which the client learns the model's shapes
    Timeout(0.5, queue=0.05)    and the server drops the request when it has waited 50 ms in a queue, if the repository was
                                exported with queue limits ([serving] queue_timeout_us; off by default)
    Timeout(None)               no limit: only for people at a prompt
    """

    total: float | None = 2.0
    connect: float = 5.0
    queue: float | None = None

    def __post_init__(self) -> None:
        for name in ("total", "connect", "queue"):
            value = getattr(self, name)
            if value is None and name != "connect":
                continue
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
                raise InvalidRequest(f"Timeout {name} is {value!r}; expected seconds above 0.")

    @property
    def queue_us(self) -> int | None:
        """Microseconds, as Triton's `timeout` request parameter counts."""
        return None if self.queue is None else max(int(self.queue * 1e6), 1)


DEFAULT_TIMEOUT = Timeout()


@dataclass(frozen=True)
class Query:
    """One user's question. Ids are the shop's own; names (str) need a Catalogue that knows them.

    user_id: None for an anonymous visitor, whom only `history` and `context` describe
    history: newest first, overrides what the feature store holds; None leaves it to the store, [] is "nothing yet"
    exclude: items that must not come back
    context: column name -> value, as the data set declares them; what is left out counts as missing
    """

    user_id: int | str | None
    history: Sequence[int | str] | None = None
    exclude: Sequence[int | str] = ()
    context: Mapping[str, int | float | str | bytes | None] = field(default_factory=dict)


class Recommendation(NamedTuple):
    item_id: int
    score: float


@dataclass(frozen=True)
class Recommendations:
    """The answer for one user, best first. Iterating gives (item_id, score) pairs.

    scores:     the re-ranker's, in served order; rules may have moved items, so they need not fall
    degraded:   which stages answered by their fallback; falsy when none did
    generation: which published generation answered
    """

    item_ids: tuple[int, ...]
    scores: tuple[float, ...]
    degraded: Degraded = Degraded.NONE
    generation: int = 0

    def __iter__(self) -> Iterator[Recommendation]:
        return map(Recommendation, self.item_ids, self.scores)

    def __len__(self) -> int:
        return len(self.item_ids)


@dataclass(frozen=True)
class Call:
    """One request as it goes over the wire."""

    inputs: Mapping[str, np.ndarray]  # [B, …]
    timeout_s: float | None = None
    queue_timeout_us: int | None = None
    priority: int = 0  # 1 is the highest, 0 the model's default
    request_id: str = ""


@dataclass(frozen=True)
class ModelState:
    name: str
    version: str
    state: str  # READY or UNAVAILABLE
    reason: str = ""


@dataclass(frozen=True)
class Health:
    ready: bool  # the server can answer `recommend`
    models: tuple[ModelState, ...]
