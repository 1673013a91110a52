"""Load a second generation beside the one that a running server serves, and unload it, without a failed request.

The steps load the challenger's version beside the champion's, then the model `challenger` is loaded. Unloading takes the
opposite order, once the challenger has answered its requests. `recommend` is not touched. Afterwards the repository names what
the server serves: a restart serves both, or the champion alone.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException

from repository.challenger import challengers, remove_challenger, write_challenger
from repository.generations import pipeline_models, require_published, write_pins
from repository.lock import publication_lock
from repository.models import Model, read_repository
from server.generations import LOAD_TIMEOUT_S, load_models, served_generation, wait_drained
from server.health import local_client, model_states
from server.memory import check_memory
from serving.contract.errors import ConfigError, ServerError
from serving.contract.tensors import CHALLENGER, ENSEMBLE, LIVE_MODELS


def load_challenger(grpc_url: str, repo: Path, generation: int) -> int:
    """Serve `generation` as `challenger` beside what the server serves. Return the champion, which is now pinned as well.

    Raises ConfigError when it is not published or is the champion; ServerError when it does not fit or does not load: then the
    champion is served as before.
    """
    with publication_lock(repo):
        require_published(repo, generation)
        champion = served_generation(grpc_url)
        if generation == champion:
            raise ConfigError(f"Generation {generation} is the one that the server serves; a challenger is another one.")
        if others := set(challengers(repo)) - {generation}:
            raise ServerError(f"Generation {others.pop()} is served as challenger. Stop its experiment first.")
        check_memory(challenger_models(repo, generation))
        write_challenger(repo, generation)
        write_pins(repo, champion)
        with local_client(grpc_url) as client:
            try:
                load_models(client, *step_names(repo), CHALLENGER)
            except InferenceServerException as error:
                with contextlib.suppress(InferenceServerException):  # the first error is the one to report
                    client.unload_model(CHALLENGER)
                remove_challenger(repo)
                write_pins(repo, champion)
                _release(client, repo)
                raise ServerError(
                    f"The server serves generation {champion} alone, generation {generation} does not load: {error.message()}"
                ) from error
    return champion


def unload_challenger(grpc_url: str, repo: Path) -> int | None:
    """Unload the challenger once it has answered its requests. Return its generation, None where there was none.

    Raises ServerError when the server does not answer.
    """
    with publication_lock(repo):
        champion, loaded = served_generation(grpc_url), challengers(repo) or loaded_challengers(grpc_url)
        if not loaded:
            return None
        with local_client(grpc_url) as client:
            client.unload_model(CHALLENGER, client_timeout=LOAD_TIMEOUT_S)
            wait_drained(grpc_url, loaded[0], CHALLENGER)
            remove_challenger(repo)
            write_pins(repo, champion)
            _release(client, repo)
    return loaded[0]


def loaded_challengers(grpc_url: str) -> list[int]:
    """Return the challenger's generation of a server whose repository names none, because another server unloaded its own."""
    states = model_states(grpc_url) or {}
    return [version for (name, version), (state, _) in states.items() if name == CHALLENGER and state == "READY"]


def step_names(repo: Path) -> list[str]:
    """Return the models that hold both generations: the steps of the ensemble, none in the fused layout."""
    models = pipeline_models(read_repository(repo))
    return [model.name for model in models if model.name not in (ENSEMBLE, *LIVE_MODELS)]


def challenger_models(repo: Path, generation: int) -> list[Model]:
    """Return the models as a server of the challenger alone would load them, for an estimate of its memory."""
    models = [model for model in pipeline_models(read_repository(repo)) if model.name not in LIVE_MODELS]
    for model in models:
        model.config.version_policy.Clear()
        model.config.version_policy.specific.versions.append(generation)
    return models


def _release(client: grpcclient.InferenceServerClient, repo: Path) -> None:
    """Let the steps drop what the repository no longer names: a failure only costs memory."""
    try:
        load_models(client, *step_names(repo))
    except InferenceServerException as error:
        raise ServerError(
            f"The challenger is gone, and its stages go on taking memory until the server is started again: {error.message()}"
        ) from error
