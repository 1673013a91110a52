"""Translate a shop's names of users and items into ids and back, and give the titles of items.

A catalogue comes from one of three places (`Catalogue.load`):

    a repository's folder  <repo>/recommend/<generation>/{item_ids.npy,item_titles.json,item_names.json,user_names.json}
    a file                 one JSON document, as `Catalogue.as_document` writes it
    a URL                  the same document over http or https
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from numbers import Integral
from pathlib import Path
from typing import Any, overload

from triton_recommender.errors import CatalogueError, InvalidRequest
from triton_recommender.folder import find_published_folder, read_json, read_names, read_pinned_generation, read_published_items
from triton_recommender.ids import stable_id
from triton_recommender.models import Notice, Query, Recommendations
from triton_recommender.tensors import Sources
from triton_recommender.wire import validate_items

MAX_DOCUMENT_BYTES = 1 << 30
FETCH_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class Catalogue:
    """Names of a shop's users and items, and titles of its items. A part that was not published is empty.

    generation:              number of the generation that published it; None: not known
    titles:                  item id -> title
    item_names, user_names:  text id -> id on the wire; empty where the shop's ids are integers
    item_ids:                every item of the export; empty: not known
    text_ids:                whether to compute ids of texts (`stable_id`) even if no table of names was published
    """

    generation: int | None = None
    titles: Mapping[int, str] = field(default_factory=dict)
    item_names: Mapping[str, int] = field(default_factory=dict)
    user_names: Mapping[str, int] = field(default_factory=dict)
    item_ids: frozenset[int] = frozenset()
    text_ids: bool = False

    @classmethod
    def load(cls, source: str | Path, generation: int | None = None) -> Catalogue:
        """Read a repository's folder, a file or a URL. generation: which one of a folder to read; None: the pinned one

        Raises CatalogueError if the source publishes nothing or cannot be read.
        """
        text = str(source)
        if text.startswith(("http://", "https://")):
            return cls.from_document(_fetch(text), text)
        path = Path(source)
        if path.is_file():
            return cls.from_document(read_json(path), text)
        folder = find_published_folder(path, generation or read_pinned_generation(path))
        item_ids, titles = read_published_items(folder)
        return cls(
            generation=int(folder.name),
            titles=dict(zip(item_ids, titles, strict=True)) if titles else {},
            item_names=read_names(folder / "item_names.json"),
            user_names=read_names(folder / "user_names.json"),
            item_ids=frozenset(item_ids),
        )

    @classmethod
    def from_document(cls, document: Any, source: str = "the document") -> Catalogue:
        """Return the catalogue that `as_document` described. Raises CatalogueError."""
        try:
            return cls(
                generation=None if document["generation"] is None else int(document["generation"]),
                titles={int(item): str(title) for item, title in document["titles"].items()},
                item_names={str(name): int(number) for name, number in document["item_names"].items()},
                user_names={str(name): int(number) for name, number in document["user_names"].items()},
                item_ids=frozenset(map(int, document["item_ids"])),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CatalogueError(
                f"{source} is no catalogue ({error!r}). Expected the JSON that `python -m clients catalogue` writes."
            ) from error

    def as_document(self) -> dict[str, Any]:
        """Return the catalogue as a dict for JSON, to be served to clients that cannot read the repository."""
        return {
            "generation": self.generation,
            "item_ids": sorted(self.item_ids),
            "titles": {str(item): title for item, title in self.titles.items()},
            "item_names": dict(self.item_names),
            "user_names": dict(self.user_names),
        }

    def resolve(self, query: Query) -> tuple[Query, tuple[Notice, ...]]:
        """Return the query with ids for texts, and a notice for each user or item that is not known.

        A known name becomes its id. What happens to any other text depends on the shop's ids:

            text       a text that spells a published id is that id; any other gets the id that an export would give it, which
                       the server knows only if it was observed or upserted since the export
            integers   a text that spells a whole number is that id; any other is left as it is, and the call refuses it

        Where ids are integers, the catalogue lists no users, so notices are of items only.
        Spaces around a text do not count, because an export removes them. Raises InvalidRequest for a text of spaces alone.
        """
        notices: list[Notice] = []
        user_id = self._resolve_id("user_id", query.user_id, self.user_id, self.user_names, notices)
        history = None if query.history is None else self._resolve_items("history", query.history, notices)
        exclude = self._resolve_items("exclude", query.exclude, notices)
        among = None if query.among is None else self._resolve_items("among", query.among, notices)
        return replace(query, user_id=user_id, history=history, exclude=exclude, among=among), tuple(notices)

    @overload
    def user_id(self, user: int | str) -> int | str: ...
    @overload
    def user_id(self, user: None) -> None: ...
    def user_id(self, user: int | str | None) -> int | str | None:
        """Return the id of a user; a text that cannot be an id as it is. Raises InvalidRequest for a text of spaces alone."""
        return self._find_id(user, self.user_names, self._known_users)

    def item_id(self, item: int | str) -> int | str:
        """Return the id of an item; a text that cannot be an id as it is. Raises InvalidRequest for a text of spaces alone."""
        return self._find_id(item, self.item_names, self._known_items)

    def describe(self, answer: Recommendations) -> tuple[tuple[str | None, ...], tuple[str | None, ...]]:
        """Return the names and the titles of an answer's items."""
        return tuple(map(self.item_name, answer.item_ids)), tuple(map(self.title, answer.item_ids))

    def find_foreign_items(self, answer: Recommendations) -> list[int]:
        """Return the items of an answer that the catalogue does not list; none if it lists no items.

        Items that the server knows as added since the export are left out: no catalogue lists them.
        """
        if not self.item_ids:
            return []
        sources = answer.sources or (Sources.NONE,) * len(answer)
        return [
            item_id
            for item_id, source in zip(answer.item_ids, sources, strict=True)
            if item_id not in self.item_ids and Sources.NEW_ITEMS not in source
        ]

    def title(self, item_id: int) -> str | None:
        return self.titles.get(item_id)

    def item_name(self, item_id: int) -> str | None:
        return self._known_items.get(item_id)

    @cached_property
    def _known_items(self) -> dict[int, str]:
        return {number: name for name, number in self.item_names.items()}

    @cached_property
    def _known_users(self) -> dict[int, str]:
        return {number: name for name, number in self.user_names.items()}

    def _resolve_items(self, field_name: str, items: object, notices: list[Notice]) -> list[int | str]:
        listed = validate_items(items, field_name)
        return [self._resolve_id(field_name, item, self.item_id, self.item_names, notices) for item in listed]

    def _resolve_id(self, field_name, value, resolve, names: Mapping[str, int], notices: list[Notice]):
        """Return the id of a value, and append a notice if the catalogue lists such ids and lacks this one.

        field_name: the query's field that holds the value; resolve: `user_id` or `item_id`; names: all names of that kind
        """
        resolved = resolve(value)
        checkable = names or (field_name != "user_id" and self.item_ids)
        if checkable and value is not None and not self._is_known(field_name, value, resolved, names):
            kind = "user" if field_name == "user_id" else "item"
            message = f"{field_name}: no {kind} is called {value!r} in generation {self.generation}; treated as a new {kind}."
            notices.append(Notice(field_name, str(value), message))
        return resolved

    def _is_known(self, field_name: str, value, resolved, names: Mapping[str, int]) -> bool:
        """Return whether a value names a known user or item. A number is never a name: 22423 is not the item "22423".

        Where the shop's ids are numbers, any other value counts as known, because the call refuses it anyway.
        """
        if not names:
            return not isinstance(resolved, Integral) or resolved in self.item_ids
        if isinstance(value, str):
            return value.strip() in names or resolved == _parse_whole_number(value.strip())
        if field_name == "user_id":
            return resolved in self._known_users
        return resolved in self._known_items or resolved in self.item_ids

    def _find_id(self, value, names: Mapping[str, int], known: Mapping[int, str]):
        """Return the id of a value as `resolve` describes it. names: text -> id; known: the same, id -> text"""
        if not isinstance(value, str):
            return value
        text = value.strip()
        if not text:
            raise InvalidRequest(f"An id is {value!r}; expected a text with more than spaces. Correct it, or leave it out.")
        if text in names:
            return names[text]
        number = _parse_whole_number(text)
        if names or self.text_ids:
            # In shops whose ids are text, a number is an id only if it was published.
            return number if number in known else _find_free_id(text, known)
        return value if number is None else number


