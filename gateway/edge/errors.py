"""Answer every error of the gateway's routes as JSON: {"error": {"code", "message"}}.

An error of the client library names the address of a server, which only operators should see. The log has the error, and
callers get a text without the address.
"""

from __future__ import annotations

import logging
import re
from typing import Any

import orjson
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Match

from gateway.edge.faults import describe_fault
from serving.contract.errors import RecommenderError as ServingError
from serving.contract.errors import RequestError
from triton_recommender import CircuitOpen, InvalidRequest, Overloaded, RecommenderError

log = logging.getLogger("gateway")

RETRY_AFTER = {"retry-after": "1"}
# HTTP status by the name of a gRPC status. Any other gRPC status becomes 503: a retry may help.
STATUS = {"INVALID_ARGUMENT": 400, "INTERNAL": 502}
REFUSING_SERVER = re.compile(r"\AThe server at \S+")  # only at the start: the rest may quote a caller
MESSAGES = {  # for callers, by the name of a gRPC status
    "UNAVAILABLE": "No server can serve this request at present. Try again. The gateway's log has the reason.",
    "DEADLINE_EXCEEDED": "No server answered in time. Try again, and allow a recommendation more with x-deadline-ms.",
    "RESOURCE_EXHAUSTED": "More requests wait than can be answered in time. Try again, or send fewer.",
}
# Errors that every request may get: a log line for each would add to the load, and fill the disk while the servers are away.
# The failures that opened the circuit, and those of its trials, are logged.
UNLOGGED = Overloaded | CircuitOpen
OTHER_MESSAGE = "The server failed on this request. The gateway's log has the reason."


class JsonResponse(Response):
    """An answer as JSON, written by a fast serializer."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return orjson.dumps(content)


def make_error_response(status: int, code: str, message: str) -> JsonResponse:
    """Return an error in the form of every route: {"error": {"code", "message"}}."""
    return JsonResponse({"error": {"code": code, "message": message}}, status, RETRY_AFTER if status == 503 else None)


def describe_error(error: RecommenderError) -> str:
    """Return the message of an error for callers, without the address of a server."""
    if isinstance(error, InvalidRequest):
        return hide_address(str(error))
    return MESSAGES.get(error.status, OTHER_MESSAGE)


def hide_address(refusal: str) -> str:
    """Return a server's refusal of a request, or of one of its rows, without the address of the server."""
    return REFUSING_SERVER.sub("The server", refusal)


def log_error(error: RecommenderError) -> None:
    """Log an error whose message for callers leaves something out."""
    if not isinstance(error, InvalidRequest | UNLOGGED):
        log.warning("answered with an error: %s", error, extra={"fields": {"reason": error.status}})


def answer_error(error: RecommenderError) -> JsonResponse:
    """Return the answer to a request that failed with an error of the client, and log the error."""
    log_error(error)
    return make_error_response(STATUS.get(error.status, 503), error.status, describe_error(error))


def find_methods(request: Request) -> list[str]:
    """Return the methods of a path. Each has its own route, and Starlette's `allow` names those of the first route only."""
    routes = [route for route in request.app.routes if route.matches(request.scope)[0] is not Match.NONE]
    return sorted({method for route in routes for method in getattr(route, "methods", None) or ()})


def handle_errors(app: FastAPI) -> None:
    """Make the app answer every error as JSON: {"error": {"code", "message"}}."""

    @app.exception_handler(RecommenderError)
    async def answer_client_error(_: Request, error: RecommenderError) -> JsonResponse:
        return answer_error(error)

    @app.exception_handler(RequestError)
    async def answer_malformed_request(_: Request, error: RequestError) -> JsonResponse:
        return make_error_response(STATUS[error.status], error.status, str(error))

    @app.exception_handler(ServingError)
    async def answer_repository_error(_: Request, error: ServingError) -> JsonResponse:
        return make_error_response(503, "UNAVAILABLE", str(error))

    @app.exception_handler(RequestValidationError)
    async def answer_invalid_request(_: Request, error: RequestValidationError) -> JsonResponse:
        fault = error.errors()[0]
        return make_error_response(400, "INVALID_ARGUMENT", describe_fault(fault, fault["loc"][-1:]))

    @app.exception_handler(HTTPException)
    async def answer_http_error(request: Request, error: HTTPException) -> JsonResponse:
        if error.status_code == 404:
            path = request.url.path
            return make_error_response(404, "NOT_FOUND", f"There is nothing at {path}. /openapi.json lists the paths.")
        if error.status_code == 405:
            allowed = ", ".join(find_methods(request))
            path = request.url.path
            message = f"{request.method} is not possible at {path}; expected {allowed}. /openapi.json lists the calls."
            response = make_error_response(405, "HTTP", message)
            response.headers["allow"] = allowed
            return response
        response = make_error_response(error.status_code, "HTTP", str(error.detail))
        response.headers.update(error.headers or {})
        return response

    @app.exception_handler(Exception)
    async def answer_unexpected_error(_: Request, error: Exception) -> JsonResponse:
        return make_error_response(500, "INTERNAL", "The gateway failed on this request. Its log has the details.")
