"""Answer every error of the gateway's routes as JSON: {"error": {"code", "message"}}."""

from __future__ import annotations

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.routing import Match

from gateway.faults import describe_fault
from gateway.questions import STATUS, JsonResponse, make_error_response
from serving.contract.errors import RecommenderError as ServingError
from serving.contract.errors import RequestError
from triton_recommender import RecommenderError


def find_methods(request: Request) -> list[str]:
    """Return the methods that a path has, each in a route of its own; Starlette names those of the first route alone."""
    routes = [route for route in request.app.routes if route.matches(request.scope)[0] is not Match.NONE]
    return sorted({method for route in routes for method in getattr(route, "methods", None) or ()})


def handle_errors(app: FastAPI) -> None:
    """Make the app answer every error as JSON: {"error": {"code", "message"}}."""

    @app.exception_handler(RecommenderError)
    async def answer_client_error(_: Request, error: RecommenderError) -> JsonResponse:
        return make_error_response(STATUS.get(error.status, 503), error.status, str(error))

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
