"""Read what a gateway needs of a generation and of the live store: titles, popular items, known users, similar items.

<recommend>/<g>/{item_ids.npy, item_titles.json, popular.json, …}      as triton_recommender.Catalogue reads them
<recommend>/<g>/manifest.json                                          what the generation learned from, and its quality
<preprocess>/<g>/store/user_ids.npy                                    int64 [U] ascending
<rerank>/<g>/{rules.json, rules_items.npy}                             the rules that it was exported with
<retrieve>/<g>/{content/, recent_popularity.npy}                       categories of the items, and what sold lately
<retrieve>/<g>/{item_vectors, neighbours, neighbour_weights, available}.npy, mapped, and read on demand
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from serving.contract.artifacts import MANIFEST_FILE, StageInfo, find_stage_folder, open_array, read_json, read_stage
from serving.contract.errors import ArtifactError
from serving.contract.ids import NAME, is_text_of
from serving.contract.tensors import ENSEMBLE, PAD_ID, STAGES, UPSERT
from serving.live.catalogue_times import CatalogueTimes
from serving.live.events import ITEM_CHANGED
from serving.live.reader import Reader
from serving.stages.live.content import NO_GROUP, UNKNOWN_GROUP, Content, get_text
from serving.stages.rules.config import CATEGORY
from serving.stages.rules.stored import StoredRules
from triton_recommender import Catalogue

POPULAR_FILE, POPULAR_BY_CONTEXT_FILE = "popular.json", "popular_by_context.json"
TOGETHER, ALIKE = "bought_together", "similar_vectors"
MOST_SIMILAR = 100  # items of one answer
MOST_NEAR = 256  # enough for MOST_SIMILAR without hidden items and those bought together
MOST_REMEMBERED = 10_000  # answers of MOST_NEAR items: 20 MB
MOST_POPULAR = 200  # of a category, as in POPULAR_FILE
MOST_CATEGORIES = 1_000  # whose popular items are remembered
QUALITY = ("ndcg_at_10", "recall_at_20", "validation_requests")  # of a manifest's report on the ranker


class SimilarItem(NamedTuple):
    """An item like another one. score: weight of being bought together, or cosine of the vectors. source: TOGETHER or ALIKE"""

    item_id: int
    score: float
    source: str


@dataclass(frozen=True)
class Published:
    """The data of one generation that a gateway needs.

    popular: item ids, best first; popular_by_context: column -> value -> item ids
    user_ids: int64 [U] ascending; item_ids: int64 [n_items] ascending, without the rows kept free for new items
    takes_names: whether `upsert` takes the text of an item's id; times: when the catalogue's rows were last changed
    n_free_rows: rows that the export kept free for new items
    """

    info: StageInfo
    catalogue: Catalogue
    popular: tuple[int, ...]
    popular_by_context: Mapping[str, Mapping[str, Sequence[int]]]
    user_ids: np.ndarray
    item_ids: np.ndarray
    rules: StoredRules
    retrieve_folder: Path
    near: NearItems
    categories: Categories
    manifest: Mapping[str, Any]
    takes_names: bool
    times: CatalogueTimes | None
    n_free_rows: int

    @classmethod
    def load(cls, repo: Path, generation: int) -> Published:
        """Read a generation. Raises ArtifactError or CatalogueError."""
        preprocess = find_stage_folder(repo, STAGES[0], generation)
        retrieve = find_stage_folder(repo, STAGES[1], generation)
        path = repo / ENSEMBLE / str(generation) / POPULAR_FILE
        try:
            popular = tuple(map(int, json.loads(path.read_text())))
            by_context = json.loads(path.with_name(POPULAR_BY_CONTEXT_FILE).read_text())
        except (OSError, ValueError, TypeError) as error:
            raise ArtifactError(
                f"{path} cannot be read: {error}. A gateway answers with these items when no server does. "
                "Export the repository again (`make export`)."
            ) from error
        catalogue = Catalogue.load(repo, generation)
        # Copied, because reading a mapped file that was truncated meanwhile would end the process.
        user_ids, item_ids = np.array(open_array(preprocess / "store", "user_ids")), open_array(retrieve, "item_ids")
        n_rows, item_ids = len(item_ids), item_ids[item_ids != PAD_ID]  # without the rows kept free for new items
        manifest = read_json(path.parent, MANIFEST_FILE)
        upsert = repo / UPSERT / str(generation)
        takes_names = upsert.is_dir() and read_stage(upsert).settings["columns"]["item"].get(NAME) == "name"
        rules = StoredRules.load(find_stage_folder(repo, STAGES[3], generation), generation)
        rules = rules._replace(items=np.array(rules.items))
        arrays = (user_ids, item_ids)
        listed = (catalogue, popular, by_context, *arrays, rules)
        times, found = CatalogueTimes.load(retrieve), (NearItems(retrieve), Categories(retrieve, item_ids))
        return cls(read_stage(preprocess), *listed, retrieve, *found, manifest, takes_names, times, n_rows - len(item_ids))

    @property
    def generation(self) -> int:
        return self.info.generation

    def describe(self) -> dict[str, Any]:
        """Return what the generation learned from, and how good it is, as a JSON object (schema.Generation)."""
        ranker = self.manifest.get("reports", {}).get("validation", {}).get("ranker", {})
        return {
            "generation": self.generation,
            "dataset": self.manifest.get("dataset", {}).get("name", ""),
            "log": self.manifest.get("log", {}),
            "quality": {name: ranker[name] for name in QUALITY if name in ranker},
        }

    def list_popular(self, context: Mapping[str, str]) -> Iterable[int]:
        """Return the popular items of the first context value that has a list, then those of the whole shop."""
        lists = (self.popular_by_context.get(column, {}).get(value) for column, value in context.items())
        first = next(filter(None, lists), ())
        return dict.fromkeys((*first, *self.popular)) if first else self.popular

    def knows_user(self, user_id: int) -> bool:
        """Return whether the exported log has events of a user."""
        place = int(np.searchsorted(self.user_ids, user_id))
        return place < len(self.user_ids) and int(self.user_ids[place]) == user_id

    def lacks_name(self, item_id: int) -> bool:
        """Return whether the generation has no text for an item's id, and `upsert` takes one."""
        return self.takes_names and self.catalogue.item_name(item_id) is None

    def find_position(self, item_id: int) -> int | None:
        """Return the position of an item in the catalogue, None for an unknown one."""
        place = int(np.searchsorted(self.item_ids, item_id))
        return place if place < len(self.item_ids) and int(self.item_ids[place]) == item_id else None

    def find_similar_items(self, item_id: int) -> list[SimilarItem]:
        """Return what is bought with an item, strongest first, then the items of the nearest vectors.

        Empty for an item that this generation does not know. Raises ArtifactError.
        """
        position = self.find_position(item_id)
        if position is None:
            return []
        available = open_array(self.retrieve_folder, "available")
        neighbours = open_array(self.retrieve_folder, "neighbours")[position]
        weights = open_array(self.retrieve_folder, "neighbour_weights")[position]
        strongest = [place for place in np.argsort(-weights, kind="stable") if weights[place] > 0]
        links = {int(neighbours[place]): (float(weights[place]), TOGETHER) for place in strongest}
        for other, cosine in zip(*(part.tolist() for part in self.near.find(position)), strict=True):
            links.setdefault(other, (cosine, ALIKE))
        links.pop(position, None)
        served_links = [
            (other, *score_and_source)
            for other, score_and_source in links.items()
            if other < len(self.item_ids) and available[other]
        ]
        return [SimilarItem(int(self.item_ids[other]), score, source) for other, score, source in served_links]


