"""Adapt stages to Triton's Python backend.

    requests ─▶ join (one array per tensor) ─▶ unpack ─▶ faults? ─▶ one stage call ─▶ pack ─▶ split ─▶ responses

A published `model.py` is `TritonPythonModel = make_triton_model(Rank)`. In the fused layout it is
`make_triton_model(Preprocess, Retrieve, Rank, Rerank)`: one stage after another on the same arrays, without a server between.
A malformed request gets an error of its own; the rest of its batch is answered. In `stages/` only the adapters know Triton:
this folder, parts/triton.py and live/triton.py.
"""

from __future__ import annotations

import json
import time
import traceback
from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from serving.contract.artifacts import MANIFEST_FILE, StageInfo, read_stage, verify_manifest
from serving.contract.errors import ArtifactError, RecommenderError, RequestError
from serving.contract.locks import hold_shared_lock
from serving.contract.logs import format_json_line
from serving.contract.refused_rows import describe_refused
from serving.contract.tensors import (
    BEGAN,
    ENSEMBLE,
    STAGES,
    ModelSpec,
    RecordSpec,
    compute_stage_ms,
    mark_end,
    pack_records,
    unpack_records,
)
from serving.live.opening import open_reader
from serving.live.reader import Reader
from serving.stages.adapter.deadlines import DeadlineCheck, read_text
from serving.stages.adapter.metrics import Metrics, Reporter, Source

Arrays = dict[str, np.ndarray]


# Names instead of values, because the backend fills pb_utils only after this file is imported.
ERROR_CODES = {
    "INVALID_ARGUMENT": "INVALID_ARG",
    "UNAVAILABLE": "UNAVAILABLE",
    "FAILED_PRECONDITION": "UNAVAILABLE",  # the Python backend has no code of that name
    "INTERNAL": "INTERNAL",
}
TIMINGS = "timings"  # request parameter: whether the answer shall say how long each stage took


def make_triton_model(*stage_classes: type) -> type[StageModel]:
    """Return a `TritonPythonModel` class that serves one stage (`load`, `find_faults`, `__call__`), or several in order."""

    class TritonPythonModel(StageModel):
        stage_types = stage_classes

    return TritonPythonModel


@dataclass(frozen=True)
class Link:
    """One stage of the chain that a model runs."""

    spec: ModelSpec
    stage: Any
    metrics: Metrics


