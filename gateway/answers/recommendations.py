"""Answer a request for recommendations within its deadline: from the servers, or with popular items where they fail."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from opentelemetry import trace

from gateway.answers.experiments import NO_EXPERIMENT, Enrolment, Experiments, Shown, enrol, find_discarded
from gateway.answers.explain import Explainer
from gateway.answers.joined_calls import JoinedCalls
from gateway.answers.limiter import Limiter
from gateway.answers.visitors import Visitor, find_visitor_id
from gateway.edge.errors import UNLOGGED
from gateway.metrics import Metrics
from gateway.shop import Shop
from live.exposures import FAILED, FALLBACK, Exposure, ExposureLog
from serving.contract.errors import RecommenderError as ServingError
from serving.live.experiment import SHADOW_ARM
from trials.interleaving import CHALLENGER, CHAMPION
from triton_recommender import (
    DeadlineExceeded,
    Degraded,
    InvalidRequest,
    Overloaded,
    Query,
    Recommendations,
    RecommenderError,
    Sources,
)
from triton_recommender.wire import check_among, check_k

log = logging.getLogger("gateway")

GRACE_S = 0.05  # after the deadline, so that the client raises its own, more telling timeout first
UNKNOWN_CATEGORY = "category is {category!r}, which no item has, so the list is empty. Correct the name."
UNKNOWN_ITEMS = "{name} names items that are not in the catalogue and have no effect: {items}. Correct the ids."
DEGRADED_NAMES = {
    Degraded.PREPROCESS: "feature_store",
    Degraded.RETRIEVE: "candidates_short",
    Degraded.RANK: "ranker",
    Degraded.RERANK: "re_ranker",
    Degraded.LIVE: "live_state",
}


@dataclass(frozen=True)
class Question(Visitor):
    """A request for recommendations, with ids as the shop writes them."""

    after: int | None = None  # sequence of an event that the answer must reflect
    category: str | None = None  # of all items of the answer; None: any
    among: tuple[str, ...] | None = None  # the items to recommend from; None: the whole catalogue
    k: int | None = None  # number of items; None: as many as the server returns
    deadline_s: float = 0.25
    priority: str = "normal"  # high, normal or low: low ones are shed first when the servers are overloaded
    fallback: bool = True  # False: an error instead of popular items
    reasons: bool = False  # whether to say for each item which sources and which items of the history propose it


class Answered(NamedTuple):
    """An answer as a JSON object (schema.Recommendations).

    timings_ms: milliseconds for "server", and for "reasons" if they were asked for; empty if no server was called
    stage_ms: those of the server's time that each stage took, by name; empty if the server does not say
    """

    content: dict[str, Any]
    timings_ms: dict[str, float]
    stage_ms: Mapping[str, float]


class Answering:
    """Asks the servers as many questions at a time as `limiter` admits. Further and failed questions get popular items."""

    def __init__(
        self,
        shop: Shop,
        calls: JoinedCalls,
        metrics: Metrics,
        limiter: Limiter,
        exposures: ExposureLog,
        experiments: Experiments,
        explainer: Explainer,
    ) -> None:
        self._shop, self._calls, self._metrics, self._limiter = shop, calls, metrics, limiter
        self._exposures, self._experiments, self._explainer = exposures, experiments, explainer

    async def answer(self, question: Question) -> Answered:
        """Return the answer. If the servers fail, it has popular items.

        Raises InvalidRequest for a malformed question, and any other error only if `question.fallback` is False.
        """
        if question.fallback and not self._limiter.admits(question.priority):  # checked first, because shedding must be cheap
            popular_answer = await self.answer_with_popular(question, Overloaded.status)
            self._metrics.shed.labels(question.priority).inc()
            return popular_answer
        shop, request_id, (query, is_known) = self._shop, uuid.uuid4().hex, await self._make_query(question)
        counted_id = question.find_counted_id(shop)
        shop.refresh()
        experiment = self._experiments.read_current()
        if discarded := find_discarded(experiment):
            shop.forget_names(discarded)
        enrolment = enrol(experiment, counted_id, question.generation, shop.published.generation)
        began_s = time.monotonic()
        try:
            shown = await self._ask(query, question, request_id, counted_id, enrolment)
        except InvalidRequest:
            raise
        except Exception as error:  # every error: the shop must get items to show
            if not question.fallback:
                raise
            self._refuse_larger(question, query)
            self._report_failure(error, request_id)
            content = self._build_popular(question, query, is_known, request_id, enrolment)
            return Answered(content, {"server": 1_000 * (time.monotonic() - began_s)}, {})
        answer, latency_ms = shown.answer, 1_000 * (time.monotonic() - began_s)
        left_s = question.deadline_s - latency_ms / 1_000
        if answer.generation != enrolment.challenger:
            await shop.move_to(answer.generation, left_s)
        if enrolment.challenger and not enrolment.is_shadow:
            await shop.learn_names(enrolment.challenger, left_s)
        if question.generation not in (None, answer.generation):  # the server moved since the last answer
            raise InvalidRequest(
                f"generation is {question.generation}, and the server now answers with {answer.generation}; expected "
                f"{answer.generation}, or the challenger of a running experiment."
            )
        items, timings_ms = shop.list_items(answer.item_ids, answer.scores), {"server": latency_ms}
        if question.reasons:
            asked_s = time.monotonic()
            left_s = question.deadline_s - (asked_s - began_s)
            items = await self._add_reasons(items, query, request_id, shown, enrolment.challenger, left_s)
            timings_ms["reasons"] = 1_000 * (time.monotonic() - asked_s)
        degraded = list_degraded(answer.degraded) + [FAILED] * shown.failed
        self._log(request_id, counted_id, answer, degraded, enrolment, shown.teams, latency_ms)
        warnings = self._list_warnings(question, query, items)
        content = self._build_answer(request_id, is_known, answer.generation, degraded, items, warnings)
        return Answered(content, timings_ms, answer.stage_ms)

    async def answer_with_popular(self, question: Question, reason: str) -> Answered:
        """Return popular items without asking a server. Raises InvalidRequest for a malformed question.

        reason: why no server is asked, as the metric of fallbacks counts it
        """
        query, is_known = await self._make_query(question)
        self._refuse_larger(question, query)
        self._metrics.fallbacks.labels(reason).inc()
        return Answered(self._build_popular(question, query, is_known, uuid.uuid4().hex, NO_EXPERIMENT), {}, {})

    async def _make_query(self, question: Question) -> tuple[Query, bool | None]:
        """Return the query, and whether the visitor is known (None for a visitor without an id). Raises InvalidRequest."""
        known_ids = await self._shop.find_known_async(question.list_ids(self._shop))
        among = None if question.among is None else [self._shop.parse_item_id(item) for item in question.among]
        query = question.make_query(self._shop, known_ids)
        query = replace(query, after=question.after, category=question.category, among=among)
        visitor_id = find_visitor_id(query)
        return query, None if visitor_id is None else visitor_id in known_ids

    def _refuse_larger(self, question: Question, query: Query) -> None:
        """Raise InvalidRequest for what the server would refuse as too much, if it answered.

        Only before popular items, because the server may answer with a generation of other sizes than the gateway knows.
        """
        axes = self._shop.published.info.axes
        check_k(question.k, axes.items_returned)
        if query.among is not None:
            check_among(len(query.among), axes.candidates)

    async def _add_reasons(
        self, items: list[dict[str, Any]], query: Query, request_id: str, shown: Shown, challenger: int | None, left_s: float
    ) -> list[dict[str, Any]]:
        """Return the items, each with its reasons.

        Reasons are null if they fail, or take longer than `left_s`: the answer does not wait for them.
        """
        answer, teams = shown.answer, shown.teams or [CHAMPION] * len(items)
        reasons: list[dict[str, Any] | None] = [None] * len(items)
        generations = [challenger if challenger and team == CHALLENGER else answer.generation for team in teams]
        try:
            async with asyncio.timeout(left_s):
                reasons[:] = await self._explainer.find_reasons(query, answer.item_ids, generations)
        except Exception as error:  # every error: an answer without reasons is better than none
            reason = "they took too long" if isinstance(error, TimeoutError) else error
            expected = isinstance(error, TimeoutError | RecommenderError | ServingError)
            fields = {"request_id": request_id}
            log.warning("an answer has no reasons: %s", reason, exc_info=not expected, extra={"fields": fields})
        return [item | {"reasons": item_reasons} for item, item_reasons in zip(items, reasons, strict=True)]

    async def _ask(
        self, query: Query, question: Question, request_id: str, counted_id: int | None, enrolment: Enrolment
    ) -> Shown:
        """Ask the generations that the enrolment selects, within the deadline. Return the answer to show.

        Raises Overloaded, DeadlineExceeded, or what the client raises.
        """
        limiter = self._limiter
        settings: dict[str, Any] = {"k": question.k, "request_id": request_id, "timeout_s": question.deadline_s}

        async def ask_champion() -> Recommendations:
            return await self._calls.ask(query, priority=question.priority, **settings)

        async def ask_challenger(generation: int) -> Recommendations:
            priority = "low" if enrolment.is_shadow else question.priority
            return await self._calls.ask(query, priority=priority, generation=generation, **settings)

        def log_shadow(answer: Recommendations | None, seconds: float) -> None:
            shadow_answer = Recommendations((), ()) if answer is None else answer
            degraded = list_degraded(shadow_answer.degraded) + [FAILED] * (answer is None)
            shadow = enrolment._replace(arm=SHADOW_ARM)
            self._log(request_id, counted_id, shadow_answer, degraded, shadow, latency_ms=1_000 * seconds)

        if not limiter.admits(question.priority):
            self._metrics.shed.labels(question.priority).inc()
            waiting = f"{limiter.in_flight} recommendations wait already"
            raise Overloaded(f"{waiting}; one more would not be answered in time. Try again.")
        began_s, failed = limiter.begin(), True
        try:
            async with asyncio.timeout(question.deadline_s + GRACE_S):
                shown = await self._experiments.answer(
                    enrolment, request_id, ask_champion, ask_challenger, log_shadow, self._shop.list_pins
                )
                failed = False
                return shown
        except TimeoutError as error:
            raise DeadlineExceeded(f"No answer within {question.deadline_s:.3g} s. Allow more with x-deadline-ms.") from error
        finally:
            limiter.end(began_s, failed)

    def _report_failure(self, error: Exception, request_id: str) -> None:
        """Count, trace and log why popular items are shown."""
        reason = error.status if isinstance(error, RecommenderError) else type(error).__name__
        self._metrics.fallbacks.labels(reason).inc()
        trace.get_current_span().add_event("popular items", {"reason": reason})
        if not isinstance(error, UNLOGGED):
            fields = {"request_id": request_id, "reason": reason}
            is_unexpected = not isinstance(error, RecommenderError)
            log.warning("answered with popular items: %s", error, exc_info=is_unexpected, extra={"fields": fields})

    def _build_popular(
        self, question: Question, query: Query, is_known: bool | None, request_id: str, enrolment: Enrolment
    ) -> dict[str, Any]:
        """Return an answer with popular items, and log it."""
        among = None if query.among is None else list(map(int, query.among))
        history = query.history or () if among is None else ()  # a caller who names an item wants its place
        hidden = set(map(int, (*query.exclude, *history)))
        count = question.k or self._shop.published.info.axes.items_returned
        popular = self._shop.pick_popular(hidden, question.context, count, question.category, among)
        items = self._shop.list_items(popular, [None] * len(popular))
        if question.reasons:
            items = [item | {"reasons": None} for item in items]
        answer = Recommendations(tuple(popular), (), Degraded.NONE, self._shop.published.generation, (1.0,) * len(popular))
        self._log(request_id, question.find_counted_id(self._shop), answer, [FALLBACK], enrolment)
        warnings = self._list_warnings(question, query, items)
        return self._build_answer(request_id, is_known, answer.generation, [FALLBACK], items, warnings)

    def _list_warnings(self, question: Question, query: Query, items: list[dict[str, Any]]) -> list[str]:
        """Return a sentence for each of `history`, `exclude` and `among` that names items that are not in the catalogue.

        Also one for a category that no item has. items: of the answer
        """
        lists = {"history": (question.history, query.history), "exclude": (question.exclude, query.exclude)}
        lists["among"] = (question.among, query.among)
        warnings = []
        for name, (texts, item_ids) in lists.items():
            text_by_id = dict(zip(map(int, item_ids or ()), texts or (), strict=True))
            if unknown := self._shop.find_unknown_items(set(text_by_id)):
                listed = ", ".join(repr(text_by_id[item_id]) for item_id in text_by_id if item_id in unknown)
                warnings.append(UNKNOWN_ITEMS.format(name=name, items=listed))
        if question.category is not None and not items and not self._shop.has_category(question.category):
            warnings.append(UNKNOWN_CATEGORY.format(category=question.category))
        return warnings

    def _log(
        self,
        request_id: str,
        counted_id: int | None,
        answer: Recommendations,
        degraded: list[str],
        enrolment: Enrolment,
        teams: list[int] | None = None,
        latency_ms: float | None = None,
    ) -> None:
        """Add an answer to the exposure log, unless the caller chose the generation. Popular items have no scores."""
        if enrolment.forced or not self._exposures.keeps(request_id, enrolment.name):
            return
        item_ids, time_ms = list(answer.item_ids), time.time_ns() // 1_000_000
        scores: list[float | None] = [*answer.scores] or [None] * len(item_ids)
        propensities = [*answer.propensities] or None  # None: the server does not say
        fields = (request_id, time_ms, counted_id, answer.generation, item_ids, scores, degraded)
        part = (enrolment.name, enrolment.arm, teams, latency_ms, enrolment.assignment)
        marks = (Sources.POPULAR,) * len(item_ids) if degraded == [FALLBACK] else answer.sources
        sources = [int(bits) for bits in marks] or None
        if not self._exposures.add(Exposure(*fields, *part, propensities, sources)):
            self._metrics.lost_exposures.inc()

    def _build_answer(
        self, request_id: str, is_known: bool | None, generation: int, degraded: list[str], items: list, warnings: list[str]
    ) -> dict[str, Any]:
        facts = {"request_id": request_id, "generation": generation, "known": is_known, "degraded": degraded}
        return facts | {"warnings": warnings, "items": items}


def list_degraded(degraded: Degraded) -> list[str]:
    """Return the names of the bits that are set, as answers list them."""
    return [name for bit, name in DEGRADED_NAMES.items() if bit in degraded]
