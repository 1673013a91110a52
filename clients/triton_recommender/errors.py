"""Everything that can go wrong with a call, in one tree. Catch RecommenderError for all of it.

    RecommenderError
    ├── InvalidRequest        the call is wrong: a retry will not help                        INVALID_ARGUMENT
    │   └── UnknownId             the catalogue knows no such user or item, and strict=True   INVALID_ARGUMENT
    ├── AccessDenied          the server wants other credentials or headers                   PERMISSION_DENIED
    ├── ModelNotFound         the server runs, but serves no such model                       NOT_FOUND
    ├── NoAnswer              the call was right, no answer came: a retry may help
    │   ├── DeadlineExceeded      not within the timeout                                      DEADLINE_EXCEEDED
    │   ├── Overloaded            the server's queue is full, or the request waited too long  RESOURCE_EXHAUSTED
    │   └── Unavailable           nothing listens there, or the server starts or stops        UNAVAILABLE
    │       └── CircuitOpen           every endpoint failed lately: not even tried            UNAVAILABLE
    ├── ServerFault           the server failed on this request: its log says why             INTERNAL
    │   └── StageDied             a model's process died: every request will fail             INTERNAL
    ├── CatalogueError        names and titles cannot be read                                 FAILED_PRECONDITION
    │   └── CatalogueMissing      the source publishes none                                   FAILED_PRECONDITION
    └── CacheUnavailable      the cache of answers did not answer                             UNAVAILABLE

A message gives the fact, then what was expected, then the remedy. `status` is the name of the gRPC status. `call` is the
Call that failed, or None when nothing was sent.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from triton_recommender.tensors import CHALLENGER

if TYPE_CHECKING:
    from triton_recommender.models import Call


class RecommenderError(Exception):
    """Base of everything that this package raises on purpose."""

    status = "INTERNAL"

    def __init__(self, message: str, call: Call | None = None) -> None:
        super().__init__(message)
        self.call = call


class InvalidRequest(RecommenderError):
    status = "INVALID_ARGUMENT"


class UnknownId(InvalidRequest):
    """A text names no known user or item; raised only where strict=True."""


class AccessDenied(RecommenderError):
    status = "PERMISSION_DENIED"


class ModelNotFound(RecommenderError):
    status = "NOT_FOUND"


class NoAnswer(RecommenderError):
    status = "UNAVAILABLE"


class DeadlineExceeded(NoAnswer):
    status = "DEADLINE_EXCEEDED"


class Overloaded(NoAnswer):
    status = "RESOURCE_EXHAUSTED"


class Unavailable(NoAnswer):
    status = "UNAVAILABLE"


class CircuitOpen(Unavailable):
    """Every endpoint failed lately, and the next trial is not due yet."""


class ServerFault(RecommenderError):
    status = "INTERNAL"


class StageDied(ServerFault):
    """A model's process died; every request to that server fails until somebody restarts it."""


class CatalogueError(RecommenderError):
    status = "FAILED_PRECONDITION"


class CatalogueMissing(CatalogueError):
    """The source publishes no names and titles."""


class CacheUnavailable(RecommenderError):
    status = "UNAVAILABLE"


# Messages of tritonserver 2.51 and of the stages, with status UNAVAILABLE, when there is more work than they can do.
_QUEUE_SAYS = ("maximum queue size", "timeout expired", "cannot be answered in time")

# `observe` and `upsert` say this, with status UNAVAILABLE, when events cannot be saved, for instance because the disk is full.
_STORE_SAYS = "The live store in"

# tritonserver's message, with status INTERNAL, for every request after a model's process was killed or crashed.
STUB_DIED = "is not healthy"

# tritonserver's message, with status UNAVAILABLE, when a caller lacks the header that opens a restricted protocol.
_RESTRICTED = "protocol is restricted"

# tritonserver's message about a model that it does not serve: NOT_FOUND over gRPC, but sometimes 400 over HTTP.
_UNKNOWN = "unknown model"


def make_status_error(
    status: str, details: str, url: str, timeout_s: float | None, call: Call | None = None
) -> RecommenderError:
    """Return the error for a failed call.

    status: name of a gRPC status, such as "UNAVAILABLE"; details: the server's message, "" for none
    url: address of the server; timeout_s: limit of the attempt, None for no limit; call: None unless it was an inference
    """
    details = details.partition("\n")[0]  # a traceback is for the server's log
    quote = f" (it said: {details})" if details else ""
    if status in ("INVALID_ARGUMENT", "OUT_OF_RANGE") and _UNKNOWN not in details:
        return InvalidRequest(f"The server at {url} refuses this request: {details}", call)
    if status in ("UNAUTHENTICATED", "PERMISSION_DENIED") or _RESTRICTED in details:
        remedy = "Give the client the server's token or certificate with headers= or tls=."
        return AccessDenied(f"The server at {url} does not let this caller in{quote}. {remedy}", call)
    if (status == "NOT_FOUND" or _UNKNOWN in details) and call is not None and call.model == CHALLENGER:
        remedy = "Start an experiment with it, or leave `generation` out, which asks the served generation."
        return ModelNotFound(f"The server at {url} holds no generation {call.version} as challenger{quote}. {remedy}", call)
    if status == "NOT_FOUND" or _UNKNOWN in details:
        remedy = "See what it serves with `python -m clients health`, and serve a repository that `make export` wrote."
        return ModelNotFound(f"The server at {url} does not know the model{quote}. {remedy}", call)
    if status == "DEADLINE_EXCEEDED":
        within = f" within {timeout_s:.3g} s" if timeout_s is not None else ""
        remedy = "Allow more with Timeouts(request=…) or --timeout, or check whether the server is overloaded."
        return DeadlineExceeded(f"No answer from {url}{within}. {remedy}", call)
    if status == "RESOURCE_EXHAUSTED" or (status == "UNAVAILABLE" and any(words in details for words in _QUEUE_SAYS)):
        remedy = "Send less, give important requests a higher priority, or add instances."
        return Overloaded(f"The server at {url} turned the request away{quote}. {remedy}", call)
    if status == "UNAVAILABLE" and _STORE_SAYS in details:
        return Unavailable(f"The server at {url} saves nothing at present: {details}", call)
    if status == "UNAVAILABLE":
        remedy = (
            "Is it running, is this its port (8001 for gRPC, 8000 for HTTP, unless chosen otherwise), and do both sides use "
            "TLS, with certificates that the other side trusts, or neither? "
            "Start it with `make run` or `make serve REPO=model_repository`, or name another with --url host:port."
        )
        return Unavailable(f"No server answers at {url}{quote}. {remedy}", call)
    if STUB_DIED in details:
        remedy = (
            "A model's process died, and only starting the server again brings it back: `make serve` (or "
            "`python -m server start`) with the repository and ports it was started with."
        )
        return StageDied(f"The server at {url} can answer no request{quote}. {remedy}", call)
    return ServerFault(f"The server at {url} failed with {status}{quote}. Its log has the details.", call)