class StageModel:
    """A Triton model of one stage, or of all stages in a chain."""

    stage_types: tuple[Any, ...]
    report_every_s = 1.0  # period of the Reporter

    def initialize(self, args: dict[str, str]) -> None:
        folder = Path(args["model_repository"]) / args["model_version"]
        try:
            verify_manifest(folder)
            self.hold = hold_shared_lock(folder / MANIFEST_FILE)  # a publication removes no generation that is loaded
            info = read_stage(folder)
            self.live = open_reader(folder.parents[1], info)
            self.chain = self._load_chain(folder, info)
            self.spec = info.spec if len(self.chain) > 1 else self.chain[0].spec
            check_config(self.spec, json.loads(args["model_config"]))
        except RecommenderError as error:
            raise pb_utils.TritonModelException(f"{args['model_name']}: {error}") from error
        self.first = self.chain[0]
        self.deadlines = DeadlineCheck(self.chain[-1].spec.name) if self.chain[-1].spec.name in STAGES else None
        instance_labels = {"instance": args["model_instance_name"], "version": args["model_version"]}
        sources: list[Source] = [(link.metrics.list_measurements, {}) for link in self.chain]
        sources += [
            (link.stage.list_measurements, instance_labels) for link in self.chain if hasattr(link.stage, "list_measurements")
        ]
        self.reporter = Reporter(sources, self.report_every_s)

    def finalize(self) -> None:
        """Release what the stages share with other processes. The server calls this when it unloads the version."""
        self.reporter.close()
        for link in self.chain:
            if hasattr(link.stage, "close"):
                link.stage.close()
        self.live.close()
        self.hold.close()

    def _load_chain(self, folder: Path, info: StageInfo) -> list[Link]:
        folders = [folder / name for name in STAGES] if info.stage == ENSEMBLE else [folder]
        infos = [read_stage(path) for path in folders]
        stages = [with_live(kind.load(path), self.live) for kind, path in zip(self.stage_types, folders, strict=True)]
        return [Link(own_info.spec, stage, Metrics(own_info.stage)) for own_info, stage in zip(infos, stages, strict=True)]

    def execute(self, requests: list[Any]) -> list[Any]:
        late = self.deadlines.refuse_late(requests) if self.deadlines else {}
        if len(late) == len(requests):
            return [self._refuse(late[i]) for i in range(len(requests))]
        tensors, rows, incomplete = join_requests(self.spec, requests)
        inputs = unpack_records(self.spec.inputs, tensors)
        errors: dict[int, pb_utils.TritonError] = {}
        faults = self._find_faults(inputs, rows, incomplete)
        if faults or incomplete:
            messages = group_by_request(faults, rows) | incomplete
            errors = {request: make_invalid_argument(message) for request, message in messages.items()}
            self.first.metrics.rejected += len(errors)
        errors |= {place: make_unavailable(message) for place, message in late.items()}
        self.first.metrics.late += len(late)
        healthy = [i for i in range(len(requests)) if i not in errors]
        is_timed = any(asks_for_timings(read_text(request.parameters)) for request in requests)
        outputs = self._answer(requests, inputs, rows, healthy, errors, is_timed) if healthy else {}
        return [
            pb_utils.InferenceResponse(error=errors[i]) if i in errors else self._respond(outputs[i])
            for i in range(len(requests))
        ]

    def _find_faults(self, inputs: Arrays, rows: list[int], incomplete: dict[int, str]) -> dict[int, str]:
        """Return a message for each malformed row. Only the first stage sees untrusted input.

        rows: number of rows of each request; incomplete: message for each request that lacks a required tensor
        """
        return self.first.stage.find_faults(inputs)

    def _refuse(self, message: str) -> Any:
        self.first.metrics.late += 1
        return pb_utils.InferenceResponse(error=make_unavailable(message))

    def _respond(self, outputs: Arrays) -> Any:
        return respond(self.spec, outputs)

    def _answer(
        self,
        requests: list[Any],
        inputs: Arrays,
        rows: list[int],
        healthy: list[int],
        errors: dict[int, Any],
        is_timed: bool,
    ) -> dict[int, Arrays]:
        """Return the outputs of the healthy requests by request, and add the errors of those that fail to `errors`.

        One call answers all of them. If it fails, those that are not at fault are called again: together where the error says
        which rows are, otherwise each alone.
        """
        try:
            outputs = self._call(take(inputs, rows, healthy), is_timed)
        except Exception as error:
            faults = dict.fromkeys(error.rows, str(error)) if isinstance(error, RequestError) else {}
            if faults:
                refused = group_by_request(faults, [rows[i] for i in healthy])
                faulty = {healthy[place]: make_invalid_argument(message) for place, message in refused.items()}
                errors |= faulty
                others = [i for i in healthy if i not in faulty]
                return self._answer(requests, inputs, rows, others, errors, is_timed) if others else {}
            if len(healthy) > 1:
                alone = (self._answer(requests, inputs, rows, [i], errors, is_timed) for i in healthy)
                return {i: outputs for answer in alone for i, outputs in answer.items()}
            errors[healthy[0]] = make_caller_error(self.spec.name, error, read_text(requests[healthy[0]].request_id))
            return {}
        return dict(zip(healthy, split(outputs, [rows[i] for i in healthy]), strict=True))

    def _call(self, inputs: Arrays, is_timed: bool) -> Arrays:
        """Return the output tensors of a batch by name, each [B, *dims].

        inputs: the first stage's fields, each [B, *dims]; is_timed: whether to write the times of the stages
        """
        tensors, batch = dict(inputs), len(next(iter(inputs.values())))
        call_started_s = time.monotonic()
        for link in self.chain:
            started_s = time.monotonic()
            outputs = link.stage({tensor.name: tensors[tensor.name] for tensor in link.spec.input_fields})
            tensors.update(outputs)
            if is_timed and link.spec.name in STAGES:
                tensors.update(time_stage(link.spec.name, tensors, started_s))
            check_outputs(link.spec, tensors, batch)
            link.metrics.count(read_degraded(outputs), time.monotonic() - started_s)
        if self.deadlines:
            self.deadlines.count(time.monotonic() - call_started_s)
        return pack_records(self.spec.outputs, tensors, validated=True)


