"""Store what commands need to reach each server that was started here: its key for control requests, and its TLS folder.

Inference, health, metadata and configurations are open to everyone who reaches a port. Requests that could run code, stop
the server or silence it (RESTRICTED) need the key as a header. Every start makes a new key. It is in a file of mode 0600, named
after the server's gRPC address, in the folder of this checkout: commands of another checkout do not find it.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from server.start.environment import RUN_DIR

KEYS_DIR = RUN_DIR / "keys"
RESTRICTED = "model-repository,shared-memory,logging,trace,statistics"
HEADER = "recommender-control"  # over HTTP
GRPC_HEADER = f"triton-grpc-protocol-{HEADER}"


def new_key(grpc_url: str, tag: str, tls_folder: str) -> str:
    """Make and store the key of a server that is about to start at `grpc_url`. tag: unique to that server.

    tls_folder: of its PEM files (server/start/tls.py), "" for plain gRPC
    """
    key = secrets.token_hex(32)
    KEYS_DIR.mkdir(parents=True, exist_ok=True, mode=0o700)
    path = _find_path(grpc_url)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.unlink(missing_ok=True)
    with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(f"{tag} {key} {tls_folder}")
    draft.replace(path)
    return key


def find_key(grpc_url: str) -> str:
    """Return the key of the server at `grpc_url`; "" when none was started here, or its file was removed or damaged."""
    return _read_fields(grpc_url)[1]


def find_tls_folder(grpc_url: str) -> str:
    """Return the folder of the PEM files of the server at `grpc_url`; "" for plain gRPC, or when it was not started here."""
    return _read_fields(grpc_url)[2]


def forget_key(grpc_url: str, tag: str) -> None:
    """Remove the key of a server that ended, unless another server has its address by now."""
    path = _find_path(grpc_url)
    if path.exists() and path.read_text().startswith(f"{tag} "):
        path.unlink(missing_ok=True)


def make_restricting_options(key: str) -> list[str]:
    """Return tritonserver's options that restrict RESTRICTED to requests with `key`."""
    return [f"--{option}={RESTRICTED}:{HEADER}={key}" for option in ("http-restricted-api", "grpc-restricted-protocol")]


def _read_fields(grpc_url: str) -> tuple[str, str, str]:
    """Return (tag, key, folder of TLS)."""
    try:
        tag, key, tls_folder = _find_path(grpc_url).read_text().split(" ", 2)
    except (FileNotFoundError, ValueError):  # ValueError: somebody edited it, and no key is better than half of one
        return "", "", ""
    return tag, key, tls_folder


def _find_path(grpc_url: str) -> Path:
    host, _, port = grpc_url.rpartition(":")
    return KEYS_DIR / f"{'localhost' if host == '127.0.0.1' else host.replace('/', '_')}:{port}"
