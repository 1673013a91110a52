"""Ids on the wire for shops whose own ids are text.

The id of a text is the first 53 bits of the BLAKE2b digest (8 bytes long, no key) of its UTF-8 bytes, read big-endian:

    stable_id("A-17") = int.from_bytes(blake2b(b"A-17", digest_size=8).digest(), "big") >> 11

53 bits, because many JSON readers hold numbers as doubles. Where two texts of a shop get the same id, the one that sorts
first keeps it, and the other is hashed again with a salt: `attempt` (1, 2, …) as 8 little-endian bytes. The export publishes
the ids it assigned (`item_names.json`, `user_names.json`); a published id always wins over a computed one.
"""

from __future__ import annotations

from hashlib import blake2b

from triton_recommender.errors import InvalidRequest

ID_BITS = 53

FIRST_USER_ID = -(1 << 62)  # ids below it belong to sessions


def session_id(session: str) -> int:
    """Return the id of a visitor without a user id, from the shop's name of the session.

    It is below FIRST_USER_ID by 1 plus the first 61 bits of the name's BLAKE2b digest, so it is no user's id.
    Raises InvalidRequest for a text that UTF-8 cannot encode.
    """
    digest = blake2b(_encode(session), digest_size=8).digest()
    return FIRST_USER_ID - 1 - (int.from_bytes(digest, "big") >> 3)


def stable_id(text: str, attempt: int = 0) -> int:
    """Return the id of a text, in [0, 2**53). `attempt` above 0 gives further ids, for a text whose first id is taken.

    Raises InvalidRequest for a text that UTF-8 cannot encode.
    """
    salt = attempt.to_bytes(8, "little") if attempt else b""
    return int.from_bytes(blake2b(_encode(text), digest_size=8, salt=salt).digest(), "big") >> (64 - ID_BITS)


def _encode(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            f"The id {text!r} holds half a character (a lone surrogate), which UTF-8 cannot encode. Correct the text."
        ) from error
