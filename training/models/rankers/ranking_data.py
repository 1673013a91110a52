"""Training data of the ranker and the re-ranker: requests as they would have been served, with later positives as labels.

    train ──split by time──▶ earlier │ later
    earlier ─▶ retriever, item statistics, user states ─▶ candidates and their features
    later   ─▶ labels of the candidates

Features never use the events to predict, which avoids leakage; the served artifacts are fitted again on all of train.

With live events, a request is answered when its user comes back: ages and declared aggregations are of that second, popularity
and the other item statistics of the split. A repository that gets no events knows no later time than its export's:
`without_events` makes such requests, and the feature LIVE tells the ranker which of the two it reads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import pandas as pd

from serving.contract.tensors import PAD_ROW
from serving.stages.features.encode import Ragged
from serving.stages.features.item_statistics import ItemStatistics
from serving.stages.features.ranking import LIVE, N_FEATURES, TOGETHER, compute_cross_features, scale_strengths
from training.dataset import Dataset
from training.dataset.repeats import find_repeats
from training.features.aggregates import AFTER_ALL, LogAggregates, read_aggregations
from training.features.build import Examples, Features, take_context
from training.features.items import ItemArrays
from training.models.rankers.item_statistics import Sales, StatisticsSettings, fit_statistics
from training.models.rankers.live_pairs import put_live_pairs

Retrieve = Callable[[Examples, np.ndarray], tuple[np.ndarray, np.ndarray]]
"""(examples of N users, user_ids int64 [N]) -> (int [N, C] positions, best first, n_items pads; float32 [N, C] scores)."""

USERS_PER_BLOCK = 512
PAIRLESS_SHARE = 0.5  # of the requests in a visit: as just after an export, when no live pair is counted yet


@dataclass(frozen=True)
class ItemLists:
    """Lists of table rows, one per item, that read like an array int64 [n, L] padded with PAD_ROW.

    What is read is padded to the longest of these lists only: one item with a long list would widen the rows of all items.
    values: int64 [V + 1], one list after another and PAD_ROW; starts, ends: int64 [n]
    """

    values: np.ndarray
    starts: np.ndarray
    ends: np.ndarray

    @classmethod
    def of(cls, lists: Ragged) -> ItemLists:
        return cls(np.append(lists.values, PAD_ROW).astype(np.int64), lists.offsets[:-1], lists.offsets[1:])

    @cached_property
    def shape(self) -> tuple[int, int]:
        return len(self.starts), find_longest(self.starts, self.ends)

    def __getitem__(self, items: np.ndarray | slice) -> np.ndarray:
        """Return the padded lists of items, int64 [..., longest]. items: int64 [...], or a range of them"""
        starts, ends = self.starts[items], self.ends[items]
        places = starts[..., None] + np.arange(find_longest(starts, ends))
        return self.values[np.where(places < ends[..., None], places, len(self.values) - 1)]


def find_longest(starts: np.ndarray, ends: np.ndarray) -> int:
    """Return the length of the longest list, at least 1."""
    return max(int((ends - starts).max(initial=0)), 1)


@dataclass(frozen=True)
class ItemSlots:
    """The catalogue of an export as DLRM reads it; the last row is the padding row.

    names: of the tables, in slot order; rows: one int64 [n_items + 1, L] per slot (L = 1), or ItemLists
    numbers: float32 [n_items + 1, Gi]; aggregates: float32 [n_items + 1, A], those of the log up to the export
    """

    names: tuple[str, ...]
    rows: tuple[np.ndarray | ItemLists, ...]
    numbers: np.ndarray
    aggregates: np.ndarray

    @property
    def n_items(self) -> int:
        return len(self.numbers) - 1

    @classmethod
    def of(cls, arrays: ItemArrays, names: tuple[str, ...], aggregates: np.ndarray) -> ItemSlots:
        """Build it from the encoded catalogue. names: the columns of `arrays.categorical`, then its lists."""
        single = [arrays.categorical[:, [slot]] for slot in range(arrays.categorical.shape[1])]
        lists = [ItemLists.of(ragged) for ragged in arrays.lists.values()]
        return cls(names, (*single, *lists), arrays.continuous, aggregates)


@dataclass(frozen=True)
class Requests:
    """N requests as the rank stage sees them, with labels.

    users: the Examples of the N users; candidates int32 [N, C] positions, padded with n_items; retrieval_scores float32 [N, C]
    cross: float32 [N, C, A + P + X] aggregations of the candidates at that moment, and of the users within the categories of
    these, then `compute_cross_features`
    taken: labels, bool [N, C], or float32 shares of a teacher
    items: the catalogue of the latest export; user_ids: int64 [N]
    eventless: the same requests, answered without live events; None where they are not known
    """

    users: Examples
    candidates: np.ndarray
    retrieval_scores: np.ndarray
    cross: np.ndarray
    taken: np.ndarray
    items: ItemSlots
    user_ids: np.ndarray
    eventless: Requests | None = None

    @property
    def valid(self) -> np.ndarray:
        """Candidates that are not padding, bool [N, C]."""
        return self.candidates < self.items.n_items

    def __len__(self) -> int:
        return len(self.candidates)

    def take(self, rows: np.ndarray) -> Requests:
        return Requests(
            Examples(*(values[rows] for values in self.users)),
            self.candidates[rows],
            self.retrieval_scores[rows],
            self.cross[rows],
            self.taken[rows],
            self.items,
            self.user_ids[rows],
            None if self.eventless is None else self.eventless.take(rows),
        )

    def without_events(self, chosen: np.ndarray) -> Requests:
        """Replace the chosen requests by those that are answered without live events. chosen: bool [N]"""
        assert self.eventless is not None, "requests in the middle of a visit are not known without events"

        def choose(value: np.ndarray, other_value: np.ndarray) -> np.ndarray:
            return np.where(chosen.reshape(-1, *[1] * (value.ndim - 1)), other_value, value)

        other = self.eventless
        return Requests(
            Examples(*map(choose, self.users, other.users)),
            choose(self.candidates, other.candidates),
            choose(self.retrieval_scores, other.retrieval_scores),
            choose(self.cross, other.cross),
            choose(self.taken, other.taken),
            self.items,
            self.user_ids,
        )


def make_items_before(dataset: Dataset, features: Features, events: pd.DataFrame) -> ItemSlots:
    """Return the catalogue with the sales and aggregations of `events` alone, seen from the last of them."""
    log = LogAggregates.of(dataset, events, read_aggregations(dataset))
    aggregates = log.compute_for_catalogue(int(events["timestamp"].max()))
    return ItemSlots.of(features.encode_items_before(dataset.items, events), tuple(features.item_rows), aggregates)


def make_served_items(features: Features) -> ItemSlots:
    """Return the catalogue as it is served after the training log."""
    return ItemSlots.of(features.item_arrays, tuple(features.item_rows), features.item_aggregates)


def fit_item_statistics(features: Features, events: pd.DataFrame, settings: StatisticsSettings) -> ItemStatistics:
    """Fit the ranker's item statistics on the training log or an earlier part of it, seen from its last event."""
    clock_s = int(events["timestamp"].max())
    groups = np.stack([features.categories.codes, features.providers.codes], axis=1)
    return fit_statistics(collect_sales(features, events), features.items.n_items, clock_s, groups, settings)


