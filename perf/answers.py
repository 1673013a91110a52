"""Are the answers those of the pipeline in process? A ratio of speeds counts only for equal answers."""

from __future__ import annotations

import tritonclient.grpc as grpcclient

from export.repository.recorded import RECORDED_FILE, compare_answers, read_recorded
from perf.target import Site
from perf.workload import Arrays, ask
from stages.contract import ENSEMBLE, ModelSpec

COMPARED_ROWS = 256


def differing_answers(site: Site, recommend: ModelSpec) -> str:
    """-> "" when the server answers as the export's process did (ids equal, scores within 1e-5), else what differs."""
    recorded = read_recorded(site.repo / ENSEMBLE / str(site.generation) / RECORDED_FILE)
    difference = compare_answers(asked(site, recommend, first_rows(recorded.inputs)), first_rows(recorded.outputs))
    return difference and f"{site.repo.name}: {difference}"


def asked(site: Site, recommend: ModelSpec, inputs: Arrays) -> Arrays:
    """-> the server's answers to inputs [R, *dims], each [R, *dims]."""
    with grpcclient.InferenceServerClient(site.grpc_url) as client:
        return ask(client, recommend, "", inputs)


def first_rows(tensors: Arrays) -> Arrays:
    return {name: rows[:COMPARED_ROWS] for name, rows in tensors.items()}
