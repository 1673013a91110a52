"""The gateway's routes. `create_app` connects client, shop and guard; `python -m gateway` runs it."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any, cast

from fastapi import FastAPI, Query, Request
from fastapi import Path as PathParameter
from fastapi.responses import FileResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.types import Scope

from gateway import schema
from gateway.answers.experiments import Experiments
from gateway.answers.explain import Explainer
from gateway.answers.joined_calls import JoinedCalls
from gateway.answers.limiter import Limiter
from gateway.answers.questions import (
    ExplainParameters,
    Parameters,
    describe_parameters,
    read_question,
    read_visitor_and_item,
    refuse_other_parameters,
)
from gateway.answers.recommendations import DEGRADED_NAMES, Answering
from gateway.answers.similar import SimilarItems
from gateway.answers.visitors import Visitor
from gateway.edge.errors import RETRY_AFTER, STATUS, JsonResponse, answer_error, handle_errors
from gateway.edge.guard import RECOMMENDATIONS, REFUSAL, REQUEST_ID, Guard, Refused
from gateway.edge.tracing import Tracing
from gateway.events.recorder import MOST_ROWS, Recorder, Result
from gateway.events.shapes import MOST_SESSION_CHARACTERS
from gateway.metrics import Metrics
from gateway.progress import LogReports, watch_calibration
from gateway.published import MOST_SIMILAR
from gateway.readiness import SILENT, Readiness, find_pinned
from gateway.settings import GatewaySettings
from gateway.shop import Shop
from live.exposures import ExposureLog
from repository.generations import find_newest
from repository.rounds import read_round, read_running
from repository.triton.code import PROJECT
from serving.live.store import find_live_folder
from triton_recommender import AsyncRecommender, InvalidRequest, RecommenderError

CONSOLE = Path(__file__).parent / "console"
OPENAPI = PROJECT / "docs" / "openapi.json"
APP: dict[str, Any] = {
    **{"title": "Recommender gateway", "version": "1", "docs_url": None, "redoc_url": None},
    # A redirect would name the address that the request states, and HTTP where a proxy in front speaks HTTPS.
    "redirect_slashes": False,
    # Its spans would hold ids of users (in path and query), and begin before the Guard refuses strangers: see edge/tracing.py.
    "telemetry": {"tracing": False, "metrics": False, "logs": False, "auto_configure": False},
}
Count = Annotated[int, Query(ge=1, le=MOST_SIMILAR)]
PathId = Annotated[str, PathParameter(min_length=1)]  # of routes with `:path`, because ids may contain `/`
SessionId = Annotated[str, PathParameter(min_length=1, max_length=MOST_SESSION_CHARACTERS)]


class Described(FastAPI):
    """FastAPI whose /openapi.json has the shapes of bodies and failures, and says that calls may carry a bearer token."""

    def openapi(self) -> dict[str, Any]:
        described = super().openapi()
        described["components"]["schemas"] |= schema.BODY_SCHEMAS
        described["components"]["responses"] = schema.FAILURE_RESPONSES
        described["components"]["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
        described["security"] = [{}, {"token": []}]
        return described


def create_app(
    repo: Path,
    recommender: AsyncRecommender,
    settings: GatewaySettings,
    tokens: Mapping[str, str] | None = None,
    traced: bool = False,
    challenger: AsyncRecommender | None = None,
) -> FastAPI:
    """Return the gateway of a repository. Raises ArtifactError, CatalogueError.

    tokens: digest -> name of the caller; None or empty lets everybody in
    traced: whether each request gets a span of OpenTelemetry
    challenger: the client for the challengers of experiments; None: `recommender`
    """
    metrics = Metrics()
    shop = Shop(repo, metrics)
    limiter = Limiter(settings.most_in_flight, settings.latency_factor, settings.latency_floor_ms / 1_000)
    metrics.in_flight.set_function(lambda: limiter.in_flight)
    metrics.limit.set_function(lambda: limiter.limit)
    store = find_live_folder(shop.repo, shop.published.info.live_folder)
    exposures = ExposureLog(store, settings.exposure_share, settings.exposure_days, settings.exposure_bytes)
    experiments, readiness = Experiments(store), Readiness(recommender)
    explainer = Explainer(shop, Experiments(store))
    finder = SimilarItems(shop)
    most_calls = sys.maxsize if traced else settings.calls_in_flight  # a call of several requests could be in one trace only
    calls = JoinedCalls(recommender, challenger or recommender, most_calls, metrics)
    answering = Answering(shop, calls, metrics, limiter, exposures, experiments, explainer)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await readiness.ask_servers()  # connects now, so that the first caller does not wait for it
        watching: asyncio.Task | None = None
        if settings.exposure_share:
            watching = asyncio.create_task(watch_calibration(LogReports(shop.repo, "calibration"), metrics))
        yield
        if watching:
            watching.cancel()
        finder.close()
        await asyncio.to_thread(explainer.close)
        experiments.close()
        await asyncio.to_thread(exposures.close)
        shop.close()
        for client in (recommender, challenger):
            if client is not None:
                await client.close()

    app = Described(lifespan=lifespan, **APP)
    answer = partial(answer_recommendations, answering, settings)
    if traced:
        app.add_middleware(Tracing)
    # A shortcut would bypass the Tracing middleware, which runs after the Guard.
    shortcuts = {} if traced else {RECOMMENDATIONS: answer}
    app.add_middleware(Guard, settings=settings, tokens=tokens or {}, metrics=metrics, shortcuts=shortcuts)
    handle_errors(app)
    _add_recommendations(app, answer)
    _add_feedback(app, Recorder(shop, recommender, metrics))
    _add_explanations(app, shop, explainer, finder, LogReports(shop.repo, "progress"))
    _add_health(app, shop.repo, readiness, metrics, experiments)
    _add_console(app)
    return app


def compose_openapi() -> str:
    """Return docs/openapi.json: what /openapi.json says, which is the same for every repository."""
    app, unused = Described(**APP), cast(Any, None)  # routes use what they are given only once they are called
    _add_recommendations(app, unused)
    _add_feedback(app, unused)
    _add_explanations(app, unused, unused, unused, unused)
    _add_health(app, unused, unused, unused, unused)
    return json.dumps(app.openapi(), indent=1, sort_keys=True, ensure_ascii=False) + "\n"


async def answer_recommendations(answering: Answering, settings: GatewaySettings, scope: Scope) -> Response:
    """Answer one request for recommendations, with the time that each part of the work took in a header."""
    began_s = time.perf_counter()
    refusal: Refused | None = scope.get(REFUSAL)
    try:
        question = read_question(scope, settings)
        if refusal is None:
            answer = await answering.answer(question)
        elif question.fallback:
            answer = await answering.answer_with_popular(question, refusal.code)
        else:
            return refusal.make_response()
    except RecommenderError as error:
        return answer_error(error)
    own_ms = 1_000 * (time.perf_counter() - began_s) - sum(answer.timings_ms.values())
    timings_ms = {**answer.timings_ms, "gateway": own_ms, **answer.stage_ms}
    timings = ", ".join(f"{part};dur={spent_ms:.2f}" for part, spent_ms in timings_ms.items())
    return JsonResponse(answer.content, headers={REQUEST_ID: answer.content["request_id"], "server-timing": timings})


def _add_recommendations(app: FastAPI, answer: Callable[[Scope], Awaitable[Response]]) -> None:
    """Add the route for people and documentation; most requests take the Guard's shortcut to `answer`."""

    described: dict[str, Any] = {"responses": schema.FAILURES, "openapi_extra": describe_parameters(Parameters)}

    @app.get(RECOMMENDATIONS, response_model=schema.Recommendations, **described)
    async def recommend(request: Request) -> Response:
        """Recommend items to a user, to the visitor of a session, or to whoever had the items of `history`.

        Context columns: `context.NAME=value`.

        With `category`, all items are of that category. With `among`, they are some of the items that it names.

        With `reasons=true`, each item says which sources and which items of the history propose it.

        When no server answers in time, the answer is popular items, with `gateway_fallback` in `degraded`. With `fallback=none`
        it is the error instead. When the servers are overloaded, requests of lower priority are shed first.
        """
        return await answer(request.scope)