def collect_sales(features: Features, events: pd.DataFrame) -> Sales:
    """Return the positive events, their users numbered from 0."""
    positives = events[events["positive"].to_numpy()]
    _, users = np.unique(positives["user_id"].to_numpy(), return_inverse=True)
    return Sales.of(users, features.items.find_positions(positives["item_id"].to_numpy()), positives["timestamp"].to_numpy())


def make_requests(
    features: Features,
    train: pd.DataFrame,
    later: pd.DataFrame,
    items: ItemSlots,
    statistics: ItemStatistics,
    retrieve: Retrieve,
    clock_s: int,
    max_requests: int,
    rng: np.random.Generator,
) -> Requests:
    """Return one request per user (at most `max_requests`, sampled) just before their first event of `later`, with live events.

    train: the frame `features` was built from; later: its rows after the split, with their row number in `train` as "row"
    items, statistics, retrieve: fitted on what came before `later`
    clock_s: the export's; without events, a server counts ages to it, however late a user comes back
    """
    first = later.drop_duplicates("user_id")
    takers = later.loc[later["positive"].to_numpy(), "user_id"].unique()
    first = first[first["user_id"].isin(takers).to_numpy()]
    if len(first) > max_requests:
        first = first.iloc[np.sort(rng.choice(len(first), max_requests, replace=False))]
    rows, times_s, user_ids = (first[name].to_numpy() for name in ("row", "timestamp", "user_id"))
    aggregates, moments = features.log.aggregates, features.log.find_moments_before_rows(train, rows)
    context = take_context(first, features.context)

    def answer(clocks: np.ndarray, is_live: bool) -> Requests:
        users = features.encode_moments(moments, clocks, context)
        candidates, scores = retrieve(users, user_ids)
        trends = aggregates.compute_for_items(candidates, times_s, rows) if is_live else items.aggregates[candidates]
        pairs = aggregates.compute_for_pairs(user_ids, candidates, clocks, rows)
        cross = np.concatenate([trends, pairs, compute_in_blocks(statistics, users, candidates, scores)], axis=2)
        cross[..., LIVE - N_FEATURES] = (candidates < items.n_items) & is_live
        labels = find_taken(features, later, user_ids, candidates)
        return Requests(users, candidates.astype(np.int32), scores, cross, labels, items, user_ids)

    return replace(answer(times_s, True), eventless=answer(np.full(len(rows), clock_s), False))