def _parse_whole_number(text: str) -> int | None:
    """Return the number that a text spells; None for other texts, and for "007", which is not how 7 is written."""
    try:
        return int(text) if str(int(text)) == text else None
    except ValueError:
        return None


def _find_free_id(text: str, known: Mapping[int, str]) -> int:
    """Return the first of a text's possible ids that no known text has."""
    attempt = 0
    while (candidate := stable_id(text, attempt)) in known:
        attempt += 1
    return candidate


def _fetch(url: str) -> Any:
    import urllib3  # imported late: only a catalogue at a URL needs it

    try:
        with urllib3.PoolManager() as pool:
            response = pool.request("GET", url, timeout=FETCH_TIMEOUT_S, preload_content=False)
            body = response.read(MAX_DOCUMENT_BYTES + 1, decode_content=True)
    except urllib3.exceptions.HTTPError as error:
        raise CatalogueError(f"{url} did not answer: {error}. Expected a catalogue; is the server running?") from error
    if response.status != 200:
        raise CatalogueError(f"{url} answered with status {response.status}; expected 200 and a catalogue. Check the address.")
    if len(body) > MAX_DOCUMENT_BYTES:
        raise CatalogueError(f"{url} sends more than {MAX_DOCUMENT_BYTES:,} bytes; expected a catalogue. Check the address.")
    try:
        return json.loads(body)
    except ValueError as error:
        raise CatalogueError(f"{url} sends no JSON: {error}. Expected a catalogue; check the address.") from error
