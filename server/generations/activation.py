"""Move a running server to another generation of its repository, and back, without a failed request.

Generation g is version g of every model. Two settings in the configs on disk select the served generation:

    recommend/config.pbtxt      every step pinned to model_version g;  version_policy specific [g]
    <step>/config.pbtxt         version_policy specific [g]

A move from `old` to `new` has three steps. The steps of the ensemble load [old, new]; the ensemble is pinned to `new`
(tritonserver swaps it atomically: a request runs through one ensemble or the other); when the old ensemble has answered its
requests, the steps unload `old`. At every moment the configs on disk can be served after a restart. Where `recommend` is one
model without steps, only the swap remains.

Moves and publications take the lock of repository/lock.py, so that neither sees half-written configs.

Where the repository is read-only, or other servers use it too, nothing is written (`writes=False`): the server is sent the
configs of each step, and loads models by them instead of those on disk.

tritonserver reloads a version it already holds when anything changed in that version's folder, in another folder of the model
(warmup/), or in its config apart from instance_group and version_policy. So none of these may change after the publication,
not even by a `__pycache__` that Python writes beside model.py: the publisher puts an empty *file* of that name there. After a
change nothing fails, but a move reloads the served generation.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import tritonclient.grpc as grpcclient
from google.protobuf.json_format import MessageToJson
from tritonclient.utils import InferenceServerException

from repository.challenger import read_challengers
from repository.generations import order_models, read_pinned_to, require_published, write_pins
from repository.lock import hold_publication_lock
from repository.triton.models import Model, read_repository
from server.status.health import find_held_versions, open_local_client, read_model_states
from serving.contract.errors import ArtifactError, ConfigError, ServerError
from serving.contract.generations import read_pinned_generation
from serving.contract.tensors import ENSEMBLE

LOAD_TIMEOUT_S = 300.0
BROKEN_CONNECTION = "Socket closed"  # part of gRPC's message
RECONNECT_S = 0.3  # for a moment a channel still takes calls for the connection that broke
DRAIN_TIMEOUT_S = 60.0
DRAIN_GRACE_S = 1.0  # for requests of an old ensemble that was replaced in the first step already
PUBLICATION_TIMEOUT_S = 60.0  # a publication takes seconds, and a server that is down should not wait for one that is stuck
POLL_S = 0.05


def activate(grpc_url: str, repo: Path, generation: int, writes: bool = True) -> int:
    """Move the running server at `grpc_url`, which serves `repo`, to `generation`. Return the generation that it served before.

    writes: whether to pin the repository to it too. False: nothing is written, and the caller sees to the publication lock

    Raises ConfigError when the generation is not published; ServerError when the server refuses it and keeps the old one.
    """
    with hold_publication_lock(repo) if writes else contextlib.nullcontext():
        published = require_published(repo, generation)
        old = find_served_generation(grpc_url)
        if writes and old != generation and (others := read_challengers(repo)):
            raise ServerError(
                f"Generation {others[0]} is served beside {old} as challenger. Stop the experiment before the move: "
                "python -m server experiment stop"
            )
        if old not in published:
            raise ServerError(
                f"The server answers with generation {old}, which is no longer in {repo}; a move needs both generations "
                "there. Restart the server: make stop, then make serve."
            )
        steps = [model.name for model in order_models(read_repository(repo)) if model.name != ENSEMBLE]
        with open_local_client(grpc_url) as client:
            if old != generation:
                _move(client, repo, steps, old, generation, writes)
                wait_drained(grpc_url, old)
            held_versions = find_held_versions(grpc_url) - {generation}
            _pin_and_unload(client, grpc_url, repo, steps if held_versions else [], generation, writes)
    return old


def _move(client: grpcclient.InferenceServerClient, repo: Path, steps: list[str], old: int, new: int, writes: bool) -> None:
    """Load `new` beside `old` and switch the ensemble. When it does not load, restore `old` and raise ServerError."""
    try:
        _load_pinned(client, repo, steps, old, writes, keep=(new,))
        _load_pinned(client, repo, [ENSEMBLE], new, writes, keep=(old,))
    except InferenceServerException as error:
        with contextlib.suppress(InferenceServerException):  # the first error is the one to report
            _load_pinned(client, repo, [ENSEMBLE, *steps], old, writes)
        reason = (error.message() or "").partition("\n")[0]  # a traceback is for the server's log
        remedy = (
            f"\nThe repository names {old} again. To serve {new} anyway: python -m export pin {new} --repo {repo}, then start "
            "the server again."
        )
        raise ServerError(
            f"The server stays at generation {old}, generation {new} does not load: {reason}{remedy if writes else ''}"
        ) from error


def _load_pinned(
    client: grpcclient.InferenceServerClient,
    repo: Path,
    names: list[str],
    generation: int,
    writes: bool,
    keep: tuple[int, ...] = (),
) -> None:
    """Load models in order by the configs of `write_pins`, which are written first, or only sent."""
    if writes:
        write_pins(repo, generation, keep)
        load_models(client, *names)
    else:
        models = {model.name: model for model in read_pinned_to(repo, generation, keep)}
        load_by_sent_configs(client, [models[name] for name in names])


def _pin_and_unload(
    client: grpcclient.InferenceServerClient, grpc_url: str, repo: Path, steps: list[str], generation: int, writes: bool
) -> None:
    """Pin `generation`, which is serving already, and unload other versions of the steps: a failure only costs memory."""
    try:
        _load_pinned(client, repo, steps, generation, writes)
    except InferenceServerException as error:
        raise ServerError(
            f"The server answers with generation {find_served_generation(grpc_url)}, but did not unload what it served before, "
            f"which keeps its memory. Try again (`python -m server activate --generation {generation}`), or restart it: "
            f"make stop, then make serve. It said: {error.message()}"
        ) from error


def load_models(client: grpcclient.InferenceServerClient, *models: str) -> None:
    """Load models in order, each as its config says. Raises InferenceServerException at the first that does not.

    Where the connection breaks, the order is given once more: a model that is loaded again is the same.
    """
    for model in models:
        _load(client, model)


def load_by_sent_configs(
    client: grpcclient.InferenceServerClient, models: Iterable[Model], deadline_s: float = float("inf")
) -> None:
    """Load models as `load_models` does, but by their configs here: those on disk are not read, whatever they say.

    deadline_s: of time.monotonic(); no model is waited for any longer
    """
    for model in models:
        left_s = min(max(deadline_s - time.monotonic(), POLL_S), LOAD_TIMEOUT_S)
        _load(client, model.name, MessageToJson(model.config, preserving_proto_field_name=True), left_s)


def _load(
    client: grpcclient.InferenceServerClient, name: str, config: str | None = None, timeout_s: float = LOAD_TIMEOUT_S
) -> None:
    try:
        client.load_model(name, config=config, client_timeout=timeout_s)
    except InferenceServerException as error:
        if BROKEN_CONNECTION not in str(error):
            raise
        time.sleep(RECONNECT_S)
        client.load_model(name, config=config, client_timeout=timeout_s)


def find_served_generation(grpc_url: str) -> int:
    """Return the generation that the running server serves. Raises ServerError when it does not answer."""
    states = read_model_states(grpc_url)
    if states is None:
        raise ServerError(
            f"No server answers at {grpc_url}. Start it with `make serve`; if it hangs, end it with `make stop` first."
        )
    ready = [version for (name, version), (state, _) in states.items() if name == ENSEMBLE and state == "READY"]
    if len(ready) != 1:
        raise ServerError(f"The server at {grpc_url} has {len(ready)} ready versions of {ENSEMBLE}; expected one. Restart it.")
    return ready[0]


def find_pinned_generation(repo: Path) -> int:
    """Return the pinned generation; 0 in a repository that is not one of ours."""
    try:
        return read_pinned_generation(repo)
    except ArtifactError:
        return 0


@contextlib.contextmanager
def publish_nothing(repo: Path) -> Iterator[None]:
    """Let no other process publish to a repository, while a server starts.

    A server also starts where the repository is read-only, or another process keeps the lock for PUBLICATION_TIMEOUT_S.
    """
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(ConfigError, ServerError):
            stack.enter_context(hold_publication_lock(repo, PUBLICATION_TIMEOUT_S))
        yield


def wait_drained(grpc_url: str, generation: int, model: str = ENSEMBLE, timeout_s: float = DRAIN_TIMEOUT_S) -> bool:
    """Wait until an old ensemble has answered its requests, for `timeout_s` at most. Return whether it has."""
    deadline_s, drained = time.monotonic() + timeout_s, False
    while not drained and time.monotonic() < deadline_s:
        state, _ = (read_model_states(grpc_url) or {}).get((model, generation), ("UNKNOWN", ""))
        drained = state == "UNAVAILABLE"
        if not drained:
            time.sleep(POLL_S)
    time.sleep(DRAIN_GRACE_S)
    return drained
