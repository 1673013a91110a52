"""Compute the int64 id of a shop's text id: the same on every machine and at every export, and in the clients."""

from __future__ import annotations

from hashlib import blake2b

ID_BITS = 53  # JSON readers parse integers as doubles, which hold 53 bits exactly


def stable_id(text: str, attempt: int = 0) -> int:
    """Return the int id in [0, 2**53) of a text id. attempt > 0 gives further ids, for the rare collision."""
    salt = attempt.to_bytes(8, "little") if attempt else b""
    return int.from_bytes(blake2b(text.encode(), digest_size=8, salt=salt).digest(), "big") >> (64 - ID_BITS)