def _add_feedback(app: FastAPI, recorder: Recorder) -> None:
    """Add the routes that record events and change items and users."""

    @app.post("/v1/events", response_model=schema.Recorded, responses=schema.EVENT_FAILURES, openapi_extra=schema.EVENTS_BODY)
    async def record(request: Request) -> Response:
        """Record an event, or a list of events. In the answer each one is durable or has its own error."""
        body = await read_json(request)
        results = await recorder.record(check_length(body if isinstance(body, list) else [body], "events"))
        return send_results(results, {"results": results} if isinstance(body, list) else results[0])

    changes: dict[str, Any] = {"responses": schema.CHANGE_FAILURES, "openapi_extra": schema.CHANGES_BODY}

    @app.post("/v1/items", response_model=schema.ChangeResults, **changes)
    async def change_items(request: Request) -> Response:
        """Add or change a list of items. In the answer each change is durable or has its own error."""
        results = await recorder.change_many("item", await read_changes(request))
        return send_results(results, {"results": results})

    @app.post("/v1/users", response_model=schema.ChangeResults, **changes)
    async def change_users(request: Request) -> Response:
        """Add or change a list of users. In the answer each change is durable or has its own error."""
        results = await recorder.change_many("user", await read_changes(request))
        return send_results(results, {"results": results})

    change: dict[str, Any] = {"responses": schema.FAILURES, "openapi_extra": schema.COLUMNS_BODY}

    @app.put("/v1/items/{item_id:path}", response_model=schema.Changed, **change)
    async def change_item(item_id: PathId, request: Request) -> Response:
        """Add or change an item. Columns that are left out stay as they are."""
        return JsonResponse(await recorder.change("item", item_id, await read_columns(request)))

    @app.put("/v1/users/{user_id:path}", response_model=schema.Changed, **change)
    async def change_user(user_id: PathId, request: Request) -> Response:
        """Add or change a user. Columns that are left out stay as they are."""
        return JsonResponse(await recorder.change("user", user_id, await read_columns(request)))


