"""Names and titles that the repository publishes beside `recommend`, for people and for shops whose ids are text.

<REPO>/recommend/<generation>/item_ids.npy      int64 [n_items], ascending
<REPO>/recommend/<generation>/item_titles.json  n_items titles in that order
<REPO>/recommend/<generation>/item_names.json   {name: id}, where the shop's item ids are text
<REPO>/recommend/<generation>/user_names.json   {name: id}, where its user ids are text

`known_users` reads the feature store instead, which knows all of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from clients.models import Query
from clients.wire import ANONYMOUS
from serving.contract.artifacts import REMEDY, open_array, open_form, read_json, stage_folder
from serving.contract.errors import ArtifactError
from serving.contract.generations import pinned_generation
from serving.contract.tensors import ENSEMBLE
from serving.stages.parts.specs import PREPROCESS_FEATURES


@dataclass(frozen=True)
class Catalogue:
    """All parts are optional: what the repository does not publish is simply not known."""

    generation: int | None = None
    titles: Mapping[int, str] = field(default_factory=dict)  # item id -> title
    item_names: Mapping[str, int] = field(default_factory=dict)
    user_names: Mapping[str, int] = field(default_factory=dict)
    item_ids: frozenset[int] = frozenset()  # every item that this generation can answer with

    @classmethod
    def load(cls, repo: str | Path, generation: int | None = None) -> Catalogue | None:
        """Of one generation, or of the one that a server answers with; None when nothing is published there (or not here).

        Raises ArtifactError when what is published for people cannot be read.
        """
        try:
            folder = Path(repo, ENSEMBLE, str(generation or pinned_generation(Path(repo))))
        except ArtifactError:
            return None
        if not (folder / "item_ids.npy").is_file():
            return None
        item_ids = open_array(folder, "item_ids").tolist()
        titles = _read(folder / "item_titles.json") or []
        return cls(
            int(folder.name),
            dict(zip(item_ids, titles, strict=False)),
            _read_names(folder / "item_names.json"),
            _read_names(folder / "user_names.json"),
            frozenset(item_ids),
        )

    def with_ids(self, query: Query) -> Query:
        """The query with ids for names. Text that is no known name, but spells a number, is taken as the id itself.

        Other text, in a shop that has names, is an unknown user, who is served as an anonymous one, or an unknown item,
        which is left out, as nobody could serve it. In a shop without names it stays, and the call refuses it.
        """
        history = None if query.history is None else self._items(query.history)
        return replace(query, user_id=self._user(query.user_id), history=history, exclude=self._items(query.exclude))

    def strangers(self, item_ids: Sequence[int]) -> list[int]:
        """Items of an answer that were never published here: the server serves another shop. None without a catalogue."""
        return [item_id for item_id in item_ids if item_id not in self.item_ids] if self.item_ids else []

    def title(self, item_id: int) -> str | None:
        return self.titles.get(item_id)

    def item_name(self, item_id: int) -> str | None:
        return self._names_of_items.get(item_id)

    @cached_property
    def _names_of_items(self) -> dict[int, str]:
        return {item_id: name for name, item_id in self.item_names.items()}

    def _user(self, user: int | str | None) -> int | str | None:
        found = _id(user, self.user_names)
        return ANONYMOUS if isinstance(found, str) and self.user_names else found

    def _items(self, items: Sequence[int | str]) -> list[int | str]:
        found = [_id(item, self.item_names) for item in items]
        return [item for item in found if not (isinstance(item, str) and self.item_names)]


def known_users(repo: Path, count: int) -> list[str]:
    """-> at most `count` users of the generation that answers, as the shop writes them, from the most to the least active.

    Raises ArtifactError where no repository, or no store of users, lies there, and when the store or its names are broken.
    """
    generation = pinned_generation(repo)
    store = stage_folder(repo, "preprocess", generation) / "store"
    if not store.is_dir():  # that stage is served in parts
        store = repo / PREPROCESS_FEATURES / str(generation) / "store"
    user_ids = open_form(store, "user_ids", "int64", None)
    if not len(user_ids):
        raise ArtifactError(f"{store} holds no user; expected one or more. {REMEDY}")
    events = open_form(store, "event_count", "int64", len(user_ids) + 1)[:-1]  # the last row is that of unknown users
    by_activity = np.argsort(-events, kind="stable")
    places = np.linspace(0, len(user_ids) - 1, min(count, len(user_ids))).astype(np.int64)
    by_name = _read_names(repo / ENSEMBLE / str(generation) / "user_names.json")
    names = {user_id: name for name, user_id in by_name.items()}
    return [str(names.get(user_id, user_id)) for user_id in user_ids[by_activity[places]].tolist()]


def _id(value: int | str | None, names: Mapping[str, int]) -> int | str | None:
    """The id of a name, or a number that is an id. Other text comes back as it is."""
    if not isinstance(value, str):
        return value
    if value in names:
        return names[value]
    try:
        number = int(value)
    except ValueError:
        return value
    # Where ids are text, a number is one only if it was published: "007" must not become user 7.
    return number if not names or number in names.values() else value


def _read_names(path: Path) -> dict[str, int]:
    """Name -> id; empty when they are not published."""
    names = _read(path)
    if names is None:
        return {}
    if not isinstance(names, dict) or not all(isinstance(found, int) for found in names.values()):
        raise ArtifactError(f"{path} does not say which id each name has; expected {{name: id}}. {REMEDY}")
    return names


def _read(path: Path) -> Any:
    """The JSON in `path`; None when it is not published."""
    return read_json(path.parent, path.name) if path.is_file() else None
