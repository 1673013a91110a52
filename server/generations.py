"""Moving a running server to another generation of its repository, and back, without a failed request.

Generation g is version g of every model. What makes a generation the served one is two things in the configs on disk:

    recommend/config.pbtxt      every step pinned to model_version g;  version_policy specific [g]
    <step>/config.pbtxt         version_policy specific [g]

While it moves from `old` to `new`, the steps first load [old, new] side by side, then the ensemble is pinned to `new`
(tritonserver swaps it in one step: a request runs through one ensemble or the other), then, when the old ensemble has answered
what it had accepted, the steps drop `old`. At every moment the configs on disk are ones a restart would serve.

tritonserver reloads a version it already holds when anything in that version's folder changed since. So a version folder must
never change once it is published; that includes the `__pycache__` Python would write beside model.py, which is why the
publisher puts an empty *file* of that name there. Without it nothing fails, but every move loads the served generation again.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import tritonclient.grpc as grpcclient
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2
from tritonclient.utils import InferenceServerException

from server.health import model_states
from server.repository import Model, read_repository
from stages.contract import ENSEMBLE
from stages.errors import ConfigError, ServerError

LOAD_TIMEOUT_S = 300.0
DRAIN_TIMEOUT_S = 60.0
DRAIN_GRACE_S = 1.0  # for requests of an ensemble object that a load of its steps has replaced meanwhile
POLL_S = 0.05


def published_generations(repo: Path, ensemble: str = ENSEMBLE) -> tuple[int, ...]:
    """Generations of which every model has its version folder."""
    models = _pipeline(read_repository(repo), ensemble)
    return tuple(sorted(set.intersection(*(set(model.versions_on_disk) for model in models))))


def pinned_generation(repo: Path, ensemble: str = ENSEMBLE) -> int:
    """The generation that the ensemble's config on disk serves."""
    [model] = [model for model in read_repository(repo) if model.name == ensemble]
    pins = {step.model_version for step in model.config.ensemble_scheduling.step}
    if len(pins) != 1:
        raise ConfigError(
            f"The steps of {model.folder}/config.pbtxt are pinned to versions {sorted(pins)}; expected one for all."
        )
    return pins.pop()


def pin(repo: Path, generation: int, keep: tuple[int, ...] = (), ensemble: str = ENSEMBLE) -> None:
    """Write the configs so that `generation` answers, and the steps hold it and those of `keep`. Nothing is loaded."""
    for model in _pipeline(read_repository(repo), ensemble):
        config = model.config
        versions = {generation} if model.is_ensemble else {generation, *keep}
        config.version_policy.Clear()
        config.version_policy.specific.versions.extend(sorted(versions))
        for step in config.ensemble_scheduling.step:
            step.model_version = generation
        _replace_config(model, config)


def activate(grpc_url: str, repo: Path, generation: int, ensemble: str = ENSEMBLE) -> int:
    """Move the running server at `grpc_url`, which serves `repo`, to `generation`; returns the generation it served before.

    ConfigError when the generation is not published; ServerError when the server refuses it, which then serves what it did.
    """
    published = published_generations(repo, ensemble)
    if generation not in published:
        raise ConfigError(
            f"Generation {generation} is not in {repo}, which holds {list(published)}. Publish it with `make export`."
        )
    old = served_generation(grpc_url, ensemble)
    if old == generation:
        pin(repo, generation, ensemble=ensemble)
        return old
    steps = [model.name for model in _pipeline(read_repository(repo), ensemble) if not model.is_ensemble]
    with grpcclient.InferenceServerClient(grpc_url) as client:
        pin(repo, old, keep=(generation,), ensemble=ensemble)
        try:
            for step in steps:
                client.load_model(step, client_timeout=LOAD_TIMEOUT_S)
            pin(repo, generation, keep=(old,), ensemble=ensemble)
            client.load_model(ensemble, client_timeout=LOAD_TIMEOUT_S)
        except InferenceServerException as error:
            pin(repo, old, ensemble=ensemble)
            for name in (ensemble, *steps):
                client.load_model(name, client_timeout=LOAD_TIMEOUT_S)
            raise ServerError(
                f"The server stays at generation {old}, generation {generation} does not load: {error.message()}"
            ) from error
        _wait_drained(grpc_url, ensemble, old)
        pin(repo, generation, ensemble=ensemble)
        for step in steps:
            client.load_model(step, client_timeout=LOAD_TIMEOUT_S)
    return old


def served_generation(grpc_url: str, ensemble: str = ENSEMBLE) -> int:
    """The generation the running server answers with."""
    states = model_states(grpc_url)
    if states is None:
        raise ServerError(f"No server answers at {grpc_url}. Start it with `make serve`.")
    ready = [version for (name, version), (state, _) in states.items() if name == ensemble and state == "READY"]
    if len(ready) != 1:
        raise ServerError(f"The server at {grpc_url} has {len(ready)} ready versions of {ensemble}; expected one. Restart it.")
    return ready[0]


def _pipeline(models: list[Model], ensemble: str) -> list[Model]:
    """The ensemble's steps and the ensemble itself, in the order they must load."""
    by_name = {model.name: model for model in models}
    if ensemble not in by_name:
        raise ConfigError(f"The repository has no model {ensemble}; it has {sorted(by_name)}.")
    names = [step.model_name for step in by_name[ensemble].config.ensemble_scheduling.step]
    if missing := [name for name in names if name not in by_name]:
        raise ConfigError(f"{ensemble} has steps {missing}, which are not in the repository; it has {sorted(by_name)}.")
    return [by_name[name] for name in (*dict.fromkeys(names), ensemble)]


def _replace_config(model: Model, config: model_config_pb2.ModelConfig) -> None:
    """Atomically, and with the new file beside the model folder: tritonserver looks at everything inside."""
    beside = model.folder.parent / f".{model.name}.config.pbtxt.{os.getpid()}"
    beside.write_text(text_format.MessageToString(config))
    beside.replace(model.folder / "config.pbtxt")


def _wait_drained(grpc_url: str, ensemble: str, generation: int) -> None:
    """Until the unloaded ensemble has answered what it had accepted; past the timeout its requests would have timed out too."""
    deadline = time.monotonic() + DRAIN_TIMEOUT_S
    while time.monotonic() < deadline:
        state, _ = (model_states(grpc_url) or {}).get((ensemble, generation), ("UNKNOWN", ""))
        if state == "UNAVAILABLE":
            break
        time.sleep(POLL_S)
    time.sleep(DRAIN_GRACE_S)
