"""Explain why an item is in a user's list, or why not. The gateway runs the pipeline of the generation that answers for that.

trace ─▶ place and score after retrieve, rank, rerank, rules ─▶ the first stage that lost the item, and its reason
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from gateway.answers.experiments import Experiments, enrol
from gateway.answers.limited_threads import LimitedThreads
from gateway.answers.visitors import Visitor, find_visitor_id
from gateway.shop import Shop
from live.exposures import SOURCE_NAMES
from repository.file_stamps import Stamp, read_stamp
from serving.contract.artifacts import find_stage_folder
from serving.contract.errors import RecommenderError as ServingError
from serving.contract.tensors import PAD_ID, STAGES, Sources, make_ensemble_spec
from serving.live.reader import UserReader
from serving.live.timeline import Timeline
from triton_recommender import InvalidRequest, Query
from triton_recommender.models import ModelDescription
from triton_recommender.wire import Signature, encode

if TYPE_CHECKING:
    from serving.pipeline import Pipeline

Arrays = dict[str, np.ndarray]

MOST_CONTRIBUTORS = 5


@dataclass(frozen=True)
class Place:
    """An item's place after a stage. rank: from 1; None if the stage did not keep the item. of: how many items it kept"""

    stage: str
    rank: int | None
    of: int
    score: float | None


class Loaded(NamedTuple):
    """A generation's pipeline. stamps: of the files that it maps"""

    pipeline: Pipeline
    stamps: dict[Path, Stamp | None]


