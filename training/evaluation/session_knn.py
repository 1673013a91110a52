"""V-SKNN, the session-based nearest-neighbour baseline, which predicts each event from everything before it.

    the user's last items, newest weighing most ─▶ earlier visits that share items ─▶ other items of those visits

It needs no training and uses every event at once, which makes it hard to beat on logs with sessions. Ludewig and Jannach,
"Evaluation of session-based recommendation algorithms" (2018), describe the method. Choose one of VARIANTS on an earlier part
of the log.
"""

from __future__ import annotations

from itertools import product
from typing import NamedTuple

import numpy as np
from numba import njit


class KnnSettings(NamedTuple):
    """own_items: the user's newest items to use; latest: the newest events to use per item.

    normalise: divide a similarity by the root of the visit's length; idf: weigh rare items more
    """

    own_items: int = 20
    latest: int = 250
    neighbours: int = 200
    normalise: bool = False
    idf: bool = False


VARIANTS = tuple(
    KnnSettings(own_items=own_items, normalise=normalise, idf=idf)
    for own_items, normalise, idf in product((1, 3, 20), (False, True), (False, True))
)


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
    """Return the predicted items of each query, an event, int64 [Q, n_answers] positions, best first, padded with n_items.

    queries: int64 [Q] rows of these events, ascending. Items that the user has seen are excluded; short lists are filled by
    popularity.
    """
    learned = visits.visits >= 0
    before = np.zeros(len(learned), bool)
    before[: queries[0] if len(queries) else 0] = True
    popular = np.argsort(-np.bincount(visits.items[learned & before], minlength=n_items), kind="stable")
    rows = np.flatnonzero(learned)
    answers = np.full((len(queries), n_answers), n_items)
    _answer(
        *visits, queries, *_group(visits.items, rows, n_items), *_group(visits.visits, rows, int(visits.visits.max()) + 1),
        *_group(visits.users, np.arange(len(learned)), int(visits.users.max()) + 1), popular, settings, answers,
    )  # fmt: skip
    return answers


def _group(keys: np.ndarray, rows: np.ndarray, n_keys: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows grouped by key, ascending, and where each key's rows begin, int64 [n_keys + 1]."""
    order = rows[np.argsort(keys[rows], kind="stable")]
    return order, np.searchsorted(keys[order], np.arange(n_keys + 1))


@njit(error_model="numpy")
def _answer(
    users, items, visits, queries, by_item, item_starts, by_visit, visit_starts, by_user, user_starts, popular, settings,
    answers,
):  # fmt: skip
    n_items, n_visits = len(item_starts) - 1, len(visit_starts) - 1
    n_of_item, n_of_user = np.zeros(n_items, np.int64), np.zeros(len(user_starts) - 1, np.int64)  # events that are known
    similarity, place_of, scores = np.zeros(n_visits), np.zeros(n_visits), np.zeros(n_items)
    seen_by = np.full(n_items, -1)  # the last query whose user had seen this item
    latest_items = np.empty(settings.own_items, np.int64)
    query = 0
    for event in range(len(users)):
        user = users[event]
        if query < len(queries) and queries[query] == event:
            n_latest = 0
            for place in range(n_of_user[user] - 1, -1, -1):
                earlier = by_user[user_starts[user] + place]
                if n_latest < len(latest_items) and visits[earlier] >= 0 and seen_by[items[earlier]] != query:
                    latest_items[n_latest] = items[earlier]
                    n_latest += 1
                seen_by[items[earlier]] = query
            neighbours = [np.int64(0) for _ in range(0)]
            for place in range(n_latest):
                item = latest_items[place]
                first = max(0, n_of_item[item] - settings.latest)
                for other in by_item[item_starts[item] + first : item_starts[item] + n_of_item[item]]:
                    visit = visits[other]
                    if visit == visits[event]:
                        continue
                    if similarity[visit] == 0:
                        neighbours.append(visit)
                        place_of[visit] = place
                    similarity[visit] += (n_latest - place) / n_latest
            strengths = np.empty(len(neighbours))
            for index, visit in enumerate(neighbours):
                strengths[index] = similarity[visit]
                if settings.normalise:
                    strengths[index] /= np.sqrt(visit_starts[visit + 1] - visit_starts[visit])
            candidates = [np.int64(0) for _ in range(0)]
            for index in np.argsort(-strengths)[: settings.neighbours]:
                visit = neighbours[index]
                for other in by_visit[visit_starts[visit] : visit_starts[visit + 1]]:
                    item = items[other]
                    if other >= event:
                        break
                    if seen_by[item] == query:
                        continue
                    if scores[item] == 0:
                        candidates.append(item)
                    rarity = np.log(event / n_of_item[item]) if settings.idf else 1.0
                    scores[item] += strengths[index] / (1.0 + place_of[visit]) * rarity
            totals = np.empty(len(candidates))
            for index, item in enumerate(candidates):
                totals[index] = scores[item]
            filled = 0
            for index in np.argsort(-totals)[: answers.shape[1]]:
                answers[query, filled] = candidates[index]
                seen_by[candidates[index]] = query
                filled += 1
            for item in popular:
                if filled == answers.shape[1]:
                    break
                if seen_by[item] != query:
                    answers[query, filled] = item
                    filled += 1
            for visit in neighbours:
                similarity[visit] = 0.0
            for item in candidates:
                scores[item] = 0.0
            query += 1
        n_of_user[user] += 1
        if visits[event] >= 0:
            n_of_item[items[event]] += 1
