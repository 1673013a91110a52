"""Bearer tokens of 256 random bits. A file keeps only their SHA-256, one line per token: `NAME SHA256`.

A fast hash is enough: 256 random bits cannot be guessed, so a slow one would protect nothing.
"""

from __future__ import annotations

import hashlib
import secrets
import stat
from pathlib import Path

from serving.contract.durable import append_durably
from serving.contract.errors import ConfigError

TOKEN_BYTES = 32


def add_token(file: Path, name: str) -> str:
    """Add the hash of a new token to a file, and return the token, which is stored nowhere.

    Raises ConfigError for a name that is not an identifier or is taken, and for a file that cannot be read or written, is
    malformed, or is open to other users.
    """
    if not name.isidentifier():
        raise ConfigError(f"The name {name!r} is not usable; expected letters, digits and _, such as shop.")
    is_new = not file.exists()
    text = "" if is_new else _read_own_text(file)
    if name in _parse_tokens(file, text).values():
        raise ConfigError(f"{file} has a token called {name} already. Choose another name, or remove its line to revoke it.")
    token = secrets.token_urlsafe(TOKEN_BYTES)
    try:
        append_durably(file, f"{name} {hash_token(token)}\n")
    except OSError as error:
        if is_new and file.exists():  # without a token, it would only let a gateway refuse to start
            file.unlink()
        raise ConfigError(f"{file} cannot be written: {error.strerror}. Choose another --file.") from error
    return token


def read_tokens(file: Path) -> dict[str, str]:
    """Return the tokens of a file: digest -> name. Raises ConfigError if it is unreadable, malformed or empty."""
    tokens = _parse_tokens(file, _read_text(file))
    if not tokens:
        raise ConfigError(f"{file} holds no token, so every request would be refused. Make one with `python -m gateway token`.")
    return tokens


def _read_own_text(file: Path) -> str:
    """Return the text of a file. Raises ConfigError if other users may read or change it: a line that they add is a token.

    In a folder that only its owner may enter, the mode of the file does not matter. Containers read it there as another user.
    """
    text, mode, folder = _read_text(file), stat.S_IMODE(file.stat().st_mode), file.resolve().parent
    if mode & 0o077 and folder.stat().st_mode & 0o011:
        raise ConfigError(
            f"{file} has mode {mode:04o}; expected 0600, so that other users can neither read nor change it. "
            f"Look for lines that are not yours, and run `chmod 600 {file}`."
        )
    return text


def _read_text(file: Path) -> str:
    try:
        return file.read_text()
    except IsADirectoryError as error:
        raise ConfigError(f"{file} is a folder; expected a file, such as {file / 'tokens.txt'}.") from error
    except PermissionError as error:
        raise ConfigError(
            f"{file} cannot be read: permission denied. Run the command as the user who owns it, or make this user its owner."
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} cannot be read: {error}. Make it with `python -m gateway token`.") from error


def _parse_tokens(file: Path, text: str) -> dict[str, str]:
    tokens = {}
    for number, line in enumerate(text.splitlines(), 1):
        fields = line.split()
        if fields and (len(fields) != 2 or len(fields[1]) != 64):
            raise ConfigError(
                f"{file}, line {number}: expected a name and a SHA-256. Make lines with `python -m gateway token`."
            )
        if fields:
            tokens[fields[1]] = fields[0]
    return tokens


def hash_token(token: str) -> str:
    """Return the SHA-256 of a token, in hex."""
    return hashlib.sha256(token.encode()).hexdigest()