class Explainer:
    """Explains by the pipelines of the generations that answer, which it loads on demand. Belongs to one event loop.

    It has one thread of its own: in asyncio's, a queue of explanations would keep answers waiting that read users from Redis.
    """

    def __init__(self, shop: Shop, experiments: Experiments) -> None:
        """experiments: used by nobody else, because the instance of the event loop is not safe for threads"""
        self._shop, self._experiments = shop, experiments
        self._loaded: dict[int, Loaded] = {}
        self._thread = LimitedThreads(1, "explanations")

    async def explain(self, visitor: Visitor, item: str) -> dict[str, Any]:
        """Return schema.Explanation as a JSON object. Raises InvalidRequest, Overloaded, ArtifactError or RequestError.

        The explanation is about the generation that the visitor demands, otherwise the one that makes the visitor's list. If
        two generations make the list together, it is about the one that shows the item; if none does, about the last one.

        item: the id as the shop writes it
        """
        return await self._thread.run(self._explain, visitor, item)

    async def find_reasons(self, query: Query, item_ids: Sequence[int], generations: Sequence[int]) -> list[dict[str, Any]]:
        """Return for each item which sources propose it, and which items of the history, as JSON objects (schema.Reasons).

        query: with ids on the wire; generations: for each item, the generation that recommends it
        Raises InvalidRequest, Overloaded, ArtifactError or RequestError.
        """
        return await self._thread.run(self._find_reasons, query, item_ids, generations)

    async def describe_visitor(self, visitor: Visitor) -> dict[str, Any]:
        """Return what recommendations know of a user or a session, as a JSON object (schema.KnownVisitor).

        Raises InvalidRequest, Overloaded, ArtifactError or RequestError.
        """
        return await self._thread.run(self._describe_visitor, visitor)

    async def describe_item(self, item: str) -> dict[str, Any]:
        """Return what recommendations know of an item, as a JSON object (schema.KnownItem). item: the id as the shop writes it

        Raises InvalidRequest, Overloaded or ArtifactError.
        """
        return await self._thread.run(self._describe_item, item)

    def close(self) -> None:
        """Close all pipelines, once the thread is done with the one that it runs."""
        self._thread.close(wait=True)
        for generation in list(self._loaded):
            self._loaded.pop(generation).pipeline.close()

    def _explain(self, visitor: Visitor, item: str) -> dict[str, Any]:
        query, is_known = self._make_query(visitor)
        item_id = self._shop.parse_item_id(item)
        champion = self._shop.published.generation  # read here: the wait for the thread may have taken seconds
        enrolment = enrol(self._experiments.read_current(), visitor.find_counted_id(self._shop), None, champion)
        demanded = visitor.generation
        for generation in enrolment.list_shown(champion) if demanded is None else (demanded,):
            pipeline = self._load_pipeline(generation)
            inputs = build_inputs(pipeline, query)
            trace = inputs | pipeline.trace(inputs)
            explanation = self._build_explanation(pipeline, trace, item_id)
            if explanation["shown"]:
                break
        user = None if visitor.user is None else self._shop.describe_user_id(visitor.user)
        known = {"user": user, "known": is_known, "item": self._shop.describe_item(item_id, item)}
        return known | explanation | {"generation": generation, "experiment": enrolment.describe_difference(generation)}

    def _find_reasons(self, query: Query, item_ids: Sequence[int], generations: Sequence[int]) -> list[dict[str, Any]]:
        reasons: dict[int, dict[str, Any]] = {}
        for generation in set(generations):
            pairs = zip(item_ids, generations, strict=True)
            recommended = [item_id for item_id, recommending in pairs if recommending == generation]
            pipeline = self._load_pipeline(generation)
            inputs = build_inputs(pipeline, replace(query, exclude=(), after=None))
            trace = inputs | pipeline.trace(inputs)
            positions = pipeline.stages["retrieve"].items.find_positions(np.array(recommended, np.int64)).tolist()
            for item_id, (source, because) in zip(recommended, find_sources(pipeline, trace, positions), strict=True):
                reasons[item_id] = {"source": source, "because": self._describe_contributors(because)}
        return [reasons[item_id] for item_id in item_ids]

    def _describe_visitor(self, visitor: Visitor) -> dict[str, Any]:
        query, is_known = self._make_query(visitor)
        pipeline = self._load_pipeline(self._shop.published.generation)
        inputs = build_inputs(pipeline, query)
        store = pipeline.stages["preprocess"].inputs
        state, _, _ = store.read_state(inputs)
        live_s = read_event_times(self._shop.reader.users, int(inputs["user_id"][0, 0]), store.embedded.as_of_s)
        seen = zip(state.history_ids[0].tolist(), state.history_times[0].tolist(), strict=True)
        history = []
        for item_id, feature_s in seen:
            if item_id != PAD_ID:
                newest_last = live_s.get((item_id, feature_s))
                moment = datetime.fromtimestamp(newest_last.pop() if newest_last else feature_s, UTC)
                history.append(self._shop.describe_item(item_id) | {"time": moment.isoformat()})
        return {"known": is_known, "events": int(state.event_count[0]), "history": history}

    def _describe_item(self, item: str) -> dict[str, Any]:
        shop = self._shop
        item_id = shop.parse_item_id(item)
        pipeline = self._load_pipeline(shop.published.generation)
        retrieve = pipeline.stages["retrieve"]
        popularity = retrieve.search.item_vectors[:, -1]  # what everybody's scores have of it
        if live_items := retrieve.outputs.live_items:
            live_items.refresh()
            popularity = popularity + live_items.arrays.lifts[:-1]  # without the padding row
        retrieve.outputs.rules.follow(retrieve.search)
        position = int(retrieve.items.find_positions(np.array([item_id]))[0])
        why_not = explain_unservable(pipeline, position)
        rank = None if why_not else 1 + int((retrieve.search.servable[:-1] & (popularity > popularity[position])).sum())
        return {
            "item": shop.describe_item(item_id, item),
            "known": not shop.find_unknown_items({item_id}),
            "exported": position < len(retrieve.items.ids),
            "can_be_shown": why_not is None,
            "why_not": why_not,
            "category": shop.find_category(item_id),
            "popularity_rank": rank,
            "pinned_place": next((slot + 1 for pinned, slot in shop.list_pins() if pinned == item_id), None),
        }

    def _load_pipeline(self, generation: int) -> Pipeline:
        """Return the pipeline of a generation that answers. Load it if it is not loaded, or if its files changed.

        Changed files must not stay mapped: the kernel ends a process that reads a page beyond the end of a truncated file.
        Raises InvalidRequest for a generation that does not answer.
        """
        champion = self._shop.published.generation
        served_generations = self._experiments.list_served(champion)
        for other, loaded in list(self._loaded.items()):
            if other not in served_generations or any(read_stamp(path) != stamp for path, stamp in loaded.stamps.items()):
                self._loaded.pop(other).pipeline.close()
        if generation not in served_generations:
            raise InvalidRequest(
                f"generation is {generation}; expected {champion}, which is served, or the challenger of a running experiment."
            )
        if generation not in self._loaded:
            from serving.pipeline import Pipeline  # here, like the stages below, because most gateways never explain

            folders = [find_stage_folder(self._shop.repo, stage, generation) for stage in STAGES]
            stamps = {path: read_stamp(path) for folder in folders for path in folder.rglob("*.npy")}
            self._loaded[generation] = Loaded(Pipeline.load(self._shop.repo, generation, self._shop.reader), stamps)
        return self._loaded[generation].pipeline

    def _make_query(self, visitor: Visitor) -> tuple[Query, bool | None]:
        """Return the query of a visitor, and whether the visitor is known (None for a visitor without an id)."""
        known_ids = self._shop.find_known(visitor.list_ids(self._shop))
        query = visitor.make_query(self._shop, known_ids)
        visitor_id = find_visitor_id(query)
        return query, None if visitor_id is None else visitor_id in known_ids

    def _build_explanation(self, pipeline: Pipeline, trace: Arrays, item_id: int) -> dict[str, Any]:
        places, rules = follow_item(pipeline, trace, item_id)
        position = int(pipeline.stages["retrieve"].items.find_positions(np.array([item_id]))[0])
        [(source, contributors)] = find_sources(pipeline, trace, [position])
        return {
            "shown": places[-1].rank is not None,
            "why": explain_place(pipeline, trace, item_id, position, places, rules),
            "places": [vars(place) for place in places],
            "rules": [move._asdict() for move in rules],
            "source": source,
            "because": self._describe_contributors(contributors),
        }

    def _describe_contributors(self, contributors: list[tuple[int, float]]) -> list[dict[str, Any]]:
        return [self._shop.describe_item(item_id) | {"weight": weight} for item_id, weight in contributors]


