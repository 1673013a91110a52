"""Describe items by tokens, to find the items that are most like a new one.

    title, category, provider, feature columns ─▶ tokens ─▶ items that share the rarest of them

A new item has no history. Until the next export, models use the values of the items most like it.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from serving.contract.artifacts import REMEDY, check_range, open_checked_array
from serving.contract.errors import ArtifactError
from serving.contract.ids import NAME
from serving.contract.texts import load_strings, save_strings
from serving.live.catalogue_times import CatalogueTimes

FOLDER = "content"
GROUPS = ("category", "provider")
TITLE = "title"
NOT_OF_CONTENT = ("available", "price", NAME)  # columns that do not say what an item is
WORD = re.compile(r"\w{3,}")
NO_GROUP, UNKNOWN_GROUP = -1, -2  # codes of an item without a group, and of a group that no item has


def compute_tokens(columns: Mapping[str, object]) -> set[int]:
    """Return the tokens of an item: int64 hashes of the words of its title, and of each text value with its column's name."""
    texts: set[str] = set()
    for name, value in columns.items():
        if value is None or name in NOT_OF_CONTENT:
            continue
        if name == TITLE:
            texts |= {f"{TITLE}:{word}" for word in WORD.findall(str(value).lower())}
        elif isinstance(value, list):
            texts |= {f"{name}={part}" for part in value}
        elif isinstance(value, str):
            texts.add(f"{name}={value}")
    return {int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True) for text in texts}


def get_text(value: object) -> str | None:
    """Return a value if it is text, else None."""
    return value if isinstance(value, str) else None


@dataclass(frozen=True)
class Content:
    """The catalogue's tokens and groups.

    tokens   int64 [T]: those of item i are tokens[offsets[i] : offsets[i + 1]]
    offsets  int64 [n_known + 1]
    names    the names of the categories, and those of the providers
    codes    int32 [2, n_known]: index of each item's category and provider in `names`, NO_GROUP = none
    times    when the rows of the catalogue were last changed, None where it does not say
    """

    tokens: np.ndarray
    offsets: np.ndarray
    names: tuple[Sequence[str], Sequence[str]]
    codes: np.ndarray
    times: CatalogueTimes | None = None

    @classmethod
    def of(cls, items: Sequence[Mapping[str, object]], times: CatalogueTimes | None = None) -> Content:
        """Return the content of items: their columns by name, in the order of item positions."""
        tokens = [sorted(compute_tokens(columns)) for columns in items]
        offsets = np.cumsum([0, *map(len, tokens)], dtype=np.int64)
        groups = [[get_text(columns.get(role)) for columns in items] for role in GROUPS]
        names = [sorted({text for text in texts if text is not None}) for texts in groups]
        code_of: list[dict[str | None, int]] = [{text: code for code, text in enumerate(known)} for known in names]
        codes = [[known.get(text, NO_GROUP) for text in texts] for known, texts in zip(code_of, groups, strict=True)]
        all_tokens = np.array([token for item_tokens in tokens for token in item_tokens], np.int64)
        return cls(all_tokens, offsets, (names[0], names[1]), np.array(codes, np.int32).reshape(2, len(items)), times)

    def save(self, folder: Path) -> None:
        """Write the content into a stage's folder."""
        if self.times:
            self.times.save(folder)
        folder = folder / FOLDER
        folder.mkdir(exist_ok=True)
        for name in ("tokens", "offsets", "codes"):
            np.save(folder / f"{name}.npy", getattr(self, name))
        for role, names in zip(GROUPS, self.names, strict=True):
            save_strings(folder, role, list(names))

    @classmethod
    def load(cls, folder: Path) -> Content:
        """Read the content from a stage's folder. Raises ArtifactError."""
        times, folder = CatalogueTimes.load(folder), folder / FOLDER
        offsets = open_checked_array(folder, "offsets", "int64", None)
        tokens = open_checked_array(folder, "tokens", "int64", None)
        codes = open_checked_array(folder, "codes", "int32", 2, len(offsets) - 1)
        if (np.diff(offsets) < 0).any() or offsets[0] != 0 or offsets[-1] != len(tokens):
            raise ArtifactError(f"{folder / 'offsets'}.npy does not divide the {len(tokens)} tokens among the items. {REMEDY}")
        category, provider = (load_strings(folder, role) for role in GROUPS)
        for role, names in enumerate((category, provider)):
            check_range(folder / "codes.npy", codes[role], len(names) - 1, first=NO_GROUP)
        return cls(tokens, offsets, (category, provider), codes, times)

    @cached_property
    def _places(self) -> dict[int, np.ndarray]:
        """The positions of the items that have a token, int64 [N], by token."""
        owners = np.repeat(np.arange(len(self.offsets) - 1), np.diff(self.offsets))
        order = np.argsort(self.tokens, kind="stable")
        tokens, starts = np.unique(self.tokens[order], return_index=True)
        return dict(zip(tokens.tolist(), np.split(owners[order], starts)[1:], strict=True))

    def find_most_alike(self, tokens: Iterable[int], count: int) -> np.ndarray:
        """Return the positions of the items that share the rarest tokens, the most alike first, int64 [count or fewer].

        For an item that shares no token with any other, they are positions spread evenly over the catalogue.
        tokens: of the item, as from `compute_tokens`
        """
        n_items = len(self.offsets) - 1
        shared = np.zeros(n_items)
        for token in tokens:
            owners = self._places.get(token)
            if owners is not None:
                shared[owners] += np.log1p(n_items / len(owners))
        if not shared.any():
            return np.unique(np.linspace(0, n_items - 1, min(count, n_items)).astype(np.int64))
        among = np.flatnonzero(shared)
        if len(among) > count:  # in a large catalogue, sort only the items that are at least as alike as the last one returned
            among = among[shared[among] >= np.partition(shared[among], -count)[-count]]
        return among[np.argsort(-shared[among], kind="stable")[:count]]

    def map_groups(self, role: int, item_codes: np.ndarray) -> dict[str | None, int]:
        """Return a stage's code of each category (role 0) or provider (role 1), by name.

        item_codes: int [n_items + 1], the code of each item's category or provider, before `upsert` changed any
        """
        codes, first_items = np.unique(self.codes[role], return_index=True)
        pairs = zip(codes.tolist(), item_codes[first_items].tolist(), strict=True)
        return {self.names[role][code]: item_code for code, item_code in pairs if code != NO_GROUP}
