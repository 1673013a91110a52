"""Times in the adapter: how long the stages took, for callers who ask, and requests that cannot be answered in time."""

import json
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from serving.contract.artifacts import write_manifest
from serving.contract.tensors import (
    compute_stage_ms,
    new_lineage,
    unpack_records,
)
from serving.stages.adapter.deadlines import DeadlineCheck
from serving.stages.parts.preprocess import PreprocessTensors
from serving.stages.parts.specs import (
    PREPROCESS_FEATURES,
    PREPROCESS_TENSORS,
    PartSettings,
    WorkflowColumns,
    make_preprocess_specs,
)
from tests.contract import fake_backend as pb
from tests.contract.stages import INFO, request, spec_as_json, users_of


def test_stages_are_timed_for_who_asks(fused):
    """The four numbers are the times between the ends of the stages; without the parameter, equal requests stay equal bytes."""

    def read_stage_ms(parameters: str) -> list[float]:
        [response] = fused.execute([pb.InferenceRequest(parameters, user_id=np.array([[1]]))])
        return {t.name(): t.as_numpy() for t in response.output_tensors()}["stage_ms"][0].tolist()

    began_s = time.monotonic()
    stage_ms = read_stage_ms('{"timings": true}')
    assert all(0 < spent_ms < 1_000 * (time.monotonic() - began_s) for spent_ms in stage_ms)
    assert sum(stage_ms) < 1_000 * (time.monotonic() - began_s)
    for parameters in ("{}", '{"timings": false}', '{"note": "timings"}', "timings", '["timings"]'):
        assert read_stage_ms(parameters) == [0, 0, 0, 0]


class RawColumns:
    """The first part of preprocess around a workflow of another backend."""

    def __init__(self, spec) -> None:
        self.spec = spec

    @classmethod
    def load(cls, folder: Path) -> "RawColumns":
        return cls(make_preprocess_specs(INFO, COLUMNS)[PREPROCESS_FEATURES])

    def find_faults(self, inputs):
        return {}

    def __call__(self, inputs):
        batch = len(inputs["user_id"])
        tensors = {t.name: np.zeros((batch, *t.dims), t.numpy_dtype) for t in self.spec.outputs}
        return tensors | {"lineage": new_lineage(batch, 7)}


COLUMNS = WorkflowColumns(
    {"age": "INT64"}, {"tier": "INT64", "age": "INT64", "total": "FP32"}, {"tier": 2, "age": 2}, ("total",)
)


def make_part(folder: Path, name: str, kind: type):
    """Return the model of a part of preprocess, as a nested ensemble runs it."""
    from serving.stages.parts.triton import make_part_model

    settings = asdict(PartSettings(name, {}, columns=asdict(COLUMNS)))
    version, spec = folder / name / "7", make_preprocess_specs(INFO, COLUMNS)[name]
    version.mkdir(parents=True)
    replace(INFO, settings=settings).write(version)
    write_manifest(version)
    part_kind: Any = make_part_model(kind)
    part_kind.report_every_s = 3_600
    model = part_kind()
    described = {"model_name": name, "model_instance_name": f"{name}_0_0", "model_instance_kind": "CPU"}
    described |= {"model_instance_device_id": "0", "model_repository": str(version.parent), "model_version": "7"}
    model.initialize(described | {"model_config": spec_as_json(spec)})
    return model


@pytest.mark.parametrize("parameters", ['{"timings": true}', "{}"])
def test_a_stage_in_parts_is_timed_from_the_begin_of_its_first_part(tmp_path, parameters):
    """The workflow of NVTabular between the parts takes most of the time, and its model is not ours."""
    first, last = (
        make_part(tmp_path, PREPROCESS_FEATURES, RawColumns),
        make_part(tmp_path, PREPROCESS_TENSORS, PreprocessTensors),
    )
    user_id, waited_s = np.array([[1]]), 0.02
    began_s = time.monotonic()
    [raw] = first.execute([pb.InferenceRequest(parameters, user_id=user_id)])
    time.sleep(waited_s)
    passed = {t.name(): t.as_numpy() for t in raw.output_tensors() if not t.name().startswith("raw_")}
    encoded = {"encoded_tier": user_id, "encoded_age": user_id, "encoded_total": np.zeros((1, 1), np.float32)}
    [user] = last.execute([pb.InferenceRequest(parameters, b"", user_id=user_id, **passed, **encoded)])
    fields = unpack_records(INFO.spec.outputs, {t.name(): t.as_numpy() for t in user.output_tensors()})
    spent_ms = compute_stage_ms(fields["lineage"])[0, 0]
    if parameters == "{}":
        assert fields["lineage"].tolist() == new_lineage(1, 7).tolist()
    else:
        assert 1_000 * waited_s <= spent_ms <= 1_000 * (time.monotonic() - began_s)
    for model in (first, last):
        model.finalize()


def with_deadline(user_id: int, left_ms: float, budget_ms: float) -> pb.InferenceRequest:
    parameters = {"deadline_unix_ms": int(1_000 * time.time() + left_ms), "budget_ms": int(budget_ms)}
    return pb.InferenceRequest(json.dumps(parameters), user_id=np.array([[user_id]]))


def test_what_cannot_be_in_time_is_refused_before_it_costs_anything(model):
    """The first of four stages must leave three eighths of the time to the others."""
    late, gone, in_time = with_deadline(1, 3_000, 10_000), with_deadline(2, -1, 100), with_deadline(3, 9_000, 10_000)
    responses = model.execute([late, gone])
    assert [response.error().code() for response in responses] == [pb.TritonError.UNAVAILABLE] * 2
    assert "cannot be answered in time" in responses[0].error().message()
    assert model.first.stage.seen == []
    responses = model.execute([request(5), late, in_time])
    assert [response.has_error() for response in responses] == [False, True, False]
    assert [users_of(responses[place]) for place in (0, 2)] == [[5], [3]]
    model.reporter.report()
    assert pb.MetricFamily.metrics["recommender_late_total/preprocess"].value == 3


def test_after_slow_calls_requests_are_not_refused_for_ever(monkeypatch):
    """A single one, as after a start, refuses none. After more, only refused requests can tell that calls are fast again."""
    monkeypatch.setattr(time, "time", lambda: 1e9)
    check = DeadlineCheck("preprocess")
    check.count(60.0)
    assert not check.refuse_late([with_deadline(1, 250, 250)])
    check.count(60.0)
    assert check.refuse_late([with_deadline(1, 250, 250)])
    for _ in range(60):
        refused = check.refuse_late([with_deadline(1, 250, 250)])
    assert not refused
    check.count(1.0)
    assert check.refuse_late([with_deadline(1, 150, 250)])  # the mean counts all the same


NO_DEADLINES = rb'{"deadline_unix_ms": "soon"} | {"deadline_unix_ms": null} | deadline_unix_ms | {"note": "deadline_unix_ms"}'


@pytest.mark.parametrize("parameters", [*NO_DEADLINES.split(b" | "), b"\xff"])
def test_a_deadline_that_is_no_number_is_none(model, parameters):
    """Parameters and ids may be any bytes over HTTP, and the Python backend decodes them when they are read."""
    answered, failed = model.execute([pb.InferenceRequest(parameters, b"\xff", user_id=np.array([[i]])) for i in (1, 666)])
    assert users_of(answered) == [1]
    assert failed.error().message().startswith("Internal error in preprocess (ZeroDivisionError)")
