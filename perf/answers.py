"""Are the answers those of the pipeline in process? A ratio of speeds counts only for equal answers."""

from __future__ import annotations

import numpy as np
import tritonclient.grpc as grpcclient
from tritonclient.grpc import service_pb2 as pb

from export.repository.recorded import compare_answers
from perf.target import Site
from perf.workload import Arrays, ask, read_recorded_of
from stages.contract import ModelSpec

COMPARED_ROWS = 256


def differing_answers(site: Site, recommend: ModelSpec) -> str:
    """-> "" when the server answers as the export's process did (ids equal, scores within 1e-5), else what differs."""
    recorded = read_recorded_of(site.repo, site.generation)
    difference = compare_answers(asked(site, recommend, first_rows(recorded.inputs)), first_rows(recorded.outputs))
    return difference and f"{site.repo.name}: {difference}"


def asked(site: Site, recommend: ModelSpec, inputs: Arrays) -> Arrays:
    """-> the server's answers to inputs [R, *dims], each [R, *dims]."""
    with grpcclient.InferenceServerClient(site.grpc_url) as client:
        return ask(client, recommend, "", inputs)


def first_rows(tensors: Arrays) -> Arrays:
    return {name: rows[:COMPARED_ROWS] for name, rows in tensors.items()}


def differing_messages(recommend: ModelSpec, messages: list[bytes], expected: Arrays) -> str:
    """-> "" when answers off the wire, one row each, are those expected ([N, *dims]); else what differs."""
    return compare_answers(tensors_of(recommend, messages), expected)


def tensors_of(model: ModelSpec, messages: list[bytes]) -> Arrays:
    """-> each output [N, *dims] of N serialised ModelInferResponses of one row."""
    raw: dict[str, list[bytes]] = {tensor.name: [] for tensor in model.outputs}
    for message in messages:
        answer = pb.ModelInferResponse.FromString(message)
        for output, content in zip(answer.outputs, answer.raw_output_contents, strict=True):
            raw[output.name].append(content)
    count = len(messages)
    return {t.name: np.frombuffer(b"".join(raw[t.name]), t.numpy_dtype).reshape(count, *t.dims) for t in model.outputs}