def read_event_times(reader: UserReader, user_id: int, as_of_s: int) -> dict[tuple[int, int], list[int]]:
    """Return the unix seconds of a user's live events, the newest last, by item id and feature time, as histories have them.

    Feature time (timeline.py) stands still during a pause, so it alone does not tell when late events of that pause were.
    as_of_s: the clock of the generation, unix seconds
    """
    try:
        if not reader.exists():
            return {}
        with reader.snapshot() as snapshot:
            records, progress = snapshot.read_users(np.array([user_id], np.int64))[1], snapshot.read_progress()
            pauses_ms = snapshot.read_pauses_ms() if progress.n_pauses else []
    except ServingError:  # the history lacks the live events too
        return {}
    timeline = Timeline.of(pauses_ms, progress.first_ms, 1_000 * as_of_s)

    def count(item_ids: np.ndarray, times_s: np.ndarray) -> Counter[tuple[int, int, int]]:
        feature_s = timeline.skip_all_pauses(times_s)
        return Counter(zip(item_ids.tolist(), feature_s.tolist(), times_s.tolist(), strict=True))

    session = count(records["session_ids"].ravel(), records["session_ms"].ravel() // 1_000)
    events = session | count(records["history_ids"].ravel(), records["history_s"].ravel().astype(np.int64))  # most are in both
    times: dict[tuple[int, int], list[int]] = {}
    for item_id, feature, time_s in sorted(events.elements()):
        times.setdefault((item_id, feature), []).append(time_s)
    return times


def build_inputs(pipeline: Pipeline, query: Query) -> Arrays:
    """Return the inputs of one request, as the client sends them to a server. Raises InvalidRequest.

    query: with ids on the wire
    """
    spec = make_ensemble_spec(pipeline.specs)
    description = ModelDescription(
        inputs={tensor.name: (tensor.dtype, tensor.dims[0]) for tensor in spec.inputs},
        outputs={tensor.name: (tensor.dtype, tensor.dims[0]) for tensor in spec.outputs},
        max_batch=1,
    )
    signature = Signature.of(description)
    if len(query.exclude) > signature.exclusions:  # the client removes further ones from an answer, but not from a trace
        raise InvalidRequest(f"exclude has {len(query.exclude)} items; expected at most {signature.exclusions}. Send fewer.")
    return encode([replace(query, user_id=find_visitor_id(query), session=None)], signature)


def follow_item(pipeline: Pipeline, trace: Arrays, item_id: int) -> tuple[list[Place], list]:
    """Return where an item is after each stage and after the rules, and how each rule moved it (list of RuleMove)."""
    from gateway.answers.rules_trace import trace_rules  # here, because importing its loops loads the compiler

    candidates, valid = trace["candidate_ids"][0], trace["candidate_ids"][0] != PAD_ID
    rerank = pipeline.stages["rerank"]
    best = rerank.lists.pick(trace)
    correction = np.float32(rerank.outputs.settings.trust) * rerank.compute_correction(best)[0]
    listed = best.valid[0]
    scores = np.where(listed, best.rank_scores[0] + correction, -np.inf)
    served_ids = trace["item_ids"][0]
    places = [
        locate_item("retrieve", candidates, trace["retrieval_scores"][0], valid, item_id),
        locate_item("rank", candidates, trace["rank_scores"][0], valid, item_id),
        locate_item("rerank", best.ids[0], scores, listed, item_id),
    ]
    rank = np.flatnonzero(served_ids == item_id)
    shown_place = int(rank[0]) if len(rank) else None
    score = None if shown_place is None else float(trace["scores"][0, shown_place])
    places.append(Place("rules", None if shown_place is None else shown_place + 1, int((served_ids != PAD_ID).sum()), score))
    column = np.flatnonzero(best.ids[0] == item_id)
    if not len(column):
        return places, []
    listed_scores = scores[None].astype(np.float32)
    outputs, user_ids, generation = rerank.outputs, trace["user_id"][:, 0], pipeline.info.generation
    requests = best.positions, listed_scores, user_ids
    columns, propensities = outputs.rules.apply_with_propensities(*requests, outputs.items_returned)
    outputs.explore(columns, propensities, best.positions, user_ids)
    list_moves = trace_rules(outputs.rules, generation, *requests, columns[0])
    return places, list_moves(int(column[0]))


def locate_item(stage: str, ids: np.ndarray, scores: np.ndarray, valid: np.ndarray, item_id: int) -> Place:
    """Return the place of an item in the order of scores. ids, scores, valid: [n], of one request"""
    order = np.argsort(-np.where(valid, scores, -np.inf), kind="stable")
    places = np.flatnonzero((ids[order] == item_id) & valid[order])
    if not len(places):
        return Place(stage, None, int(valid.sum()), None)
    return Place(stage, int(places[0]) + 1, int(valid.sum()), float(scores[order[places[0]]]))


def find_sources(
    pipeline: Pipeline, trace: Arrays, positions: Sequence[int]
) -> list[tuple[list[str], list[tuple[int, float]]]]:
    """Return for each item the sources that propose it, and up to MOST_CONTRIBUTORS (item id, weight), largest weight first.

    Contributors are the items of the history that are bought together with the item. positions: item positions
    """
    from serving.stages.search.search import compute_recency_weights

    retrieve = pipeline.stages["retrieve"]
    neighbours, n_published = retrieve.search.neighbours, len(retrieve.search.neighbours.positions) - 1
    history = retrieve.items.find_positions(trace["history_ids"])
    weights = compute_recency_weights(history, retrieve.items.n_items)[0]
    item_positions, vectors = np.array([positions], np.int64), retrieve.compute_user_vectors(trace, history)
    taken_together, _ = retrieve.outputs.sum_strengths(history, item_positions)
    [source_bits] = retrieve.outputs.find_sources(vectors, history, item_positions, taken_together)

    def find_contributors(position: int) -> list[tuple[int, float]]:
        shares: dict[int, float] = {}
        for place, contributor in enumerate(np.minimum(history[0], n_published).tolist()):
            share = neighbours.weights[contributor][neighbours.positions[contributor] == position].sum() * weights[place]
            if share > 0:
                shares[int(trace["history_ids"][0, place])] = float(share)
        return sorted(shares.items(), key=lambda pair: -pair[1])[:MOST_CONTRIBUTORS]

    return [
        (
            [name for bit, name in SOURCE_NAMES.items() if bit & bits],
            find_contributors(position) if position < n_published else [],
        )
        for position, bits in zip(positions, source_bits.tolist(), strict=True)
    ]


def explain_place(pipeline: Pipeline, trace: Arrays, item_id: int, position: int, places: list[Place], rules: list) -> str:
    """Return a sentence that explains the place of an item."""
    retrieved, ranked, reranked, served = places
    moving_rules = [move.rule for move in rules if move.rank_before != move.rank_after]
    by_rules = f"; moved by the rules: {', '.join(moving_rules)}." if moving_rules else "."
    if served.rank is not None:
        return f"It is shown at place {served.rank}{by_rules}"
    if retrieved.rank is None:
        return explain_no_candidate(pipeline, trace, item_id, position, retrieved)
    if reranked.rank is None:
        gave_way = ranked.rank is not None and ranked.rank <= reranked.of
        which = f"{reranked.of}, pinned and new items among them," if gave_way else f"the first {reranked.of}"
        return f"The ranker put it at place {ranked.rank}; only {which} are passed to the re-ranker."
    dropped = [move.rule for move in rules if move.rank_before is not None and move.rank_after is None]
    if dropped:
        return f"A rule drops it: {dropped[0]}."
    last = rules[-1].rank_after if rules else reranked.rank
    return f"It is at place {last} of the list, and the first {served.of} are shown{by_rules}"


def explain_no_candidate(pipeline: Pipeline, trace: Arrays, item_id: int, position: int, retrieved: Place) -> str:
    """Return a sentence that explains why `retrieve` did not propose an item."""
    from serving.stages.live.users.live_users import SeenSince

    if why_not := explain_unservable(pipeline, position):
        return why_not
    retrieve = pipeline.stages["retrieve"]
    if item_id in trace["exclude"][0]:
        return "The request excludes it."
    outputs, history = retrieve.outputs, retrieve.items.find_positions(trace["history_ids"])
    since = outputs.live.read(trace["user_id"][:, 0])[0] if outputs.live and outputs.filter_seen else SeenSince.make_empty(1)
    if (
        position
        in outputs.collect_blocked(trace | {"exclude": np.full_like(trace["exclude"], PAD_ID)}, history, since).positions
    ):
        return "The user has seen it already."
    n_new = np.count_nonzero(trace["candidate_sources"][0] & Sources.NEW_ITEMS)
    if position >= len(retrieve.items.ids):
        return f"It is not among the {n_new} new items that are candidates: the latest ones, and those with the best scores."
    n_pinned = np.count_nonzero(np.isin(trace["candidate_ids"][0], outputs.rules.named.pinned))
    others = [f"{count} {kind}" for count, kind in ((n_new, "new"), (n_pinned, "pinned")) if count]
    but_others = f", except those of {' and '.join(others)} items, which have places of their own" if others else ""
    return f"It is not among the {retrieved.of} candidates: their retrieval scores are higher{but_others}."


def explain_unservable(pipeline: Pipeline, position: int) -> str | None:
    """Return a sentence that explains why no request can get an item, None if some can. position: of the item"""
    retrieve = pipeline.stages["retrieve"]
    if position >= retrieve.items.n_items:
        unknown = f"Generation {pipeline.info.generation} does not know the item"
        if retrieve.items.n_free:
            return f"{unknown}; an upsert, or the next export, adds it."
        return f"{unknown} and has no row left for a new one ([live] new_items); after an upsert, the next export adds it."
    if not retrieve.search.available[position]:
        return "It is unavailable."
    return None if retrieve.search.servable[position] else "A rule drops it: blocked_items."
