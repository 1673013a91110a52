"""Find a user's id on the wire, for commands that take the id as the shop writes it."""

from __future__ import annotations

from itertools import count
from pathlib import Path

from serving.contract.artifacts import read_json
from serving.contract.errors import ConfigError
from serving.contract.generations import read_pinned_generation
from serving.contract.ids import stable_id
from serving.contract.tensors import ENSEMBLE

USER_NAMES = "user_names.json"


def find_user_id(repo: Path, user: str) -> int:
    """Return the int64 id of a user.

    Where the shop's ids are text, a user added since the export has the hash of the text, or the next hash that no published
    user has; a known int64 id is accepted too.
    A store outlives its repository: without one, a number is the id itself, and a text is hashed.
    Raises ConfigError for a text in a shop whose ids are numbers, and RecommenderError when the repository cannot be read.
    """
    number = parse_whole_number(user)
    if not repo.exists():
        return stable_id(user) if number is None else number
    names = read_user_names(repo)
    if user in names:
        return names[user]
    if names and number not in (ids := set(names.values())):
        return next(free_id for attempt in count() if (free_id := stable_id(user, attempt)) not in ids)
    if number is None or not -(1 << 63) <= number < 1 << 63:
        raise ConfigError(f"user is {user!r}; this shop's ids are whole numbers of 64 bits. Correct the id.")
    return number


def read_user_names(repo: Path) -> dict[str, int]:
    """Return ids of users by name, none where ids are numbers. Raises RecommenderError when they cannot be read."""
    folder = repo / ENSEMBLE / str(read_pinned_generation(repo))
    return read_json(folder, USER_NAMES) if (folder / USER_NAMES).exists() else {}


def parse_whole_number(text: str) -> int | None:
    """Return the number that a text spells; None for other texts, and for "007", which is not how 7 is written."""
    try:
        return int(text) if str(int(text)) == text else None
    except ValueError:
        return None