def make_visit_requests(
    features: Features,
    train: pd.DataFrame,
    later: pd.DataFrame,
    items: ItemSlots,
    statistics: ItemStatistics,
    retrieve: Retrieve,
    max_requests: int,
    rng: np.random.Generator,
    filter_seen: bool = True,
) -> Requests | None:
    """Return requests just before events of `later`, of users with a past, each labelled with the item of its event alone.

    Live requests come in the middle of a visit, seconds after the user's last event; requests before a visit do not cover them.
    Labels are items that the user has not taken before (with `filter_seen`), at most `max_requests`, sampled; None without any.
    In all but PAIRLESS_SHARE of them, what was taken together in `later` before a request counts as live. Other arguments as
    of `make_requests`.
    """
    rows = later["row"].to_numpy()[later["positive"].to_numpy()]
    rows = rows[has_past(train)[rows]]
    if filter_seen:
        rows = rows[~find_repeats(train)[rows]]
    if len(rows) > max_requests:
        rows = np.sort(rng.choice(rows, max_requests, replace=False))
    if not len(rows):
        return None
    events, moments = train.iloc[rows], features.log.find_moments_before_rows(train, rows)
    times, item_ids, user_ids = (events[name].to_numpy() for name in ("timestamp", "item_id", "user_id"))
    users = features.encode_moments(moments, times, take_context(events, features.context))
    retrieved = [np.array(values) for values in retrieve(users, user_ids)]
    candidates, scores = (values.copy() for values in retrieved)
    history = users.history_positions.astype(np.int64)
    strengths = put_live_pairs(features.items, train, later, rows, history, candidates, scores)
    pairless = rng.random(len(rows)) < PAIRLESS_SHARE
    candidates[pairless], scores[pairless], strengths[pairless] = (
        values[pairless] for values in (*retrieved, np.zeros_like(strengths))
    )
    trends = features.log.aggregates.compute_for_items(candidates, times, rows)
    pairs = features.log.aggregates.compute_for_pairs(user_ids, candidates, times, rows)
    cross = np.concatenate([trends, pairs, compute_in_blocks(statistics, users, candidates, scores)], axis=2)
    cross[..., TOGETHER - N_FEATURES] = scale_strengths(strengths)
    cross[..., LIVE - N_FEATURES] = candidates < items.n_items
    labels = candidates == features.items.find_positions(item_ids)[:, None]
    return Requests(users, candidates.astype(np.int32), scores, cross, labels, items, user_ids)


