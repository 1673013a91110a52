"""Bearer tokens of 256 random bits. A file keeps only their SHA-256, one line per token: `NAME SHA256`.

A fast hash is enough: 256 random bits cannot be guessed, so a slow one would protect nothing.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from pathlib import Path

from serving.contract.errors import ConfigError

TOKEN_BYTES = 32


def new_token(file: Path, name: str) -> str:
    """Add a new token's hash to a file, and return the token, which is stored nowhere. Raises ConfigError."""
    if not name.isidentifier():
        raise ConfigError(f"The name {name!r} is not usable; expected letters, digits and _, such as shop.")
    if file.exists() and name in read_tokens(file).values():
        raise ConfigError(f"{file} has a token called {name} already. Choose another name, or remove its line to revoke it.")
    token = secrets.token_urlsafe(TOKEN_BYTES)
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    with os.fdopen(descriptor, "a") as lines:
        lines.write(f"{name} {digest(token)}\n")
    return token


def read_tokens(file: Path) -> dict[str, str]:
    """Return the tokens of a file: digest -> name. Raises ConfigError if it is unreadable, malformed or empty."""
    try:
        lines = [line.split() for line in file.read_text().splitlines() if line.strip()]
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}. Make it with `python -m gateway token`.") from error
    for number, fields in enumerate(lines, 1):
        if len(fields) != 2 or len(fields[1]) != 64:
            raise ConfigError(
                f"{file}, line {number}: expected a name and a SHA-256. Make lines with `python -m gateway token`."
            )
    if not lines:
        raise ConfigError(f"{file} holds no token, so every request would be refused. Make one with `python -m gateway token`.")
    return {sha256: name for name, sha256 in lines}


def digest(token: str) -> str:
    """Return the SHA-256 of a token, in hex."""
    return hashlib.sha256(token.encode()).hexdigest()
