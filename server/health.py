"""Is a server ready: the server itself, and every model in it?"""

from __future__ import annotations

import time

import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException

from serving.contract.errors import ServerError

POLL_S = 0.1
HELD_STATES = ("READY", "LOADING", "UNLOADING")
MESSAGES_OF_ANY_SIZE = (("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1))


def local_client(grpc_url: str) -> grpcclient.InferenceServerClient:
    """Asks a server of this machine itself, whatever proxy the environment names."""
    return grpcclient.InferenceServerClient(grpc_url, channel_args=[*MESSAGES_OF_ANY_SIZE, ("grpc.enable_http_proxy", 0)])


def model_states(grpc_url: str) -> dict[tuple[str, int], tuple[str, str]] | None:
    """(model, version) -> (state, reason) as the server reports them; None while it does not answer."""
    try:
        with local_client(grpc_url) as client:
            if not client.is_server_live(client_timeout=2):
                return None
            index = client.get_model_repository_index(client_timeout=5)
    except InferenceServerException:
        return None
    return {(model.name, int(model.version or 0)): (model.state, model.reason) for model in index.models}


def is_ready(grpc_url: str) -> bool:
    """Server up, and every model has a ready version. (Versions that were unloaded stay listed as UNAVAILABLE.)"""
    states = model_states(grpc_url)
    if not states:
        return False
    ready = {name for (name, _), (state, _) in states.items() if state == "READY"}
    return ready == {name for name, _ in states}


def held_versions(grpc_url: str) -> set[int]:
    """Versions of any model that the server holds, loads or has not finished unloading; none while it does not answer."""
    states = model_states(grpc_url) or {}
    return {version for (_, version), (state, _) in states.items() if state in HELD_STATES}


def wait_ready(grpc_url: str, timeout_s: float) -> None:
    """Block until `is_ready`; ServerError that names what is not ready after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not is_ready(grpc_url):
        if time.monotonic() > deadline:
            raise ServerError(f"After {timeout_s:.0f} s the server at {grpc_url} is not ready: {not_ready(grpc_url)}")
        time.sleep(POLL_S)


def not_ready(grpc_url: str) -> str:
    """What keeps the server from being ready, in words."""
    states = model_states(grpc_url)
    if states is None:
        return "nothing answers there. Is it running (python -m server status), and is the port right?"
    ready = {name for (name, _), (state, _) in states.items() if state == "READY"}
    waiting = [
        f"{name} {version} is {state} {reason}".strip()
        for (name, version), (state, reason) in states.items()
        if name not in ready
    ]
    return "; ".join(waiting) or ("ready by now" if ready else "it holds no model")
