"""Find the ids on the wire of users and items that a command names as the shop writes them."""

from __future__ import annotations

from itertools import count
from pathlib import Path

import numpy as np

from serving.contract.artifacts import find_stage_folder, open_array, read_json
from serving.contract.errors import ConfigError, RecommenderError
from serving.contract.generations import read_pinned_generation
from serving.contract.ids import stable_id
from serving.contract.tensors import ENSEMBLE, STAGES

USER_NAMES, ITEM_NAMES = "user_names.json", "item_names.json"


def find_user_id(repo: Path, user: str) -> int:
    """Return the int64 id of a user, as `find_id` does."""
    return find_id(repo, "user", user, USER_NAMES)


def find_item_id(repo: Path, item: str) -> int:
    """Return the int64 id of an item, as `find_id` does."""
    return find_id(repo, "item", item, ITEM_NAMES)


def find_id(repo: Path, kind: str, text: str, names_file: str) -> int:
    """Return the int64 id on the wire of a user or an item.

    kind: "user" or "item", for messages; text: the id as the shop writes it, without regard to spaces around it

    Where the shop's ids are text, an id that was added since the export is the hash of its text, or the next hash that no
    published id has. A published int64 id is accepted too.
    A store outlives its repository: without a repository, a number is the id itself, and any other text is hashed.
    Raises ConfigError for an empty text. Where the shop's ids are numbers, raises it for all but whole numbers of 64 bits.
    Raises RecommenderError if the repository cannot be read.
    """
    if not (text := text.strip()):
        raise ConfigError(f"The {kind} is empty; expected an id as the shop writes it.")
    number = parse_whole_number(text)
    if not repo.exists():
        return stable_id(text) if number is None else number
    names = read_names(repo, names_file)
    if text in names:
        return names[text]
    if names and number not in (ids := set(names.values())):
        return next(free_id for attempt in count() if (free_id := stable_id(text, attempt)) not in ids)
    if number is None:
        raise ConfigError(f"{kind} is {text!r}; this shop's ids are whole numbers of 64 bits. Correct the id.")
    return number


def is_learned(repo: Path, user_id: int) -> bool:
    """Return whether the pinned generation learned from events of a user; False if the generation cannot be read."""
    try:
        folder = find_stage_folder(repo, STAGES[0], read_pinned_generation(repo))
        return bool(np.isin(user_id, open_array(folder / "store", "user_ids")))
    except RecommenderError:  # a store outlives its repository
        return False


def read_names(repo: Path, names_file: str) -> dict[str, int]:
    """Return published int64 ids by text; {} where the shop's ids are numbers. Raises RecommenderError if unreadable."""
    folder = repo / ENSEMBLE / str(read_pinned_generation(repo))
    return read_json(folder, names_file) if (folder / names_file).exists() else {}


def read_item_texts(repo: Path) -> dict[int, str]:
    """Return the texts of published items' ids by the ids on the wire; {} where the shop's ids are numbers.

    Also {} without a repository, which a store may outlive. Raises RecommenderError if the names cannot be read.
    """
    return {item_id: text for text, item_id in read_names(repo, ITEM_NAMES).items()} if repo.exists() else {}


def parse_whole_number(text: str) -> int | None:
    """Return the int64 that a text spells. None for larger numbers, other texts, and "007", which is another id than "7"."""
    try:
        number = int(text)
    except ValueError:
        return None
    return number if str(number) == text and -(1 << 63) <= number < 1 << 63 else None
