"""The merlin repository on the real tritonserver, with stand-ins for the backends that only NVIDIA's containers have.

Wiring, shapes, types and numbers are thereby tested end to end, from the files that are exported.
"""

import time

import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

from export.merlin_settings import MerlinSettings
from export.nvidia.precision.agreement import EXACT
from export.nvidia.publish import publish_merlin
from export.nvidia.source import Source
from export.settings import Settings
from repository.checks.recorded import RECORDED_FILE, Recorded, compare_answers, read_recorded
from server.launcher import TritonServer
from server.status.health import open_local_client
from serving.contract.artifacts import find_stage_folder, read_stage
from serving.contract.tensors import ENSEMBLE, STAGES, RecordSpec, make_stage_specs, new_lineage, pack_records, unpack_records
from serving.pipeline import Pipeline
from serving.stages.parts.specs import PREPROCESS_WORKFLOW
from tests.repositories import SERVED_DATA
from tests.server.support.merlin_doubles import stand_in
from tests.server.support.requests import ask_each, ask_together, infer, narrow, tensor
from tests.waiting import until
from training.dataset import load_dataset
from triton_recommender import Query, Recommender

READY_TIMEOUT_S = 600.0
REQUESTS = 24


@pytest.fixture(scope="module")
def recorded(repository, info):
    """Requests and answers of the cpu profile, of the same training."""
    whole = read_recorded(repository / ENSEMBLE / str(info.generation) / RECORDED_FILE)
    return Recorded(*({name: values[:REQUESTS] for name, values in part.items()} for part in (whole.inputs, whole.outputs)))


@pytest.fixture(scope="module")
def workflow(info, tmp_path_factory):
    """NVTabular's fitted workflow of the same training: fitting is deterministic."""
    from training.features import FeatureSettings, build_features  # it imports NVTabular, which takes each worker seconds

    folder, dataset = tmp_path_factory.mktemp("nvtabular") / "workflow", load_dataset(SERVED_DATA)
    build_features(dataset, dataset.interactions, FeatureSettings(history_length=info.axes.history), workflow=folder)
    return folder


@pytest.fixture(scope="module", params=["24.03", "modern"])
def running(request, repository, info, tmp_path_factory):
    """Return Triton, server of a merlin repository of the same training, as it is exported but for the stand-ins.

    On 24.03 NVTabular itself encodes, on a CPU, through the workflow model of merlin-systems; else the compiled plan does.
    """
    copy = tmp_path_factory.mktemp("merlin") / "model_repository"
    folders = {name: repository / name / str(info.generation) for name in (*STAGES, ENSEMBLE)}
    if request.param == "24.03":
        settings, workflow = {"triton": "24.03", "preprocess": "nvtabular"}, request.getfixturevalue("workflow")
    else:
        settings, workflow = {"triton": "modern"}, None
    publish_merlin(Source.open(folders, workflow), copy, Settings.model_validate({"merlin": settings}))
    stand_in(copy, MerlinSettings().mount)
    with TritonServer(copy, run_dir=tmp_path_factory.mktemp("run"), ready_timeout_s=READY_TIMEOUT_S) as server:
        yield request.param, server


@pytest.fixture(scope="module")
def served(running):
    triton, server = running
    with open_local_client(server.grpc_url) as client:
        yield triton, client


def test_answers_equal_the_cpu_profiles(served, recorded):
    """Users nobody knows and missing context are among the requests."""
    _, client = served
    got = ask_each(client, recorded.inputs, concurrency=8)
    assert compare_answers(got, recorded.outputs, EXACT) == ""
    np.testing.assert_array_equal(got["degraded"], recorded.outputs["degraded"])
    np.testing.assert_array_equal(got["generation"], recorded.outputs["generation"])


def test_answers_within_a_choice_equal_the_cpu_profiles(served, repository, recorded):
    inputs = narrow(repository, recorded.inputs, REQUESTS)
    got, expected = ask_each(served[1], inputs, concurrency=8), Pipeline.load(repository)(inputs)
    assert compare_answers(got, expected, EXACT) == ""
    np.testing.assert_array_equal(got["degraded"], expected["degraded"])


def counts(client, model: str) -> tuple[int, int]:
    """Return rows answered, executions."""
    (stats,) = client.get_inference_statistics(model).model_stats
    return stats.inference_count, stats.execution_count


