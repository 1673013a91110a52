"""Compute the int64 id of a shop's text id: the same on every machine and at every export, and in the clients."""

from __future__ import annotations

from hashlib import blake2b
from typing import TypeGuard

from serving.contract.tensors import FIRST_USER_ID

NAME = "item_id"  # the column by which `upsert` gives the text of an item's id, where ids are text
MOST_ATTEMPTS = 8  # that `is_text_of` makes; the second one is rarely needed
ID_BITS = 53  # JSON readers parse integers as doubles, which hold 53 bits exactly


def stable_id(text: str, attempt: int = 0) -> int:
    """Return the int id in [0, 2**53) of a text id. attempt > 0 gives further ids, for the rare collision."""
    salt = attempt.to_bytes(8, "little") if attempt else b""
    return int.from_bytes(blake2b(text.encode(), digest_size=8, salt=salt).digest(), "big") >> (64 - ID_BITS)


def session_id(session: str) -> int:
    """Return the id of an anonymous visitor, from the shop's name of the session. It is below that of any user."""
    digest = blake2b(session.encode(), digest_size=8).digest()
    return FIRST_USER_ID - 1 - (int.from_bytes(digest, "big") >> 3)


def is_text_of(text: object, number: int) -> TypeGuard[str]:
    """Return whether `number` is one of the ids that a text id may get."""
    return isinstance(text, str) and number in (stable_id(text, attempt) for attempt in range(MOST_ATTEMPTS))