def _add_explanations(app: FastAPI, shop: Shop, explainer: Explainer, finder: SimilarItems, reports: LogReports) -> None:
    """Add the routes that say what is known: of items, users, answers, the generation and its experiment."""

    @app.get("/v1/items/{item_id:path}/similar", response_model=schema.Similar, responses=schema.FAILURES)
    async def similar(request: Request, item_id: PathId, k: Count = 10) -> Response:
        """List the items that are bought with an item, then those with the nearest vectors."""
        refuse_other_parameters(request.scope, ("k",))
        shop.refresh()
        wire_id = shop.parse_item_id(item_id)
        similar_items = await finder.find(wire_id, k)
        items = [shop.describe_item(item.item_id) | {"score": item.score, "source": item.source} for item in similar_items]
        is_known = shop.published.find_position(wire_id) is not None
        return JsonResponse({"item": shop.describe_item(wire_id, item_id), "known": is_known, "items": items})

    @app.get("/v1/items/{item_id:path}", response_model=schema.KnownItem, responses=schema.FAILURES)
    async def describe_item(item_id: PathId) -> Response:
        """Return what is known of an item: whether it can be shown at present, or why not."""
        shop.refresh()
        return JsonResponse(await explainer.describe_item(item_id))

    described: dict[str, Any] = {"responses": schema.FAILURES, "openapi_extra": describe_parameters(ExplainParameters)}

    @app.get("/v1/explain", response_model=schema.Explanation, **described)
    async def explain(request: Request) -> Response:
        """Explain why a user, a session, or whoever had the items of `history`, is shown an item or not.

        The answer has the item's rank and score after each stage, and what led to it. Context columns: `context.NAME=value`.
        It explains the generation that the visitor's list is of, or `generation`. `experiment` says so if an experiment shows
        the visitor items of another one, too.
        """
        visitor, item = read_visitor_and_item(request.scope)
        shop.refresh()
        return JsonResponse(await explainer.explain(visitor, item))

    @app.get("/v1/users/{user_id:path}", response_model=schema.User, responses=schema.FAILURES)
    async def describe_user(user_id: PathId) -> Response:
        """Return what is known of a user: the history that recommendations are based on, newest first."""
        shop.refresh()
        description = await explainer.describe_visitor(Visitor(user=user_id))
        return JsonResponse({"user": shop.describe_user_id(user_id)} | description)

    @app.get("/v1/sessions/{session:path}", response_model=schema.Session, responses=schema.FAILURES)
    async def describe_session(session: SessionId) -> Response:
        """Return what is known of a session: the history that recommendations are based on, newest first."""
        shop.refresh()
        description = await explainer.describe_visitor(Visitor(session=session))
        return JsonResponse({"session": session} | description)

    @app.get("/v1/generation", response_model=schema.Generation, responses=schema.FAILURES)
    async def generation() -> Response:
        """Return what the generation that answers learned from, and its ranker's quality on validation requests."""
        return JsonResponse(shop.published.describe())

    @app.get("/v1/experiment", response_model=schema.ExperimentReport, responses=schema.FAILURES)
    async def experiment() -> Response:
        """Return the state of the latest experiment: feedback by arm, the interval over time, and the decision in words."""
        return Response(await reports.read_latest(), media_type="application/json")


