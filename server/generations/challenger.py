"""Load a second generation, the challenger, into a running server, and unload it, without a failed request.

First the steps load the challenger's version in addition to the champion's, then the model `challenger` is loaded. Unloading
takes the opposite order, once the challenger has answered its requests. `recommend` is not touched. Loading pins the champion,
so that a restart serves the same two generations; unloading leaves the pin as it is by then.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException

from repository.challenger import read_added_ms, read_challengers, remove_challenger, write_challenger
from repository.generations import order_models, read_pinned_to, require_published, write_pins
from repository.lock import hold_publication_lock
from repository.triton.models import Model, read_repository
from server.generations.activation import (
    DRAIN_TIMEOUT_S,
    LOAD_TIMEOUT_S,
    find_served_generation,
    load_by_sent_configs,
    load_models,
    wait_drained,
)
from server.start.memory import check_memory
from server.status.health import open_local_client
from serving.contract.errors import ConfigError, ServerError
from serving.contract.generations import read_pinned_generation
from serving.contract.tensors import CHALLENGER, ENSEMBLE, LIVE_MODELS

STOP_STEP_S = 15.0  # for each of two steps: a writer waits, and the kernel lets it go on after 45 s


def load_challenger(grpc_url: str, repo: Path, generation: int) -> int:
    """Serve `generation` as the model `challenger`, in addition to the served generation, the champion. Return the champion.

    The champion is pinned too. Raises ConfigError when `generation` is not published or is the champion, ServerError when it
    does not fit into memory or does not load; the champion is then served as before.
    """
    with hold_publication_lock(repo):
        require_published(repo, generation)
        champion = find_served_generation(grpc_url)
        if generation == champion:
            raise ConfigError(f"Generation {generation} is the one that the server serves. Choose another one as challenger.")
        if others := set(read_challengers(repo)) - {generation}:
            raise ServerError(f"Generation {others.pop()} is served as challenger. Stop its experiment first.")
        check_memory(list_challenger_models(repo, generation))
        write_challenger(repo, generation)
        write_pins(repo, champion)
        with open_local_client(grpc_url) as client:
            try:
                load_models(client, *list_step_names(repo), CHALLENGER)
            except InferenceServerException as error:
                with contextlib.suppress(InferenceServerException):  # the first error is the one to report
                    client.unload_model(CHALLENGER)
                remove_challenger(repo)
                write_pins(repo, champion)
                message = f"Generation {generation} does not load; generation {champion} is served as before: {error.message()}"
                try:
                    _release(client, repo, champion)
                except ServerError as not_released:
                    message = f"{message}. {not_released}"
                raise ServerError(message) from error
    return champion


def unload_challenger(grpc_url: str, repo: Path, until_ms: int | None = None) -> int | None:
    """Unload the challenger once it has answered its requests. Return its generation, None where there was none.

    The repository stays pinned as it is.

    until_ms: leave one that was added later than this, in unix milliseconds. Raises ServerError when the server does not answer
    or cannot unload it.
    """
    with hold_publication_lock(repo):
        champion, loaded = find_served_generation(grpc_url), read_challengers(repo) or find_loaded_challengers(grpc_url)
        pinned = read_pinned_generation(repo)  # another one than the champion after an export or a pin
        if not loaded or (until_ms is not None and read_added_ms(repo) > until_ms):
            return None
        if not read_challengers(repo):  # tritonserver does not say when a model without a folder has drained
            write_challenger(repo, loaded[0])
        with open_local_client(grpc_url) as client:
            _unload_model(client, grpc_url, loaded[0])
            remove_challenger(repo)
            write_pins(repo, pinned)
            _release(client, repo, champion)
    return loaded[0]


def stop_challenger(grpc_url: str, generation: int) -> None:
    """Return once the challenger has answered its last request. A challenger of another generation goes on.

    The repository stays as it is, so this needs no lock and no disk. Its stages stay loaded until `unload_challenger`. Raises
    ServerError when the server does not answer, or does not unload it within twice STOP_STEP_S.
    """
    if generation in find_loaded_challengers(grpc_url):
        with open_local_client(grpc_url) as client:
            if not _unload_model(client, grpc_url, generation, STOP_STEP_S, STOP_STEP_S):
                raise ServerError(f"The challenger, generation {generation}, still answers after {STOP_STEP_S:.0f} s.")


def find_loaded_challengers(grpc_url: str) -> list[int]:
    """Return the generation of a server's challenger, as a list of at most one, as the server itself reports it.

    The repository names no challenger once another server on it has unloaded its own, and tritonserver's index lists no model
    without a folder. Raises ServerError when the server does not say.
    """
    with open_local_client(grpc_url) as client:
        try:
            return [int(version) for version in client.get_model_metadata(CHALLENGER, client_timeout=5).versions]
        except InferenceServerException as error:
            if error.status() == "StatusCode.NOT_FOUND":
                return []
            raise ServerError(f"The server at {grpc_url} does not say which challenger it holds: {error.message()}") from error


def list_step_names(repo: Path) -> list[str]:
    """Return the names of the models that load both generations: the ensemble's steps; none in the fused layout."""
    models = order_models(read_repository(repo))
    return [model.name for model in models if model.name not in (ENSEMBLE, *LIVE_MODELS)]


def list_challenger_models(repo: Path, generation: int) -> list[Model]:
    """Return the models with only the challenger's version, to estimate its memory."""
    models = [model for model in order_models(read_repository(repo)) if model.name not in LIVE_MODELS]
    for model in models:
        model.config.version_policy.Clear()
        model.config.version_policy.specific.versions.append(generation)
    return models


def _unload_model(
    client: grpcclient.InferenceServerClient,
    grpc_url: str,
    generation: int,
    timeout_s: float = LOAD_TIMEOUT_S,
    drain_timeout_s: float = DRAIN_TIMEOUT_S,
) -> bool:
    """Unload the model `challenger`, and return whether it has answered its requests in time. Raises ServerError."""
    try:
        client.unload_model(CHALLENGER, client_timeout=timeout_s)
    except InferenceServerException as error:
        raise ServerError(
            f"The challenger, generation {generation}, is not unloaded: {error.message()}. "
            "Restart the server, or end the experiment again."
        ) from error
    return wait_drained(grpc_url, generation, CHALLENGER, drain_timeout_s)


def _release(client: grpcclient.InferenceServerClient, repo: Path, champion: int) -> None:
    """Make the steps unload all versions but the champion's. Raises ServerError, which only costs memory.

    The configs are sent, because those on disk may name a generation that was pinned meanwhile and that no server has loaded.
    """
    models = {model.name: model for model in read_pinned_to(repo, champion)}
    try:
        load_by_sent_configs(client, [models[name] for name in list_step_names(repo)])
    except InferenceServerException as error:
        raise ServerError(
            f"The challenger is unloaded, but its stages take memory until the server is restarted: {error.message()}"
        ) from error
