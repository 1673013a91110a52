"""The adapter against a fake of the Python backend: one stage call per batch, and errors that stay with their request."""

import json
import re
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from serving.contract.artifacts import StageInfo, read_stage, write_manifest
from serving.contract.errors import DependencyError, RequestError
from serving.contract.tensors import (
    ENSEMBLE,
    FROM_STORE,
    MISSING_INT,
    STAGES,
    Axes,
    ContextColumn,
    ModelSpec,
    RecordSpec,
    compute_stage_ms,
    find_generation_faults,
    make_stage_specs,
    mark_degraded,
    new_lineage,
    pack_records,
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

AXES = Axes(candidates=4, history=3, exclusions=2, items_returned=2, user_categorical=2, user_continuous=1)
CONTEXT = (ContextColumn("store", "integer"), ContextColumn("device", "string"), ContextColumn("hour", "continuous"))
INFO = StageInfo("preprocess", generation=7, axes=AXES, context=CONTEXT)


class Echo:
    """A preprocess stage whose first categorical is the user id. It counts its calls and keeps its inputs."""

    @classmethod
    def load(cls, folder: Path) -> "Echo":
        return cls()

    def __init__(self) -> None:
        self.seen: list[dict] = []

    def find_faults(self, inputs):
        return {row: f"user_id is {value}" for row, (value,) in enumerate(inputs["user_id"]) if value < 0}

    def __call__(self, inputs):
        self.seen.append(inputs)
        user_ids = inputs["user_id"]
        if (user_ids == 666).any():
            raise ZeroDivisionError("secret/path")
        if (user_ids == 777).any():
            raise DependencyError("The store is down. Start it.")
        if (user_ids == 888).any():
            raise RequestError("user_id was used before", np.flatnonzero(user_ids[:, 0] == 888).tolist())
        batch = len(user_ids)
        return {
            "user_categorical": np.repeat(user_ids, 2, axis=1),
            "user_continuous": np.zeros((batch, 1), np.float32),
            "history_ids": inputs["history"],
            "history_age_days": np.zeros((batch, 3), np.float32),
            "history_interests": np.zeros((batch, 1), np.int64),
            "lineage": new_lineage(batch, 7),
        }


def pbtxt_as_json(info: StageInfo) -> str:
    return spec_as_json(info.spec)


def spec_as_json(spec: ModelSpec) -> str:
    def tensors(specs):
        kind = {"BYTES": "TYPE_STRING"}
        return [
            {"name": t.name, "data_type": kind.get(t.dtype, f"TYPE_{t.dtype}"), "dims": [str(d) for d in t.dims]} for t in specs
        ]

    parameters = {
        t.parameter: {"string_value": t.stated_fields} for t in (*spec.inputs, *spec.outputs) if isinstance(t, RecordSpec)
    }
    return json.dumps({"input": tensors(spec.inputs), "output": tensors(spec.outputs), "parameters": parameters})


@pytest.fixture
def arguments(tmp_path):
    folder = tmp_path / "preprocess" / "7"
    folder.mkdir(parents=True)
    INFO.write(folder)
    write_manifest(folder)
    return {
        "model_name": "preprocess",
        "model_instance_name": "preprocess_0_0",
        "model_repository": str(folder.parent),
        "model_version": "7",
        "model_config": pbtxt_as_json(INFO),
    }


def quiet_model(*stages: type):
    """Return a model of the stages that leaves reports to the test."""
    from serving.stages.adapter.triton import make_triton_model

    kind = make_triton_model(*stages)
    kind.report_every_s = 3_600
    return kind()


@pytest.fixture
def model(arguments):
    pb.MetricFamily.metrics.clear()
    pb.Logger.lines.clear()
    model = quiet_model(Echo)
    model.initialize(arguments)
    yield model
    model.finalize()


def request(*user_ids: int, **tensors: np.ndarray) -> pb.InferenceRequest:
    return pb.InferenceRequest(user_id=np.array(user_ids, np.int64).reshape(-1, 1), **tensors)


def users_of(response: pb.InferenceResponse) -> list[int]:
    answered = {t.name(): t.as_numpy() for t in response.output_tensors()}
    fields = unpack_records(INFO.spec.outputs, answered)
    np.testing.assert_array_equal(fields["user_id"], fields["user_categorical"][:, :1])  # handed on, and answered
    return fields["user_categorical"][:, 0].tolist()


def test_one_stage_call_answers_the_whole_batch(model):
    responses = model.execute([request(1), request(2, 3), request(4)])
    assert [users_of(response) for response in responses] == [[1], [2, 3], [4]]
    assert len(model.first.stage.seen) == 1
    model.reporter.report()
    assert pb.MetricFamily.metrics["recommender_stage_calls_total/preprocess"].value == 1
    assert pb.MetricFamily.metrics["recommender_stage_rows_total/preprocess"].value == 4


def test_absent_optional_tensors_take_their_fill(model):
    given = np.array([[5, 6, -1]])
    model.execute([request(1), request(2, history=given, hour=np.array([[3.5]], np.float32))])
    [inputs] = model.first.stage.seen
    np.testing.assert_array_equal(inputs["history"], [[FROM_STORE] * 3, [5, 6, -1]])
    np.testing.assert_array_equal(inputs["store"], [[MISSING_INT]] * 2)
    np.testing.assert_array_equal(inputs["device"], [[b""]] * 2)
    np.testing.assert_array_equal(inputs["hour"], np.array([[np.nan], [3.5]], np.float32))


def test_a_malformed_request_fails_alone(model):
    good, bad, mate = model.execute([request(1), request(2, -5), request(3)])
    assert users_of(good) == [1]
    assert users_of(mate) == [3]
    assert bad.error().code() == pb.TritonError.INVALID_ARG
    assert bad.error().message() == "1 of 2 rows are refused • Row 1: user_id is -5"
    assert len(model.first.stage.seen) == 1
    model.reporter.report()
    assert pb.MetricFamily.metrics["recommender_rejected_total/preprocess"].value == 1


def test_a_request_without_a_required_tensor_fails_alone_and_is_told_its_name(model):
    lacking = pb.InferenceRequest(hour=np.array([[3.5]], np.float32))
    good, bad, mate = model.execute([request(1), lacking, request(2, 3)])
    assert (users_of(good), users_of(mate)) == ([1], [2, 3])
    assert bad.error().code() == pb.TritonError.INVALID_ARG
    assert bad.error().message() == "The request has no user_id INT64 [1]. Send it with every request."
    [alone] = model.execute([lacking])
    assert alone.error().code() == pb.TritonError.INVALID_ARG
    assert len(model.first.stage.seen) == 1


def test_when_all_requests_are_malformed_the_stage_is_not_called(model):
    responses = model.execute([request(-1), request(-2)])
    assert [r.error().message() for r in responses] == ["user_id is -1", "user_id is -2"]
    assert model.first.stage.seen == []


def test_requests_that_a_stage_refuses_by_name_cost_the_others_one_more_call_and_not_one_each(model):
    responses = model.execute([request(1), request(2, 888), request(3, 4), request(888), request(5)])
    assert [users_of(responses[i]) for i in (0, 2, 4)] == [[1], [3, 4], [5]]
    messages = {1: "1 of 2 rows are refused • Row 1: user_id was used before", 3: "user_id was used before"}
    for place, message in messages.items():
        error = responses[place].error()
        assert (error.code(), error.message()) == (pb.TritonError.INVALID_ARG, message)
    assert len(model.first.stage.seen) == 2


def test_an_unexpected_failure_stays_with_its_request_and_keeps_its_traceback_in_the_log(model):
    good, bad = model.execute([request(1), request(666)])
    assert users_of(good) == [1]
    assert bad.error().message() == "Internal error in preprocess (ZeroDivisionError); the server's log has the details."
    (line,) = pb.Logger.lines
    logged = json.loads(line)
    assert (logged["stage"], logged["request_id"]) == ("preprocess", "fake-request")
    assert "secret/path" in logged["exception"]


def test_a_dependency_error_reaches_the_caller_as_unavailable(model):
    [response] = model.execute([request(777)])
    assert response.error().code() == pb.TritonError.UNAVAILABLE
    assert "Start it" in response.error().message()


def test_an_output_that_breaks_the_contract_is_an_error_not_an_answer(model):
    echo = Echo.__call__
    wrong = type("Wrong", (Echo,), {"__call__": lambda self, i: {**echo(self, i), "user_continuous": np.zeros((1, 2))}})
    model.chain = [replace(model.first, stage=wrong())]
    [response] = model.execute([request(1)])
    assert response.has_error()
    assert "user_continuous" in response.error().message()


def test_config_that_disagrees_with_the_stage_refuses_to_load(arguments):
    from serving.stages.adapter.triton import make_triton_model

    other = StageInfo("preprocess", 7, Axes(candidates=4, history=9, user_categorical=2, user_continuous=1), CONTEXT)
    with pytest.raises(pb.TritonModelException, match=r"disagree about inputs \(history"):
        make_triton_model(Echo)().initialize({**arguments, "model_config": pbtxt_as_json(other)})


def test_a_record_of_other_fields_refuses_to_load(arguments):
    """The record has the right number of bytes, but two numbers in place of one category."""
    from serving.stages.adapter.triton import make_triton_model

    other = replace(INFO, axes=replace(AXES, user_categorical=1, user_continuous=3))
    assert other.spec.outputs[0].dims == INFO.spec.outputs[0].dims
    with pytest.raises(pb.TritonModelException, match=r"disagree about outputs \(record_user: .*user_categorical INT64 \[1\]"):
        make_triton_model(Echo)().initialize({**arguments, "model_config": pbtxt_as_json(other)})


def test_a_changed_file_refuses_to_load(arguments):
    from serving.stages.adapter.triton import make_triton_model

    stage_file = Path(arguments["model_repository"]) / "7" / "stage.json"
    stage_file.write_text(stage_file.read_text().replace("7", "8"))
    with pytest.raises(pb.TritonModelException, match="SHA-256 differs"):
        make_triton_model(Echo)().initialize(arguments)


class Next:
    """A stage of any later stage: zeros of the contract's shapes, the lineage handed on."""

    @classmethod
    def load(cls, folder: Path) -> "Next":
        return cls(read_stage(folder).spec)

    def __init__(self, spec) -> None:
        self.spec = spec
        self.seen: list[dict[str, np.ndarray]] = []
        self.spoils: dict[str, Callable[[np.ndarray], np.ndarray]] = {}  # by output

    def find_faults(self, inputs):
        raise AssertionError("the outputs of the first stage are not checked again")

    def __call__(self, inputs):
        self.seen.append(inputs)
        zeros = {t.name: np.zeros((len(inputs["lineage"]), *t.dims), t.numpy_dtype) for t in self.spec.output_fields}
        outputs = zeros | ({"lineage": inputs["lineage"]} if "lineage" in zeros else {})
        return outputs | {name: spoil(outputs[name]) for name, spoil in self.spoils.items()}


@pytest.fixture
def fused(tmp_path):
    pb.MetricFamily.metrics.clear()
    folder = tmp_path / ENSEMBLE / "7"
    for name in STAGES:
        (folder / name).mkdir(parents=True)
        replace(INFO, stage=name).write(folder / name)
    info = replace(INFO, stage=ENSEMBLE)
    info.write(folder)
    write_manifest(folder)
    model = quiet_model(Echo, Next, Next, Next)
    model.initialize(
        {
            "model_name": ENSEMBLE,
            "model_instance_name": "recommend_0_0",
            "model_repository": str(folder.parent),
            "model_version": "7",
            "model_config": pbtxt_as_json(info),
        }
    )
    yield model
    model.finalize()


def test_all_stages_in_one_model_answer_with_the_ensembles_tensors(fused):
    good, bad = fused.execute([request(1), request(-5)])
    assert {t.name(): t.as_numpy().shape for t in good.output_tensors()} == {
        "item_ids": (1, 2), "scores": (1, 2), "degraded": (1, 1), "generation": (1, 1), "propensities": (1, 2),
        "sources": (1, 2), "stage_ms": (1, 4),
    }  # fmt: skip
    assert bad.error().message() == "user_id is -5"
    fused.reporter.report()
    values = {name: metric.value for name, metric in pb.MetricFamily.metrics.items()}
    assert [values[f"recommender_stage_rows_total/{name}"] for name in STAGES] == [1, 1, 1, 1]
    assert all(values[f"recommender_stage_seconds_total/{name}"] > 0 for name in STAGES)
    specs = make_stage_specs(AXES, CONTEXT)
    for name, link in zip(STAGES, fused.chain, strict=True):
        assert link.stage.seen[0].keys() == {t.name for t in specs[name].input_fields}


@pytest.mark.parametrize(("stage", "name"), [("retrieve", "candidate_ids"), ("rank", "rank_scores"), ("rerank", "scores")])
@pytest.mark.parametrize("wrong", [lambda values: values[:-1], lambda values: values.astype(np.float64)], ids=["short", "type"])
def test_what_a_stage_gives_in_another_form_reaches_nobody_and_does_not_count(fused, stage, name, wrong):
    fused.chain[STAGES.index(stage)].stage.spoils[name] = wrong
    for response in fused.execute([request(1), request(2)]):
        assert re.match(rf"The stage {stage} gave {name} as .*the contract says", response.error().message())
    fused.reporter.report()
    counted = [pb.MetricFamily.metrics[f"recommender_stage_rows_total/{each}"].value > 0 for each in STAGES]
    assert counted == [True] * STAGES.index(stage) + [False] * (len(STAGES) - STAGES.index(stage))


class Half(Next):
    """A rank stage whose scores are half of retrieval's."""

    def find_faults(self, inputs):
        return find_generation_faults(inputs["lineage"], 7)

    def __call__(self, inputs):
        self.seen.append(inputs)
        lineage = mark_degraded(inputs["lineage"], np.ones(len(inputs["lineage"]), bool), 2)
        return {"rank_scores": inputs["retrieval_scores"] / np.float32(2), "lineage": lineage}


def records(spec, *user_ids: int, generation: int = 7) -> pb.InferenceRequest:
    """A request of `rank` for some users, each candidate scored with its user's id."""
    fields = {t.name: np.zeros((len(user_ids), *t.dims), t.numpy_dtype) for t in spec.input_fields}
    fields["user_id"][:, 0], fields["retrieval_scores"][:] = user_ids, np.array(user_ids)[:, None]
    fields["lineage"] = new_lineage(len(user_ids), generation)
    return pb.InferenceRequest(**pack_records(spec.inputs, fields))


def test_a_stage_between_two_records_takes_fields_and_gives_a_record(tmp_path):
    """There are three requests: one has two rows, and one is of another generation."""
    folder, info = tmp_path / "rank" / "7", replace(INFO, stage="rank")
    folder.mkdir(parents=True)
    info.write(folder)
    write_manifest(folder)
    model = quiet_model(Half)
    names = {"model_name": "rank", "model_instance_name": "rank_0_0", "model_version": "7"}
    model.initialize({**names, "model_repository": str(folder.parent), "model_config": pbtxt_as_json(info)})
    good, bad, mates = model.execute([records(info.spec, 4), records(info.spec, 5, generation=6), records(info.spec, 6, 8)])
    model.finalize()
    assert "generation is 6, this stage serves 7" in bad.error().message()
    assert [len(seen["user_id"]) for seen in model.first.stage.seen] == [3]
    for response, user_ids in ((good, [4]), (mates, [6, 8])):
        fields = unpack_records(info.spec.outputs, {t.name(): t.as_numpy() for t in response.output_tensors()})
        assert fields["user_id"][:, 0].tolist() == user_ids
        np.testing.assert_array_equal(fields["rank_scores"], np.repeat(np.array(user_ids)[:, None] / 2, 4, axis=1))
        assert fields["lineage"][:, :2].tolist() == [[7, 2]] * len(user_ids)


def test_a_failure_in_any_stage_stays_with_its_request(fused):
    good, bad = fused.execute([request(1), request(666)])
    assert not good.has_error()
    assert bad.error().message().startswith("Internal error in recommend (ZeroDivisionError)")


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


def test_after_slow_calls_requests_are_not_refused_for_ever():
    """A single one, as after a start, refuses none. After more, only refused requests can tell that calls are fast again."""
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
