"""Bearer tokens: 256 random bits each, of which a file keeps the SHA-256 alone.

One line per token, `NAME SHA256`. A plain hash is enough: nobody can guess 256 random bits, so nothing needs to be slow.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from pathlib import Path

from serving.contract.errors import ConfigError

TOKEN_BYTES = 32


def new_token(file: Path, name: str) -> str:
    """Add a token to a file, and return it: it is kept nowhere else. Raises ConfigError."""
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
    """Return digest -> name. Raises ConfigError."""
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
        raise ConfigError(f"{file} holds no token, so nobody could be let in. Make one with `python -m gateway token`.")
    return {sha256: name for name, sha256 in lines}


def digest(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()
