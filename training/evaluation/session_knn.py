"""V-SKNN, the session-based nearest-neighbour baseline, which predicts each event from everything before it.

    the user's last items, newest weighing most ─▶ earlier visits that share items ─▶ other items of those visits

It needs no training and uses every event at once, which makes it hard to beat on logs with sessions. Ludewig and Jannach,
"Evaluation of session-based recommendation algorithms" (2018), describe the method. Choose one of VARIANTS, or POPULAR, on an
earlier part of the log: where visits tell little, popular items are the better list.
"""

from __future__ import annotations

from itertools import product
from typing import NamedTuple

import numpy as np

from serving.loops.compiled import compiled


class KnnSettings(NamedTuple):
    """own_items: how many of the user's newest items are used; latest: how many of an item's newest events are used

    neighbours: visits whose items are recommended; normalise: divide a similarity by the root of the visit's length so far
    idf: weigh rare items more
    """

    own_items: int = 20
    latest: int = 250
    neighbours: int = 200
    normalise: bool = False
    idf: bool = False


VARIANTS = tuple(
    KnnSettings(own_items=own_items, neighbours=neighbours, normalise=normalise, idf=idf)
    for own_items, neighbours, normalise, idf in product((1, 3, 20), (20, 100, 500), (False, True), (False, True))
)
POPULAR = KnnSettings(neighbours=0)  # without neighbours, every list is one of popular items


class Visits(NamedTuple):
    """A log in time order for the loops: int64 [E] each, numbered from 0.

    users, items (positions), visits: of each event; an event that is not positive has visit -1
    """

    users: np.ndarray
    items: np.ndarray
    visits: np.ndarray

    @classmethod
    def of(cls, users: np.ndarray, items: np.ndarray, times_s: np.ndarray, positive: np.ndarray, gap_s: float) -> Visits:
        """Split the log into visits: a pause of a user longer than `gap_s` begins a new one."""
        _, users = np.unique(users, return_inverse=True)
        rows = np.flatnonzero(positive)
        order = rows[np.lexsort((rows, users[rows]))]
        starts = np.ones(len(order), bool)
        starts[1:] = (users[order[1:]] != users[order[:-1]]) | (np.diff(times_s[order]) > gap_s)
        visits = np.full(len(users), -1)
        visits[order] = np.cumsum(starts) - 1
        return cls(users, items, visits)


def answer_events(visits: Visits, queries: np.ndarray, n_items: int, settings: KnnSettings, n_answers: int = 20) -> np.ndarray:
    """Return the predicted items of each query, int64 [Q, n_answers] positions, best first, padded with n_items.

    queries: int64 [Q] rows of the events to predict, ascending. Items that the user has seen are excluded; short lists are
    filled by the popularity before the first query.
    """
    learned = visits.visits >= 0
    before = np.zeros(len(learned), bool)
    before[: queries[0] if len(queries) else 0] = True
    popular = np.argsort(-np.bincount(visits.items[learned & before], minlength=n_items), kind="stable")
    rows = np.flatnonzero(learned)
    answers = np.full((len(queries), n_answers), n_items)
    by_item, by_visit = _group(visits.items, rows, n_items), _group(visits.visits, rows, int(visits.visits.max()) + 1)
    by_user = _group(visits.users, np.arange(len(learned)), int(visits.users.max()) + 1)
    _answer(visits, queries, by_item, by_visit, by_user, popular, settings, answers)
    return answers


class Grouped(NamedTuple):
    """Rows of a log by a key: those of key k are rows[starts[k] : starts[k + 1]], ascending.

    rows: int64 [N]; starts: int64 [n_keys + 1]
    """

    rows: np.ndarray
    starts: np.ndarray


class Workspace(NamedTuple):
    """Arrays that every query uses again.

    similarity: float64 [n_visits], of each visit to the user's items
    place_of: float64 [n_visits], the place in latest_items of the newest item that the visit has too
    scores: float64 [n_items]; seen_by: int64 [n_items], the last query whose user had seen this item
    latest_items: int64 [own_items], the user's newest items, newest first
    """

    similarity: np.ndarray
    place_of: np.ndarray
    scores: np.ndarray
    seen_by: np.ndarray
    latest_items: np.ndarray


def _group(keys: np.ndarray, rows: np.ndarray, n_keys: int) -> Grouped:
    """Group rows by their key."""
    order = rows[np.argsort(keys[rows], kind="stable")]
    return Grouped(order, np.searchsorted(keys[order], np.arange(n_keys + 1)))


