"""Find out whether a server and every model in it are ready."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tritonclient.grpc as grpcclient
from tritonclient.grpc import InferenceServerClientPlugin
from tritonclient.utils import InferenceServerException

from server.keys import GRPC_HEADER, KEYS_DIR, find_key, find_tls_folder
from server.start.tls import ServerTls
from serving.contract.errors import ServerError

POLL_S = 0.1
RESTRICTED = "protocol is restricted"  # tritonserver's message to a call without the key
HELD_STATES = ("READY", "LOADING", "UNLOADING")
MESSAGES_OF_ANY_SIZE = (("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1))


class _WithKey(InferenceServerClientPlugin):
    """Adds the key of a server to every call."""

    def __init__(self, key: str) -> None:
        self._key = key

    def __call__(self, request) -> None:
        request.headers[GRPC_HEADER] = self._key


def open_local_client(grpc_url: str) -> grpcclient.InferenceServerClient:
    """Return a client of a server on this machine, with its key and TLS, bypassing proxies of the environment."""
    options: dict[str, Any] = {"channel_args": [*MESSAGES_OF_ANY_SIZE, ("grpc.enable_http_proxy", 0)]}
    if tls_folder := find_tls_folder(grpc_url):
        options |= ServerTls(Path(tls_folder)).client_options
    client = grpcclient.InferenceServerClient(grpc_url, **options)
    if key := find_key(grpc_url):
        client.register_plugin(_WithKey(key))
    return client


def read_model_states(grpc_url: str) -> dict[tuple[str, int], tuple[str, str]] | None:
    """Return {(model, version): (state, reason)} as the server reports it; None while it does not answer.

    Raises ServerError when the server was not started here and requires a key.
    """
    try:
        with open_local_client(grpc_url) as client:
            if not client.is_server_live(client_timeout=2):
                return None
            index = client.get_model_repository_index(client_timeout=5)
    except InferenceServerException as error:
        if RESTRICTED in str(error):
            raise ServerError(
                f"The server at {grpc_url} lists its models only to callers with its key, which is not in {KEYS_DIR}. "
                "Either it was started from another checkout: run the command there. Or the key was removed, and only a "
                "restart makes another one: make stop, then make serve."
            ) from error
        return None
    return {(model.name, int(model.version or 0)): (model.state, model.reason) for model in index.models}


def is_ready(grpc_url: str) -> bool:
    """Return whether the server is up and every model has a ready version. (Unloaded versions stay listed as UNAVAILABLE.)

    For a server that was not started here, its own readiness decides.
    """
    try:
        states = read_model_states(grpc_url)
    except ServerError:
        try:
            with open_local_client(grpc_url) as client:
                return client.is_server_ready(client_timeout=5)
        except InferenceServerException:  # too slow, or gone since
            return False
    if not states:
        return False
    ready = {name for (name, _), (state, _) in states.items() if state == "READY"}
    return ready == {name for name, _ in states}


def find_held_versions(grpc_url: str) -> set[int]:
    """Return the versions of any model that are loaded, loading or unloading; none while the server does not answer."""
    states = read_model_states(grpc_url) or {}
    return {version for (_, version), (state, _) in states.items() if state in HELD_STATES}


def wait_ready(grpc_url: str, timeout_s: float, may_become_ready: Callable[[], bool] = lambda: True) -> None:
    """Wait until `is_ready`, or until it cannot be any more. Raises ServerError after `timeout_s`, with what is not ready."""
    deadline_s = time.monotonic() + timeout_s
    while not is_ready(grpc_url) and may_become_ready():
        if time.monotonic() > deadline_s:
            raise ServerError(f"After {timeout_s:.0f} s the server at {grpc_url} is not ready: {list_unready(grpc_url)}")
        time.sleep(POLL_S)


def list_unready(grpc_url: str) -> str:
    """Return why the server is not ready, as a message."""
    try:
        states = read_model_states(grpc_url)
    except ServerError as error:
        return str(error)
    return describe_unready(states) or "ready by now"


def describe_unready(states: dict[tuple[str, int], tuple[str, str]] | None) -> str:
    """Return which models have no ready version, as a message; "" when all have one."""
    if states is None:
        return "nothing answers there. Is it running (python -m server status), and is the port right?"
    ready = {name for (name, _), (state, _) in states.items() if state == "READY"}
    waiting = [
        f"{name} {version} is {state} {reason}".strip()
        for (name, version), (state, reason) in states.items()
        if name not in ready
    ]
    return "; ".join(waiting) or ("" if ready else "it holds no model")
