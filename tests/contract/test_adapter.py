"""The adapter against a fake of the Python backend: one stage call per batch, and errors that stay with their request."""

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from serving.contract.artifacts import StageInfo, write_manifest
from serving.contract.tensors import (
    FROM_STORE,
    MISSING_INT,
    STAGES,
    Axes,
    find_generation_faults,
    make_stage_specs,
    mark_degraded,
    new_lineage,
    pack_records,
    unpack_records,
)
from tests.contract import fake_backend as pb
from tests.contract.stages import AXES, CONTEXT, INFO, Echo, Next, pbtxt_as_json, quiet_model, request, users_of


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