@compiled
def _answer(log, queries, by_item, by_visit, by_user, popular, settings, answers):
    """Fill `answers`, going through the log once. log: Visits; by_item, by_visit, by_user: Grouped"""
    n_items, n_visits = len(by_item.starts) - 1, len(by_visit.starts) - 1
    n_of_item, n_of_user = np.zeros(n_items, np.int64), np.zeros(len(by_user.starts) - 1, np.int64)  # events so far
    work = Workspace(
        np.zeros(n_visits),
        np.zeros(n_visits),
        np.zeros(n_items),
        np.full(n_items, -1),
        np.empty(settings.own_items, np.int64),
    )
    query = 0
    for event in range(len(log.users)):
        user = log.users[event]
        if query < len(queries) and queries[query] == event:
            n_latest = _take_latest(log, query, user, n_of_user[user], by_user, work)
            neighbours = _find_neighbours(log, event, n_latest, n_of_item, by_item, settings, work)
            candidates = _score_items(log, query, event, neighbours, n_of_item, by_visit, settings, work)
            _write_answer(answers[query], query, candidates, popular, work)
            for visit in neighbours:
                work.similarity[visit] = 0.0
            for item in candidates:
                work.scores[item] = 0.0
            query += 1
        n_of_user[user] += 1
        if log.visits[event] >= 0:
            n_of_item[log.items[event]] += 1


@compiled
def _take_latest(log, query, user, n_events, by_user, work):
    """Put the user's newest items into the workspace, and mark all as seen. Return how many are used."""
    n_latest = 0
    for place in range(n_events - 1, -1, -1):
        earlier = by_user.rows[by_user.starts[user] + place]
        item = log.items[earlier]
        if n_latest < len(work.latest_items) and log.visits[earlier] >= 0 and work.seen_by[item] != query:
            work.latest_items[n_latest] = item
            n_latest += 1
        work.seen_by[item] = query
    return n_latest


@compiled
def _find_neighbours(log, event, n_latest, n_of_item, by_item, settings, work):
    """Return the visits that share items with the user, and add up their similarity; newer items weigh more."""
    neighbours = [np.int64(0) for _ in range(0)]
    for place in range(n_latest):
        item = work.latest_items[place]
        first = max(0, n_of_item[item] - settings.latest)
        for other in by_item.rows[by_item.starts[item] + first : by_item.starts[item] + n_of_item[item]]:
            visit = log.visits[other]
            if visit == log.visits[event]:
                continue
            if work.similarity[visit] == 0:
                neighbours.append(visit)
                work.place_of[visit] = place
            work.similarity[visit] += (n_latest - place) / n_latest
    return neighbours


@compiled
def _score_items(log, query, event, neighbours, n_of_item, by_visit, settings, work):
    """Return the unseen items of the most similar visits, and add up their scores."""
    strengths = np.empty(len(neighbours))
    for index, visit in enumerate(neighbours):
        strengths[index] = work.similarity[visit]
        if settings.normalise:
            rows = by_visit.rows[by_visit.starts[visit] : by_visit.starts[visit + 1]]
            strengths[index] /= np.sqrt(np.searchsorted(rows, event))
    candidates = [np.int64(0) for _ in range(0)]
    for index in np.argsort(-strengths)[: settings.neighbours]:
        visit = neighbours[index]
        for other in by_visit.rows[by_visit.starts[visit] : by_visit.starts[visit + 1]]:
            item = log.items[other]
            if other >= event:
                break
            if work.seen_by[item] == query:
                continue
            if work.scores[item] == 0:
                candidates.append(item)
            rarity = np.log(event / n_of_item[item]) if settings.idf else 1.0
            work.scores[item] += strengths[index] / (1.0 + work.place_of[visit]) * rarity
    return candidates


@compiled
def _write_answer(answer, query, candidates, popular, work):
    """Fill one answer with the best candidates, then with popular items that the user has not seen."""
    totals = np.empty(len(candidates))
    for index, item in enumerate(candidates):
        totals[index] = work.scores[item]
    filled = 0
    for index in np.argsort(-totals)[: len(answer)]:
        answer[filled] = candidates[index]
        work.seen_by[candidates[index]] = query
        filled += 1
    for item in popular:
        if filled == len(answer):
            break
        if work.seen_by[item] != query:
            answer[filled] = item
            filled += 1
