"""A shop whose users have tastes that nobody is told: what they take is all that a recommender can learn from."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from training.dataset import Dataset, load_dataset

N_KINDS, WIDTH = 20, 8
KINDS_LIKED, OWN_TASTE, OWN_STYLE = 2, 0.3, 0.5  # of a user; spread of users around them, of items around their kind
STEEPNESS, LIKED_SHARE, MOST_TAKEN = 4.0, 0.05, 0.25  # chance to take an item: of the best, and at LIKED_SHARE half of that
LOOKED_AT, PATIENCE = 30, 0.85  # items on a shelf; chance to look at the next place of a list
TASTE_DAYS = 30.0  # that a user keeps a taste, on average
DAY_S = 86_400
TOML = """
name = "simulated"
[interactions]
path = "events.csv"
user_id = "user"
item_id = "item"
timestamp = "time"
[items]
path = "items.csv"
item_id = "item"
title = "title"
categorical = ["kind"]
category = "kind"
"""


class World:
    """Users 1 … U and items 1 … I. takes: float64 [U, I], the chance that a user who looks at an item takes it."""

    def __init__(self, n_users: int, n_items: int, rng: np.random.Generator) -> None:
        self._rng = rng
        self._centres = rng.normal(size=(N_KINDS, WIDTH))
        self.kinds = rng.integers(N_KINDS, size=n_items)
        self._items = self._centres[self.kinds] + OWN_STYLE * rng.normal(size=(n_items, WIDTH))
        self._tastes = self._draw_tastes(n_users)
        self.takes = self._compute_all_chances()

    def _draw_tastes(self, count: int) -> np.ndarray:
        liked = self._rng.random((count, N_KINDS)).argsort(axis=1)[:, :KINDS_LIKED]
        weights = self._rng.dirichlet(np.full(KINDS_LIKED, 3.0), count)
        return (self._centres[liked] * weights[:, :, None]).sum(1) + OWN_TASTE * self._rng.normal(size=(count, WIDTH))

    def _compute_all_chances(self) -> np.ndarray:
        fit = self._tastes @ self._items.T
        least = np.quantile(fit, 1 - LIKED_SHARE, axis=1, keepdims=True)
        return MOST_TAKEN / (1 + np.exp(-STEEPNESS * (fit - least) / fit.std(axis=1, keepdims=True)))

    @property
    def user_ids(self) -> np.ndarray:
        return np.arange(1, len(self._tastes) + 1)

    def pass_days(self, days: float) -> None:
        """Let some users change their taste by themselves."""
        self.change_tastes(1 - np.exp(-days / TASTE_DAYS))

    def change_tastes(self, share: float) -> None:
        """Give a share of the users another taste."""
        changed = self._rng.random(len(self._tastes)) < share
        self._tastes[changed] = self._draw_tastes(int(changed.sum()))
        self.takes = self._compute_all_chances()

    def pick(self, users: np.ndarray) -> np.ndarray:
        """Return the item, int64 [N], that each user, int64 [N], takes from a shelf of random ones."""
        shelves = self._rng.integers(self.takes.shape[1], size=(len(users), LOOKED_AT))
        chances = self.takes[users[:, None] - 1, shelves]
        places = (chances.cumsum(1) / chances.sum(1, keepdims=True) > self._rng.random((len(users), 1))).argmax(1)
        return shelves[np.arange(len(users)), places] + 1

    def react(self, user: int, items: np.ndarray) -> np.ndarray:
        """Return which items of a list a user takes, bool [K]; lower places are looked at more rarely."""
        return self._rng.random(len(items)) < self.compute_chances(np.array([user]), items[None])[0]

    def compute_chances(self, users: np.ndarray, lists: np.ndarray) -> np.ndarray:
        """Return the chance that each item of each list is looked at and taken: float64 [N, K]. lists: int64 [N, K]"""
        return self.takes[users[:, None] - 1, lists - 1] * PATIENCE ** np.arange(lists.shape[1])

    def measure_quality(self, lists: np.ndarray, had: np.ndarray) -> float:
        """Return how many items users take, over how many they would of the best lists. lists: int64 [U, K], of all users

        had: bool [U, I], items that are not recommended again
        """
        length = lists.shape[1]
        best = np.argsort(np.where(had, -1.0, self.takes), axis=1)[:, ::-1][:, :length] + 1
        users = self.user_ids
        return float(self.compute_chances(users, lists).sum() / self.compute_chances(users, best).sum())

    def write_log(self, folder: Path, events: int, days: int, end_s: int) -> Dataset:
        """Write a log of what users took from shelves in the days before `end_s`, and return it as a data set."""
        folder.mkdir(parents=True)
        rows = ["user,item,time"]
        for begins_s in range(end_s - days * DAY_S, end_s, DAY_S):
            users = self._rng.choice(self.user_ids, events // days)
            times_s = begins_s + np.sort(self._rng.integers(DAY_S, size=len(users)))
            rows += [f"{user},{item},{time}" for user, item, time in zip(users, self.pick(users), times_s, strict=True)]
            self.pass_days(1)
        (folder / "events.csv").write_text("\n".join([*rows, ""]))
        items = [f"{item},kind {kind} number {item},{kind}" for item, kind in enumerate(self.kinds, start=1)]
        (folder / "items.csv").write_text("\n".join(["item,title,kind", *items, ""]))
        (folder / "dataset.toml").write_text(TOML)
        return load_dataset(folder)