def _add_health(app: FastAPI, repo: Path, readiness: Readiness, metrics: Metrics, experiments: Experiments) -> None:
    """Add the routes for orchestrators and Prometheus."""

    @app.head("/healthz", include_in_schema=False)  # some monitors send HEAD
    @app.get("/healthz", response_model=schema.Alive)
    async def healthz() -> Response:
        """Return that the gateway runs: it answers recommendations at least with popular items."""
        return JsonResponse({"status": "ok"})

    @app.head("/readyz", include_in_schema=False)
    @app.get("/readyz", response_model=schema.Ready, responses=schema.NOT_READY)
    async def readyz() -> Response:
        """Return whether a server answers a real request for recommendations, which is sent at most once in 0.5 s.

        The servers are in the order of the gateway's settings. Only its log has their addresses. A server that answers with
        another generation than the pinned one has not moved to it yet.
        """
        servers = [
            {
                "ready": health.ready,
                "reason": SILENT if health.generation is None else health.reason,
                "generation": health.generation,
                "degraded": [name for bit, name in DEGRADED_NAMES.items() if bit in health.degraded],
            }
            for health in await readiness.ask_servers()
        ]
        ready = any(server["ready"] for server in servers)
        return JsonResponse({"ready": ready, "pinned": find_pinned(repo), "servers": servers}, 200 if ready else 503)

    @app.get("/metrics", include_in_schema=False)
    async def metrics_page() -> Response:
        metrics.show_experiment(experiments.read_current())
        metrics.show_rounds(read_round(repo), read_running(repo))
        metrics.show_newest(find_newest(repo))
        return Response(metrics.render_page(), media_type=CONTENT_TYPE_LATEST)


def _add_console(app: FastAPI) -> None:
    """Add the page that shows the gateway's answers to people."""

    def add(path: str, name: str, media_type: str) -> None:
        @app.get(path, include_in_schema=False)
        async def send() -> Response:
            return FileResponse(CONSOLE / name, media_type=media_type)

    add("/", "console.html", "text/html")
    add("/console.js", "console.js", "text/javascript")
    add("/experiment.js", "experiment.js", "text/javascript")
    add("/console.css", "console.css", "text/css")


async def read_json(request: Request) -> Any:
    """Return the body, read as JSON. Raises InvalidRequest."""
    try:
        return json.loads(await request.body())
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"The body is not JSON: {error}.") from error


async def read_changes(request: Request) -> list[Any]:
    """Return the body, a list of changes. Raises InvalidRequest."""
    changes = await read_json(request)
    if not isinstance(changes, list):
        raise InvalidRequest('The body is not a list; expected changes, such as [{"id": 22423, "columns": {"price": 9.5}}].')
    return check_length(changes, "changes")


def check_length(rows: list[Any], name: str) -> list[Any]:
    """Return the rows. Raises InvalidRequest for none and for too many. name: what they are"""
    if not 1 <= len(rows) <= MOST_ROWS:
        raise InvalidRequest(f"The list holds {len(rows)} {name}; expected 1 to {MOST_ROWS}.")
    return rows


def send_results(results: list[Result], content: Any) -> Response:
    """Return the content, with the status that all results share, or 207."""
    statuses = {STATUS.get(result["error"]["code"], 503) if "error" in result else 200 for result in results}
    status = statuses.pop() if len(statuses) == 1 else 207
    return JsonResponse(content, status, RETRY_AFTER if status == 503 else None)


async def read_columns(request: Request) -> dict[str, Any]:
    """Return the body, an object of column names and values. Raises InvalidRequest."""
    columns = await read_json(request)
    if not isinstance(columns, dict):
        raise InvalidRequest('The body is not an object; expected column names and values, such as {"price": 9.5}.')
    return columns
