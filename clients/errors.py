"""Everything that can go wrong with a call, in one tree. Catch ClientError for all of it.

    ClientError
    ├── InvalidRequest      the call is wrong: ask differently, a retry will not help       INVALID_ARGUMENT
    ├── ModelNotFound       the server runs, but serves no such model                       NOT_FOUND
    ├── NoAnswer            the call was fine, the answer did not come: a retry may help
    │   ├── DeadlineExceeded    not within the timeout                                      DEADLINE_EXCEEDED
    │   ├── Overloaded          the server's queue is full, or the request waited too long  UNAVAILABLE, RESOURCE_EXHAUSTED
    │   └── Unavailable         nothing listens there, or the server is starting or going   UNAVAILABLE
    └── ServerFault         the server failed on this request: its log says why             INTERNAL and all others

Messages give the fact, then the remedy. `call` is the Call that failed, or None when it never got that far.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from serving.contract.errors import RecommenderError

if TYPE_CHECKING:
    from clients.models import Call


class ClientError(RecommenderError):
    """Base of what this package raises on purpose."""

    def __init__(self, message: str, call: Call | None = None) -> None:
        super().__init__(message)
        self.call = call


class InvalidRequest(ClientError):
    status = "INVALID_ARGUMENT"


class ModelNotFound(ClientError):
    status = "NOT_FOUND"


class NoAnswer(ClientError):
    status = "UNAVAILABLE"


class DeadlineExceeded(NoAnswer):
    status = "DEADLINE_EXCEEDED"


class Overloaded(NoAnswer):
    status = "RESOURCE_EXHAUSTED"


class Unavailable(NoAnswer):
    status = "UNAVAILABLE"


class ServerFault(ClientError):
    status = "INTERNAL"


# What tritonserver 2.51 says, with status UNAVAILABLE, when a dynamic batcher's queue turns a request away.
_QUEUE_SAYS = ("maximum queue size", "timeout expired")

# What it says, with status INTERNAL, about every request once a model's process was killed or crashed.
STUB_DIED = "is not healthy"


def from_status(status: str, details: str, url: str, timeout_s: float | None, call: Call | None = None) -> ClientError:
    """The error for a gRPC status name such as "UNAVAILABLE" and the server's own words."""
    details = details.partition("\n")[0]  # a traceback is for the server's log
    said = f" (it said: {details})" if details else ""
    if status in ("INVALID_ARGUMENT", "OUT_OF_RANGE"):
        return InvalidRequest(f"The server at {url} refuses this request: {details}", call)
    if status == "NOT_FOUND":
        remedy = "See what it serves with `python -m clients health`, and serve a repository that `make export` wrote."
        return ModelNotFound(f"The server at {url} does not know the model{said}. {remedy}", call)
    if status == "DEADLINE_EXCEEDED":
        remedy = "Allow more with Timeout(seconds) or --timeout, or look whether the server is overloaded."
        return DeadlineExceeded(f"No answer from {url} within {timeout_s:g} s. {remedy}", call)
    if status == "RESOURCE_EXHAUSTED" or (status == "UNAVAILABLE" and any(words in details for words in _QUEUE_SAYS)):
        remedy = "Send less, give important requests a higher priority, or add instances."
        return Overloaded(f"The server at {url} turned the request away{said}. {remedy}", call)
    if status == "UNAVAILABLE":
        remedy = (
            "Is it running, and is this its gRPC port (8001 unless chosen otherwise)? "
            "Start it with `make run` or `make serve REPO=model_repository`, or name another with --url host:port."
        )
        return Unavailable(f"No server answers at {url}{said}. {remedy}", call)
    if STUB_DIED in details:
        remedy = (
            "A model's process died, and only starting the server again brings it back: `make serve` (or "
            "`python -m server start`) with the repository and ports it was started with."
        )
        return ServerFault(f"The server at {url} can answer no request{said}. {remedy}", call)
    return ServerFault(f"The server at {url} failed with {status}{said}. Its log has the details.", call)
