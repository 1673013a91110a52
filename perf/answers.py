"""Compare served answers with those of the pipeline in process. A ratio of speeds counts only for equal answers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from google.protobuf.message import DecodeError
from tritonclient.grpc import service_pb2 as pb

from perf.load.open_loop import run_load
from perf.load.workload import Arrays, ask, read_recorded_requests, serialise
from perf.target import Site
from repository.checks.recorded import Recorded, compare_answers
from repository.tables import has_update_source
from server.status.health import open_local_client
from serving.contract.errors import ConfigError, ServerError
from serving.contract.generations import read_pinned_generation
from serving.contract.tensors import ModelSpec

COMPARED_ROWS = 256
AT_ONCE = 64  # the largest batch, so that further ones would only wait


def is_comparable(repo: Path, generation: int) -> bool:
    """Return whether a server must give the recorded answers: it need not if rows are updated while they are served."""
    return not has_update_source(repo, generation)


def require_comparable(repo: Path) -> None:
    """Raise ConfigError for a repository whose answers cannot be compared, because ratios measured on it would not count."""
    if not is_comparable(repo, read_pinned_generation(repo)):
        raise ConfigError(
            f"The rows of {repo} are updated while they are served, so its answers are not the recorded ones, and ratios count "
            "only for equal answers. Export one without [tables] brokers, and measure that."
        )


def compare_to_export(site: Site, recommend: ModelSpec) -> str:
    """Return "" when the server answers as the export's process did, else the difference.

    Return "" without comparing where `is_comparable` is false.
    """
    if not is_comparable(site.repo, site.generation):
        return ""
    difference = compare_to_recorded(site.grpc_url, recommend, read_recorded_requests(site.repo, site.generation))
    return difference and f"{site.repo.name}: {difference}"


def compare_to_recorded(url: str, recommend: ModelSpec, recorded: Recorded) -> str:
    """Return "" when the server's answers are the recorded ones (ids equal, scores within 1e-5), else the difference.

    The same requests are sent twice: several per call, then one per call with many calls at once, so that the server forms
    its own batches.
    """
    difference = compare_answers(
        ask_server(url, recommend, take_first_rows(recorded.inputs)), take_first_rows(recorded.outputs)
    )
    return difference or compare_at_once(url, recommend, recorded)


def compare_at_once(url: str, recommend: ModelSpec, recorded: Recorded) -> str:
    """Return "" when each of COMPARED_ROWS requests, AT_ONCE of them due at the same instant, gets its recorded answer."""
    bodies, messages = serialise(recommend, take_first_rows(recorded.inputs)), []
    for first in range(0, len(bodies), AT_ONCE):
        batch = bodies[first : first + AT_ONCE]
        outcome = run_load(url, batch, np.zeros(len(batch)))
        if not outcome.ok.all():
            return f"{len(batch)} requests at once: {(~outcome.ok).sum()} were not answered, {dict(outcome.errors)}"
        messages += outcome.messages
    difference = compare_messages(recommend, messages, take_first_rows(recorded.outputs))
    return difference and f"{AT_ONCE} requests at once: {difference}"


def ask_server(url: str, recommend: ModelSpec, inputs: Arrays) -> Arrays:
    """Return the server's answers to inputs [R, *dims], each [R, *dims]."""
    with open_local_client(url) as client:
        return ask(client, recommend, "", inputs)


def take_first_rows(tensors: Arrays) -> Arrays:
    return {name: rows[:COMPARED_ROWS] for name, rows in tensors.items()}


def compare_messages(recommend: ModelSpec, messages: list[bytes], expected: Arrays) -> str:
    """Return "" when serialised answers of one row each are those expected ([N, *dims]); else the difference."""
    try:
        return compare_answers(read_tensors(recommend, messages), expected)
    except ServerError as error:
        return str(error)


def count_degraded(recommend: ModelSpec, messages: list[bytes]) -> int:
    """Return how many serialised answers of one row say that they are degraded."""
    return int(np.count_nonzero(read_tensors(recommend, messages)["degraded"]))


def read_tensors(model: ModelSpec, messages: list[bytes]) -> Arrays:
    """Return each output [N, *dims] of N serialised ModelInferResponses of one row. Raises ServerError for other messages."""
    try:
        return _read_tensors(model, messages)
    except (DecodeError, KeyError, ValueError) as error:
        raise ServerError(f"an answer is none of {model.name}: {error!r}") from error


def _read_tensors(model: ModelSpec, messages: list[bytes]) -> Arrays:
    raw: dict[str, list[bytes]] = {tensor.name: [] for tensor in model.outputs}
    for message in messages:
        answer = pb.ModelInferResponse.FromString(message)
        for output, content in zip(answer.outputs, answer.raw_output_contents, strict=True):
            raw[output.name].append(content)
    count = len(messages)
    return {t.name: np.frombuffer(b"".join(raw[t.name]), t.numpy_dtype).reshape(count, *t.dims) for t in model.outputs}