def has_past(log: pd.DataFrame) -> np.ndarray:
    """Return whether the user of each event has an earlier one, bool [N]. log: sorted by time"""
    return log["user_id"].duplicated().to_numpy()


def make_served_requests(
    features: Features,
    user_ids: np.ndarray,
    statistics: ItemStatistics,
    retrieve: Retrieve,
    context: dict[str, np.ndarray] | None = None,
) -> Requests:
    """Return unlabelled requests of users, int64 [N], as the store serves them after the training log.

    statistics, retrieve: fitted on the whole training log; context: as from `take_context`, None for none
    """
    users = features.encode_users(user_ids, context)
    candidates, scores = retrieve(users, user_ids)
    items = make_served_items(features)
    aggregates, count = features.log.aggregates, len(user_ids)
    end = np.full(count, features.as_of_s), np.full(count, AFTER_ALL)
    pairs = aggregates.compute_for_pairs(user_ids, candidates, *end)
    trends = items.aggregates[candidates]
    cross = np.concatenate([trends, pairs, compute_in_blocks(statistics, users, candidates, scores)], axis=2)
    return Requests(users, candidates.astype(np.int32), scores, cross, np.zeros(candidates.shape, bool), items, user_ids)


def make_unlabelled_requests(
    features: Features,
    events: pd.DataFrame,
    statistics: ItemStatistics,
    retrieve: Retrieve,
    max_requests: int,
    rng: np.random.Generator,
) -> Requests:
    """Return `make_served_requests` of users of `events` (at most `max_requests`, sampled), in their latest context."""
    last = events.drop_duplicates("user_id", keep="last")
    if len(last) > max_requests:
        last = last.iloc[np.sort(rng.choice(len(last), max_requests, replace=False))]
    user_ids, context = last["user_id"].to_numpy(), take_context(last, features.context)
    return make_served_requests(features, user_ids, statistics, retrieve, context)


def compute_in_blocks(statistics: ItemStatistics, users: Examples, candidates: np.ndarray, scores: np.ndarray) -> np.ndarray:
    """Compute `compute_cross_features` of many users, in blocks."""
    blocks = [slice(start, start + USERS_PER_BLOCK) for start in range(0, len(candidates), USERS_PER_BLOCK)]
    return np.concatenate(
        [
            compute_cross_features(statistics, users.history_positions[b], users.history_age_days[b], candidates[b], scores[b])
            for b in blocks
        ]
    )


def find_taken(features: Features, later: pd.DataFrame, user_ids: np.ndarray, candidates: np.ndarray) -> np.ndarray:
    """Return labels, bool [N, C]: whether `later` has a positive of the user with the candidate.

    user_ids: int64 [N] distinct.
    """
    positives = later[later["positive"].to_numpy()]
    order = np.argsort(user_ids)
    place = np.searchsorted(user_ids, positives["user_id"].to_numpy(), sorter=order)
    row = order[np.minimum(place, len(order) - 1)]
    is_known = user_ids[row] == positives["user_id"].to_numpy()
    width = features.items.n_items + 1
    pairs = (row * width + features.items.find_positions(positives["item_id"].to_numpy()))[is_known]
    candidate_codes = np.arange(len(user_ids))[:, None] * width + candidates
    return np.isin(candidate_codes, pairs) & (candidates < width - 1)
