"""Make untrusted text safe to print on a terminal: titles, names and messages may hold escape sequences."""

from __future__ import annotations

import json
from typing import Any


def escape_text(text: str) -> str:
    """Return the text with line breaks and other whitespace as spaces; control and formatting characters are written out."""
    return "".join(_escape(character) for character in text)


def dump_json(value: Any) -> str:
    """Return one line of JSON with all control and formatting characters escaped; JSON itself requires that only of some."""
    text = json.dumps(value, ensure_ascii=False)
    return "".join(character if character.isprintable() else json.dumps(character)[1:-1] for character in text)


def _escape(character: str) -> str:
    if character.isprintable():
        return character
    return " " if character.isspace() and character not in "\x1c\x1d\x1e\x1f\x85" else repr(character)[1:-1]