def test_stages_in_parts_say_how_long_they_took(running, served):
    (triton, server), (_, client) = running, served

    def read_workflow_ms() -> float:
        (stats,) = client.get_inference_statistics(PREPROCESS_WORKFLOW).model_stats
        return stats.inference_stats.compute_infer.ns / 1e6

    with Recommender(server.grpc_url, timings=True) as shop:
        shop.recommend(1)  # connects, and reads the model's description
        workflow_ms, began_s = read_workflow_ms() if triton == "24.03" else 0.0, time.perf_counter()
        stage_ms = shop.recommend(2).stage_ms
        spent_ms = 1_000 * (time.perf_counter() - began_s)
    assert list(stage_ms) == list(STAGES)
    assert all(own_ms > 0 for own_ms in stage_ms.values())
    assert sum(stage_ms.values()) < spent_ms
    if triton == "24.03":
        assert stage_ms["preprocess"] > read_workflow_ms() - workflow_ms > 0


def ask_stages(client, user_id: np.ndarray) -> dict[str, dict[str, np.ndarray]]:
    """user_id: [B, 1] -> the input records of each stage behind preprocess"""
    user = client.infer("preprocess", [tensor("user_id", user_id)]).as_numpy("user")
    candidates = client.infer("retrieve", [tensor("user", user)]).as_numpy("candidates")
    ranked = client.infer("rank", [tensor("user", user), tensor("candidates", candidates)]).as_numpy("ranked")
    return {"retrieve": {"user": user}, "rank": {"user": user, "candidates": candidates}, "rerank": {"ranked": ranked}}


def test_requests_that_meet_reach_the_networks_as_one_batch(served, recorded):
    """But for `rank` behind hps, which knows no batches. Stages are asked: NVTabular lets one request after another through."""
    triton, client = served
    alone = ("rank_embeddings", "rank_dense") if triton == "24.03" else ()
    joined = {"towers_user", "rank_dense", "rerank_network"} - {*alone}
    stages = ask_stages(client, recorded.inputs["user_id"][:1])
    before = settled_counts(client, (*alone, *joined))
    sent = 0

    def have_met() -> bool:
        nonlocal sent
        for stage, records in stages.items():
            answers = ask_together(client, stage, [[tensor(name, array) for name, array in records.items()]] * REQUESTS)
        assert len({answer.as_numpy("item_ids").tobytes() for answer in answers}) == 1  # of rerank
        sent += REQUESTS
        until(lambda: all(counts(client, name)[0] - before[name][0] == sent for name in before))  # counted after the answer
        return all(counts(client, name)[1] - before[name][1] < sent for name in joined)

    until(have_met)
    for name in alone:
        assert counts(client, name)[1] - before[name][1] == sent


def settled_counts(client, models: tuple[str, ...]) -> dict[str, tuple[int, int]]:
    """Return the counts of each model, once the server has counted what was asked before: it does so after the answer."""
    seen: list[dict[str, tuple[int, int]]] = []

    def is_settled() -> bool:
        seen.append({name: counts(client, name) for name in models})
        time.sleep(0.3)
        return len(seen) > 1 and seen[-1] == seen[-2]

    until(is_settled)
    return seen[-1]


def test_a_batch_is_answered_like_its_rows(served, recorded):
    _, client = served
    inputs = {name: values[:16] for name, values in recorded.inputs.items()}
    got = infer(client, **inputs)
    assert compare_answers(got, {name: values[:16] for name, values in recorded.outputs.items()}, EXACT) == ""


def test_a_caller_may_send_the_user_alone(served):
    _, client = served
    answer = infer(client, user_id=[7, 8, 999_999_999])
    assert answer["item_ids"].shape == (3, 20)
    assert (answer["degraded"] == 0).all()


@pytest.mark.parametrize("scheme", ["grpc", "http"])
def test_the_python_client_understands_the_server(running, recorded, scheme):
    _, server = running
    user_ids = recorded.inputs["user_id"][:3, 0].tolist()
    port = server.ports.grpc if scheme == "grpc" else server.ports.http
    with Recommender(f"{scheme}://localhost:{port}") as recommender:
        answers = recommender.recommend_many([Query(user_id) for user_id in user_ids])
    assert [(len(answer), answer.degraded) for answer in answers] == 3 * [(20, 0)]


