"""The shop as the gateway knows it: the generation that answers, the live store, and how ids are written."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from gateway.followed_rules import FollowedRules
from gateway.metrics import Metrics
from gateway.published import LiveItems, Published
from repository.generations import list_published_generations
from serving.contract.errors import DependencyError, RecommenderError
from serving.contract.generations import read_pinned_generation
from serving.live.opening import open_reader
from triton_recommender import Catalogue, InvalidRequest
from triton_recommender import RecommenderError as ClientError

log = logging.getLogger("gateway")

REREAD_S = 10.0  # pause before a generation that could not be read is tried again


class Shop:
    """Names, titles and popular items of the generation that answers. They change when another generation answers."""

    def __init__(self, repo: Path, metrics: Metrics) -> None:
        """Load the pinned generation, or another one where that is damaged. Raises ArtifactError or CatalogueError."""
        self.repo, self._metrics = repo, metrics
        self._moving: asyncio.Task[None] | None = None
        self._learning: asyncio.Task[None] | None = None
        self._failed_s: dict[int, float] = {}  # generation -> when it could not be read
        self._challenger = Catalogue()  # of the latest challenger; empty before the first one
        first = load_first(repo)
        self.reader = open_reader(repo, first.info)
        self._asks_redis = bool(first.info.live_redis)
        self._use(first, LiveItems(self.reader, first))

    async def move_to(self, generation: int, within_s: float) -> None:
        """Use names and popular items of another generation. Keep the present ones if it cannot be read.

        Reading that takes longer than `within_s` goes on in the background, and the present names are used meanwhile.
        """
        if generation in (0, self.published.generation) or self._failed_lately(generation):
            return
        if self._moving is None or self._moving.done():
            self._moving = asyncio.create_task(self._load(generation))
        await asyncio.wait((self._moving,), timeout=max(within_s, 0.0))

    async def learn_names(self, challenger: int, within_s: float) -> None:
        """Read the names of a challenger's items, some of which the generation that answers may lack.

        Reading that takes longer than `within_s` goes on in the background. Until it ends, items that only the challenger has
        are shown without text id and title.
        """
        if challenger in (self.published.generation, self._challenger.generation) or self._failed_lately(challenger):
            return
        if self._learning is None or self._learning.done():
            self._learning = asyncio.create_task(self._learn(challenger))
        await asyncio.wait((self._learning,), timeout=max(within_s, 0.0))

    def forget_names(self, challenger: int) -> None:
        """Forget the items that only a challenger has: they are unknown again."""
        if challenger == self._challenger.generation:
            self._challenger = Catalogue()

    async def _learn(self, challenger: int) -> None:
        try:
            self._challenger = await asyncio.to_thread(Catalogue.load, self.repo, challenger)
        except Exception as error:  # every error: most items have names from the generation that answers
            self._failed_s[challenger] = time.monotonic()
            log.warning(
                "items that only generation %d has stay without names: %s",
                challenger,
                error,
                exc_info=not isinstance(error, ClientError),
            )

    def _failed_lately(self, generation: int) -> bool:
        return time.monotonic() - self._failed_s.get(generation, float("-inf")) < REREAD_S

    async def _load(self, generation: int) -> None:
        try:
            self._use(*await asyncio.to_thread(self._read, generation))
        except Exception as error:  # every error: names of the previous generation are better than no answer
            self._failed_s[generation] = time.monotonic()
            expected = isinstance(error, RecommenderError | ClientError)
            log.warning(
                "titles and popular items stay those of generation %d: %s",
                self.published.generation,
                error,
                exc_info=not expected,
            )

    def _read(self, generation: int) -> tuple[Published, LiveItems]:
        """Return a generation, and the items that `upsert` changed.

        These are read from the beginning, because some of what was read before may have been forgotten since.
        """
        published = Published.load(self.repo, generation)
        live_items = LiveItems(self.reader, published)
        try:
            live_items.refresh()
        except RecommenderError:
            live_items = self.live_items
        return published, live_items

    def refresh(self) -> None:
        """Read what `upsert` changed; keep the present titles where the store cannot be read."""
        try:
            self.live_items.refresh()
        except Exception as error:  # every error: old titles are better than no answer
            log.warning("titles may be old: %s", error, exc_info=not isinstance(error, DependencyError))

    def parse_user_id(self, user: str) -> int:
        """Return the id on the wire for a user id as the shop writes it. Raises InvalidRequest."""
        return _require_number("user", self.published.catalogue.user_id(user))

    def parse_item_id(self, item: str) -> int:
        """Return the id on the wire for an item id as the shop writes it. Raises InvalidRequest."""
        return _require_number("item", self.published.catalogue.item_id(item))

    def find_known(self, user_ids: Sequence[int]) -> set[int]:
        """Return which ids of one visitor have events, in the exported log or in live state that machines may share.

        If the exported log knows one of the ids, live state is not read. Waits for Redis no longer than an answer does
        (redis_state.py).
        """
        known_ids = set(filter(self.published.knows_user, user_ids))
        if known_ids or not user_ids or not self.reader.exists():
            return known_ids
        try:
            with self.reader.users.snapshot() as snapshot:
                return {user_ids[row] for row in snapshot.read_users(np.array(user_ids, np.int64))[0]}
        except RecommenderError:
            return set()

    async def find_known_async(self, user_ids: Sequence[int]) -> set[int]:
        """Return what `find_known` returns. If Redis must be asked, other requests go on meanwhile."""
        if not self._asks_redis or not user_ids or any(map(self.published.knows_user, user_ids)):
            return self.find_known(user_ids)
        return await asyncio.to_thread(self.find_known, user_ids)

    def find_unknown_items(self, item_ids: set[int]) -> set[int]:
        """Return the items that no answering generation has in its catalogue, and that were not added since the export."""
        unknown = {item_id for item_id in item_ids - self._challenger.item_ids if self.published.find_position(item_id) is None}
        if unknown:
            self.refresh()
        return unknown - self.live_items.ids

    def find_items_without_row(self, item_ids: set[int]) -> set[int]:
        """Return the new items for which no row is left in an answering generation: it cannot recommend them."""
        new = {item_id for item_id in item_ids - self._challenger.item_ids if self.published.find_position(item_id) is None}
        if new:
            self.refresh()
        return new - self.live_items.with_row if self.live_items.is_full else set()

    def list_items(self, item_ids: Sequence[int], scores: Sequence[float | None]) -> list[dict[str, Any]]:
        """Return items with their scores as answers list them."""
        return [
            {"id": self._find_name(item_id) or item_id, "title": self._find_title(item_id), "score": score}
            for item_id, score in zip(item_ids, scores, strict=True)
        ]

    def _find_name(self, item_id: int) -> str | None:
        catalogue = self.published.catalogue
        return catalogue.item_name(item_id) or self.live_items.names.get(item_id) or self._challenger.item_name(item_id)

    def _find_title(self, item_id: int) -> str | None:
        changed, titles = self.live_items.titles, self.published.catalogue.titles
        return changed[item_id] if item_id in changed else titles.get(item_id) or self._challenger.titles.get(item_id)

    def describe_user_id(self, text: str) -> int | str:
        """Return a user's id as answers name it. text: the id as the caller wrote it"""
        return text if self.published.catalogue.user_names else self.parse_user_id(text)

    def describe_item(self, item_id: int, text: str | None = None) -> dict[str, Any]:
        """Return an item as answers name it: the shop's own id, and the title. text: the id as the caller wrote it"""
        name = self._find_name(item_id) or (text if self.published.catalogue.item_names else None)
        return {"id": name or item_id, "title": self._find_title(item_id)}

    def pick_popular(
        self,
        exclude: set[int],
        context: Mapping[str, str],
        count: int,
        category: str | None = None,
        among: Sequence[int] | None = None,
    ) -> list[int]:
        """Return the popular items that may be shown in a context, best first.

        With a category, or items to choose from, the context does not count.
        """
        self.refresh()  # a request that is shed has read nothing before
        hidden = (exclude, *self.list_hidden())
        popular: Iterable[int]
        if among is not None:
            popular = self._list_among(among, category)
        elif category is None:
            popular = self.published.list_popular(context)
        else:
            popular = self._drop_moved(self.published.categories.list_popular(category), category)
        return list(islice((item_id for item_id in popular if not any(item_id in ids for ids in hidden)), count))

    def find_category(self, item_id: int) -> str | None:
        """Return the category of an item: the one that `upsert` named last, otherwise the exported one."""
        if item_id in self.live_items.categories:
            return self.live_items.categories[item_id]
        position = self.published.find_position(item_id)
        return None if position is None else self.published.categories.find_name(position)

    def list_blocked(self) -> frozenset[int]:
        """Return the ids of the items that the rules block."""
        return self._rules.list_blocked()

    def has_category(self, name: str) -> bool:
        """Return whether any item has a category."""
        members = self.published.categories.list_items(name)
        return name in self.live_items.categories.values() or any(True for _ in self._drop_moved(members, name))

    def _list_among(self, among: Sequence[int], category: str | None) -> Iterator[int]:
        """Yield those of some items that are of a category: the exported ones, best first, then the new ones.

        category: None for any
        """
        positions, live = {item_id: self.published.find_position(item_id) for item_id in among}, self.live_items
        exported = [position for position in positions.values() if position is not None]
        popular = self.published.categories.sort_popular(exported, category)
        yield from popular if category is None else self._drop_moved(popular, category)
        for item_id, position in positions.items():
            if position is None and item_id in live.ids and category in (None, live.categories.get(item_id)):
                yield item_id

    def _drop_moved(self, item_ids: Iterable[int], category: str) -> Iterator[int]:
        """Yield those of the exported items of a category that have it still."""
        changed = self.live_items.categories
        return (item_id for item_id in item_ids if changed.get(item_id, category) == category)

    def list_hidden(self) -> tuple[Collection[int], ...]:
        """Return sets of items that nobody may be shown: unavailable since the export, and blocked by the rules."""
        return self.live_items.unavailable, self._rules.list_blocked()

    def list_pins(self) -> Collection[tuple[int, int]]:
        """Return (id, slot) pairs of the items that the rules pin, slot 0 at the top. An item may have several ids."""
        return self._rules.list_pins()

    def close(self) -> None:
        """Close the live store."""
        self.reader.close()

    def _use(self, published: Published, live_items: LiveItems) -> None:
        self._rules = FollowedRules(self.reader.folder, published)
        self.published, self.live_items = published, live_items
        self.forget_names(published.generation)  # a challenger that was promoted
        self._metrics.generation.set(published.generation)


def load_first(repo: Path) -> Published:
    """Load the pinned generation, or else the newest other one that can be read: the server, too, starts with another one.

    If none can be read, raises the error of the pinned one.
    """
    pinned = read_pinned_generation(repo)
    try:
        return Published.load(repo, pinned)
    except Exception as error:  # every error, as in `_load`
        for other in sorted(set(list_published_generations(repo)) - {pinned}, reverse=True):
            with contextlib.suppress(Exception):
                published = Published.load(repo, other)
                log.warning("names and popular items are those of generation %d until a server answers: %s", other, error)
                return published
        raise


def _require_number(name: str, value: int | str | None) -> int:
    if not isinstance(value, int) or not -(1 << 63) <= value < 1 << 63:
        raise InvalidRequest(f"{name} is {value!r}; this shop's ids are whole numbers of 64 bits. Correct the id.")
    return value