class NearItems:
    """Finds the items with the nearest vectors in one generation. It remembers the latest answers: few items get most visits.

    The last dimension of a vector is left out: it is the item's popularity, which says nothing about what the item is like.
    """

    def __init__(self, retrieve_folder: Path) -> None:
        self._folder = retrieve_folder
        self._lengths: np.ndarray | None = None  # kept instead of normalized vectors, which would take as much memory again
        self.find = lru_cache(MOST_REMEMBERED)(self._find)

    def _find(self, position: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the nearest items, the item itself among them: positions, int32, and cosines, float32 [MOST_NEAR].

        Raises ArtifactError.
        """
        vectors = open_array(self._folder, "item_vectors")[:, :-1]
        if self._lengths is None:
            self._lengths = np.maximum(np.sqrt(np.einsum("nd,nd->n", vectors, vectors)), 1e-12)
        cosines = vectors @ vectors[position] / (self._lengths * self._lengths[position])
        count = min(MOST_NEAR, len(cosines))
        nearest = np.argpartition(cosines, -count)[-count:]
        nearest = nearest[np.argsort(-cosines[nearest], kind="stable")]
        return nearest.astype(np.int32), cosines[nearest]


class Categories:
    """The categories of one generation's catalogue. It remembers the popular items of those that were asked for."""

    def __init__(self, retrieve_folder: Path, item_ids: np.ndarray) -> None:
        """item_ids: int64 [n_items] ascending. Raises ArtifactError."""
        content, self._item_ids = Content.load(retrieve_folder), item_ids
        self._names = content.names[CATEGORY]
        self._codes = {name: code for code, name in enumerate(self._names)}
        self._item_codes = np.array(content.codes[CATEGORY])
        counts, available = (open_array(retrieve_folder, name)[: len(item_ids)] for name in ("recent_popularity", "available"))
        best_first = np.argsort(-counts, kind="stable")
        self._popular = best_first[available[best_first]].astype(np.int32)  # here: the files may be gone when servers are
        self._ranks = np.full(len(item_ids), -1, np.int32)  # by position; -1: not available
        self._ranks[self._popular] = np.arange(len(self._popular))
        self.list_popular = lru_cache(MOST_CATEGORIES)(self._list_popular)

    def list_items(self, name: str) -> list[int]:
        """Return the items of a category; none of one that nobody has."""
        return self._item_ids[self._item_codes == self._find_code(name)].tolist()

    def find_name(self, position: int) -> str | None:
        """Return the exported category of the item at a position."""
        code = int(self._item_codes[position])
        return None if code == NO_GROUP else self._names[code]

    def _list_popular(self, name: str) -> tuple[int, ...]:
        """Return the most popular available items of a category, best first."""
        positions = self._popular[self._item_codes[self._popular] == self._find_code(name)]
        return tuple(self._item_ids[positions[:MOST_POPULAR]].tolist())

    def sort_popular(self, positions: Sequence[int], name: str | None) -> list[int]:
        """Return the available ones of some items, best first. name: the category that they must have; None: any"""
        places = np.array(positions, np.int64)
        if name is not None:
            places = places[self._item_codes[places] == self._find_code(name)]
        ranks = self._ranks[places]
        return self._item_ids[self._popular[np.sort(ranks[ranks >= 0])]].tolist()

    def _find_code(self, name: str) -> int:
        return self._codes.get(name, UNKNOWN_GROUP)


class LiveItems:
    """Items that `upsert` changed: titles, text ids, categories, and which are unavailable. Each call reads what is new."""

    def __init__(self, reader: Reader, published: Published) -> None:
        """published: the generation that answers"""
        self.ids: set[int] = set()
        self.with_row: set[int] = set()  # new ones, to which the stages gave a row in this order too
        self.titles: dict[int, str | None] = {}  # None: a title that was removed
        self.names: dict[int, str] = {}
        self.categories: dict[int, str | None] = {}  # None: a category that was removed
        self.unavailable: set[int] = set()
        self._reader, self._published, self._sequence = reader, published, 0

    @property
    def is_full(self) -> bool:
        """Whether no row is free for a further new item."""
        return len(self.with_row) >= self._published.n_free_rows

    def refresh(self) -> None:
        """Read the changes since the last call. Raises DependencyError when the store cannot be read."""
        if not self._reader.exists():
            return
        with self._reader.snapshot() as snapshot:
            changed_sequence = snapshot.read_progress().changed_sequence
            if changed_sequence == self._sequence:
                return
            changes = snapshot.read_changes(self._sequence)
        times = self._published.times
        for change in times.drop_older(changes) if times else changes:
            if change.type != ITEM_CHANGED:
                continue
            self.ids.add(change.id)
            if not self.is_full and self._published.find_position(change.id) is None:
                self.with_row.add(change.id)
            if "title" in change.columns:
                self.titles[change.id] = change.columns["title"] or None  # null and "" are missing values
            if is_text_of(name := change.columns.get(NAME), change.id):
                self.names[change.id] = name
            if "category" in change.columns:
                self.categories[change.id] = get_text(change.columns["category"])
            if change.columns.get("available") in (False, 0):
                self.unavailable.add(change.id)
            else:
                self.unavailable.discard(change.id)
        self._sequence = changed_sequence