def test_the_stages_answer_alone_too(served, recorded, info):
    """A nested stage takes and gives the records of the cpu profile's stage."""
    _, client = served
    specs, user_id = make_stage_specs(info.axes, info.context), recorded.inputs["user_id"][:1]
    stages = ask_stages(client, user_id)
    found = unpack_records(specs["retrieve"].outputs, {"candidates": stages["rank"]["candidates"]})
    ranked = stages["rerank"]["ranked"]
    scored = unpack_records(specs["rank"].outputs, {"ranked": ranked})
    assert scored["user_id"].tolist() == user_id.tolist()
    np.testing.assert_array_equal(scored["candidate_ids"], found["candidate_ids"])
    assert np.isfinite(scored["rank_scores"]).all()
    assert found["lineage"].tolist() == scored["lineage"].tolist() == new_lineage(1, info.generation).tolist()


def test_another_generation_is_refused_by_every_stage(served, recorded, info):
    _, client = served
    scores = np.zeros((1, info.axes.candidates), np.float32)
    ids = np.full((1, info.axes.candidates), -1, np.int64)
    foreign = {"lineage": new_lineage(1, info.generation + 5)}
    given = {"user_id": np.array([[1]]), "candidate_ids": ids, "retrieval_scores": scores, "rank_scores": scores} | foreign
    given |= {"candidate_sources": np.zeros(ids.shape, np.uint8), "taken_together": scores, "taken_with_latest": scores}
    specs = make_stage_specs(info.axes, info.context)
    user = {t.name: np.zeros((1, *t.dims), t.numpy_dtype) for t in specs["preprocess"].output_fields}
    for stage in ("retrieve", "rank", "rerank"):
        records = tuple(t for t in specs[stage].inputs if isinstance(t, RecordSpec))
        sent = pack_records(records, user | given)
        with pytest.raises(InferenceServerException, match=f"generation is {info.generation + 5}, this stage serves"):
            client.infer(stage, [tensor(name, array) for name, array in sent.items()])


def test_more_rows_than_the_exported_limit_are_refused(served):
    """Behind hps `recommend` has no batch limit of its own: its steps refuse."""
    _, client = served
    with pytest.raises(InferenceServerException, match="batch-size must be <= 64"):
        infer(client, user_id=list(range(65)))


@pytest.fixture(scope="module")
def keys_per_sample(repository, info) -> int:
    settings = read_stage(repository / "rank" / str(info.generation)).settings
    return len(settings["user_tables"]) + info.axes.candidates * len(settings["item_tables"])


uses_hps = pytest.mark.parametrize("running", ["24.03"], indirect=True)


def embeddings(client, keys, numkeys):
    return client.infer("rank_embeddings", [tensor("KEYS", keys), tensor("NUMKEYS", numkeys)]).as_numpy("OUTPUT0")


@uses_hps
def test_hps_gives_one_flat_tensor(served, keys_per_sample, repository, info):
    _, client = served
    (width,) = {
        np.load(table).shape[1] for table in find_stage_folder(repository, "rank", info.generation).glob("tables/*.npy")
    }
    answer = embeddings(client, np.zeros((1, keys_per_sample), np.int64), np.array([[keys_per_sample]], np.int32))
    assert answer.shape == (keys_per_sample * width,)


@uses_hps
@pytest.mark.parametrize(
    ("change", "rule"),
    [
        (lambda keys, count: (keys, count + 1), "NUMKEYS sums to the number of keys"),
        (lambda keys, count: (keys[:, :-1], count - 1), "whole samples"),
        (lambda keys, count: (np.tile(keys, 65), count * 65), "at most max_batch_size samples"),
        (lambda keys, count: (keys - 1, count), "no reserved key"),
        (lambda keys, count: (np.repeat(keys, 2, axis=0), count * 2), r"KEYS is \[1, K\]"),
        (lambda keys, count: (keys, np.concatenate([count, count * 0], axis=1)), r"NUMKEYS is \[1, 1\]"),
    ],
)
def test_the_stand_in_for_hps_notices_each_broken_rule(served, keys_per_sample, change, rule):
    _, client = served
    keys, count = change(np.zeros((1, keys_per_sample), np.int64), np.array([[keys_per_sample]], np.int32))
    with pytest.raises(InferenceServerException, match=rule):
        embeddings(client, keys, count)


@uses_hps
def test_the_stand_in_for_tensorrt_notices_shapes_that_no_profile_accepts(served, info):
    _, client = served
    spec = client.get_model_config("rank_dense", as_json=True)["config"]["input"]
    dims = {each["name"]: [int(d) for d in each["dims"]] for each in spec}
    inputs = [tensor(n, np.zeros([65 if d == -1 else d for d in own], np.float32)) for n, own in dims.items()]
    with pytest.raises(InferenceServerException, match="shapes within a profile"):
        client.infer("rank_dense", inputs)