def with_live(stage: Any, live: Reader) -> Any:
    """Return the stage with a live store attached, or the stage itself where it uses none."""
    return stage.with_live(live) if hasattr(stage, "with_live") else stage


def asks_for_timings(parameters: str) -> bool:
    """Return whether a request's parameters, as JSON, ask how long each stage took."""
    if TIMINGS not in parameters:
        return False
    try:
        return bool(json.loads(parameters)[TIMINGS])
    except (ValueError, TypeError, KeyError):  # as of DEADLINE: a malformed one must not fail the other requests
        return False


def time_stage(stage: str, tensors: Arrays, started_s: float) -> Arrays:
    """Return the lineage with the end of a stage, which is now, or the answer's `stage_ms` after the last stage.

    started_s: monotonic second of the stage's begin, 0 if the lineage has it. All processes of the machine have the same clock.
    """
    lineage = mark_end(tensors["lineage"], stage, int(1e6 * started_s), time.monotonic_ns() // 1_000)
    return {"stage_ms": compute_stage_ms(lineage)} if stage == STAGES[-1] else {"lineage": lineage}


def read_degraded(outputs: Arrays) -> np.ndarray:
    """Return the Degraded bits in a stage's outputs, int [B, 1]: the last stage's own tensor, or a column of the lineage."""
    return outputs["degraded"] if "degraded" in outputs else outputs["lineage"][:, 1:BEGAN]


def check_config(spec: ModelSpec, config: dict[str, Any]) -> None:
    """Raise ArtifactError when config.pbtxt and `stage.json` disagree about a tensor."""
    for side, tensors in (("input", spec.inputs), ("output", spec.outputs)):
        stated: dict[str, Any] = {t["name"]: (t["data_type"], tuple(int(d) for d in t["dims"])) for t in config[side]}
        needed: dict[str, Any] = {t.name: (f"TYPE_{'STRING' if t.dtype == 'BYTES' else t.dtype}", t.dims) for t in tensors}
        for record in (t for t in tensors if isinstance(t, RecordSpec)):
            needed[record.parameter] = record.stated_fields
            if record.parameter in config["parameters"]:
                stated[record.parameter] = config["parameters"][record.parameter]["string_value"]
        if stated != needed:
            differing = sorted(name for name in stated.keys() | needed.keys() if stated.get(name) != needed.get(name))
            facts = "; ".join(
                f"{n}: config.pbtxt {stated.get(n, 'lacks it')}, stage.json {needed.get(n, 'lacks it')}" for n in differing
            )
            raise ArtifactError(f"config.pbtxt and stage.json disagree about {side}s ({facts}). Export the repository again.")


def join_requests(spec: ModelSpec, requests: list[Any]) -> tuple[Arrays, list[int], dict[int, str]]:
    """Return the requests' inputs by name, each [sum of rows, *dims]; each request's number of rows; and messages by request.

    Missing optional tensors take their fill value. A request without a required one gets a message, and zeros in its place, so
    that the others can be answered: tritonserver itself only counts a request's tensors.
    """
    request_inputs = [{tensor.name(): tensor.as_numpy() for tensor in request.inputs()} for request in requests]
    rows = [len(next(iter(tensors.values()))) for tensors in request_inputs]
    incomplete: dict[int, str] = {}
    for tensor in spec.inputs:
        for place, (tensors, n) in enumerate(zip(request_inputs, rows, strict=True)):
            if tensor.name not in tensors:
                tensors[tensor.name] = tensor.make_filled(n)
                if not tensor.optional:
                    incomplete.setdefault(place, f"The request has no {tensor.text}. Send it with every request.")
    if len(request_inputs) == 1:
        return request_inputs[0], rows, incomplete
    return {t.name: np.concatenate([tensors[t.name] for tensors in request_inputs]) for t in spec.inputs}, rows, incomplete


def take(inputs: Arrays, rows: list[int], requests: list[int]) -> Arrays:
    """Return the inputs of some requests, in order; the same arrays when these are all requests.

    rows: number of rows of each request in `inputs`; requests: places of the wanted ones
    """
    if len(requests) == len(rows):
        return inputs
    keep = np.zeros(len(rows), bool)
    keep[requests] = True
    mask = np.repeat(keep, rows)
    return {name: array[mask] for name, array in inputs.items()}


def split(outputs: Arrays, rows: list[int]) -> list[Arrays]:
    """Return the outputs of each request, as views of the joined arrays. rows: number of rows of each request"""
    if len(rows) == 1:
        return [outputs]
    return [
        {name: array[end - n : end] for name, array in outputs.items()} for n, end in zip(rows, accumulate(rows), strict=True)
    ]


def group_by_request(faults: dict[int, str], rows: list[int]) -> dict[int, str]:
    """Return one message for each faulty request, from faults by row. rows: number of rows of each request"""
    ends = list(accumulate(rows))
    grouped: dict[int, dict[int, str]] = {}
    for row, fault in faults.items():
        request = bisect_right(ends, row)
        grouped.setdefault(request, {})[row - ends[request] + rows[request]] = fault
    return {request: describe_refused(row_faults, rows[request]) for request, row_faults in grouped.items()}


def respond(spec: ModelSpec, outputs: Arrays) -> Any:
    return pb_utils.InferenceResponse(output_tensors=[pb_utils.Tensor(t.name, outputs[t.name]) for t in spec.outputs])


def check_outputs(spec: ModelSpec, outputs: Arrays, batch: int) -> None:
    """Raise RecommenderError when a stage's outputs break the contract, so that no caller sees a misshapen tensor."""
    for tensor in spec.output_fields:
        array = outputs[tensor.name]
        if not tensor.fits(array, batch):
            raise RecommenderError(
                f"The stage {spec.name} gave {tensor.name} as {array.dtype} {array.shape}; "
                f"the contract says {tensor.dtype} {(batch, *tensor.dims)}."
            )


def make_invalid_argument(message: str) -> Any:
    return pb_utils.TritonError(message, pb_utils.TritonError.INVALID_ARG)


def make_unavailable(message: str) -> Any:
    return pb_utils.TritonError(message, pb_utils.TritonError.UNAVAILABLE)


def make_caller_error(stage: str, error: Exception, request_id: str) -> Any:
    """Return the error for the caller: our own errors in full; of others only the type, and the traceback goes to the log."""
    if isinstance(error, RecommenderError):
        return pb_utils.TritonError(str(error), getattr(pb_utils.TritonError, ERROR_CODES[error.status]))
    fields = {"stage": stage, "request_id": request_id, "exception": traceback.format_exc()}
    pb_utils.Logger.log_error(format_json_line("ERROR", "adapter", f"{type(error).__name__} in {stage}", time.time(), **fields))
    return pb_utils.TritonError(f"Internal error in {stage} ({type(error).__name__}); the server's log has the details.")
