"""The baseline: all variants give the same answers, and each differs from the next in what its name says."""

import contextlib
import json
from collections import Counter
from types import SimpleNamespace

import numpy as np
import onnxruntime as ort
import pytest

from experiments.merlin import bench, tables
from experiments.merlin.__main__ import LAYOUTS, ROWS, drawn_users, report
from experiments.merlin.export import MODEL, VARIANTS, Parts, export_variant, new_ensemble
from experiments.merlin.features import encode, read_sides
from experiments.merlin.networks import pair_positions, write_dlrm, write_tower
from experiments.merlin.once import OnceExecutor
from repository.models import read_config, read_repository
from repository.recorded import RECORDED_FILE, Recorded
from serving.contract.errors import ConfigError
from serving.contract.tensors import ENSEMBLE, FROM_STORE, PAD_ID, Axes, ContextColumn, ensemble_spec, stage_specs
from training.dataset import load_dataset

CANDIDATES = 50
USERS = [1, 5, 7, 400]


@pytest.fixture(scope="module")
def dataset():
    return load_dataset("synthetic:small")


@pytest.fixture(scope="module")
def parts(dataset, tmp_path_factory):
    folder = tmp_path_factory.mktemp("merlin") / "parts"
    return Parts.make(folder, *read_sides(dataset), CANDIDATES, np.random.default_rng(0))


def answer(ensemble, user_id, executor=None):
    from merlin.dag.runtime import Runtime
    from merlin.table import TensorTable

    table = ensemble.transform(TensorTable({"user_id": np.array([user_id])}), runtime=Runtime(executor))
    return {name: column.values for name, column in table.items()}


def test_the_reference_has_the_widths_of_the_notes(dataset):
    users, items = read_sides(dataset)
    assert (len(users.encoded), len(users.continuous)) == (5, 3)
    assert (len(items.encoded), len(items.continuous)) == (6, 2)


@pytest.mark.parametrize("user_id", USERS)
def test_hardened_variants_answer_as_exported(parts, user_id):
    expected = answer(new_ensemble(parts, nvtabular=True), user_id)
    assert expected["item_ids"].shape == (1, 10)
    assert (np.diff(expected["scores"]) <= 0).all()
    for nvtabular in (True, False):
        got = answer(new_ensemble(parts, nvtabular), user_id, OnceExecutor())
        np.testing.assert_array_equal(got["item_ids"], expected["item_ids"])
        np.testing.assert_allclose(got["scores"], expected["scores"], rtol=1e-6)


def evaluations(ensemble, executor=None):
    """-> how often the operators of each kind, and of each id, ran for one request."""
    counts = Counter()
    nodes, waiting = {}, [ensemble.graph.output_node]
    while waiting:
        node = waiting.pop()
        if id(node) not in nodes:
            nodes[id(node)] = node
            waiting += node.parents_with_dependencies

    def counted(operator, name):
        run = operator.transform

        def transform(*arguments):
            counts[name] += 1
            return run(*arguments)

        operator.transform = transform

    for node in nodes.values():
        if node.op and "Workflow" in type(node.op).__name__:
            counted(node.op, "users" if "user_id" in node.op.workflow.input_schema.column_names else "items")
        elif node.op and type(node.op).__name__ == "QueryFaiss":
            counted(node.op, "retrieval")
    answer(ensemble, USERS[0], executor)
    return counts


def test_as_exported_evaluates_shared_nodes_again_and_hardened_does_not(parts):
    assert evaluations(new_ensemble(parts, nvtabular=True)) == {"users": 4, "items": 2, "retrieval": 2}
    assert evaluations(new_ensemble(parts, nvtabular=True), OnceExecutor()) == {"users": 1, "items": 1, "retrieval": 1}


def test_encoding_beforehand_is_encoding_while_serving(parts):
    side = parts.items
    encoded = encode(side, parts.workflows[side.id])
    row = 17
    served = parts.workflows[side.id]._transform_df(side.frame.iloc[row : row + 1])
    for name, column in encoded.items():
        assert column[row] == pytest.approx(served[name].iloc[0])
    np.testing.assert_array_equal(encoded[side.raw_id], side.frame[side.id])


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
def test_exported_repositories(parts, variant, tmp_path):
    export_variant(parts, variant, tmp_path / "repository")
    models = {model.name: model for model in read_repository(tmp_path / "repository")}
    assert len(models) == (3 if variant.nvtabular else 1)
    assert {model.instances for model in models.values()} == {variant.instances}
    config = read_config(tmp_path / "repository" / MODEL / "config.pbtxt")
    assert (config.max_batch_size, [tensor.name for tensor in config.input]) == (0, ["user_id"])
    version = tmp_path / "repository" / MODEL / "1"
    assert ("OnceExecutor" in (version / "model.py").read_text()) == variant.once == (version / "once.py").exists()


def test_an_id_that_no_table_holds_takes_the_first_row(parts):
    ensemble = new_ensemble(parts, nvtabular=False)
    np.testing.assert_array_equal(answer(ensemble, 10**9)["item_ids"], answer(ensemble, 1)["item_ids"])


def weights_of(path):
    import onnx
    from onnx import numpy_helper

    return {weight.name: numpy_helper.to_array(weight) for weight in onnx.load(path).graph.initializer}


def layers(weights, name, values, count, last_relu):
    for number in range(count):
        values = values @ weights[f"{name}_{number}_weight"] + weights[f"{name}_{number}_bias"]
        if number < count - 1 or last_relu:
            values = np.maximum(values, 0)
    return values


@pytest.fixture
def rows():
    rng = np.random.default_rng(3)
    return np.stack([rng.integers(0, n, 9) for n in (4, 7)], axis=1), rng.normal(size=(9, 3)).astype(np.float32)


def test_tower_is_what_numpy_computes(rows, tmp_path):
    codes, numbers = rows
    write_tower(tmp_path / "tower.onnx", [4, 7], 3, np.random.default_rng(0))
    weights = weights_of(tmp_path / "tower.onnx")
    joined = np.concatenate([weights["tables"][codes[:, 0]], weights["tables"][4 + codes[:, 1]], numbers], axis=1)
    session = ort.InferenceSession(tmp_path / "tower.onnx")
    (got,) = session.run(["vectors"], {"codes": codes, "numbers": numbers})
    np.testing.assert_allclose(got, layers(weights, "tower", joined, 2, last_relu=False), rtol=1e-4, atol=1e-4)


def test_dlrm_is_what_numpy_computes(rows, tmp_path):
    codes, numbers = rows
    write_dlrm(tmp_path / "dlrm.onnx", [4, 7], 3, np.random.default_rng(0))
    weights = weights_of(tmp_path / "dlrm.onnx")
    bottom = layers(weights, "bottom", numbers, 2, last_relu=True)
    vectors = [bottom, weights["tables"][codes[:, 0]], weights["tables"][4 + codes[:, 1]]]
    dots = [np.sum(vectors[i] * vectors[j], axis=1) for i in range(3) for j in range(i)]
    joined = np.concatenate([bottom, np.stack(dots, axis=1)], axis=1)
    (got,) = ort.InferenceSession(tmp_path / "dlrm.onnx").run(["scores"], {"codes": codes, "numbers": numbers})
    np.testing.assert_allclose(got, layers(weights, "top", joined, 3, last_relu=False), rtol=1e-4, atol=1e-4)


def test_the_reference_has_66_dots():
    assert len(pair_positions(12)) == 66


def test_only_users_of_the_data_set_are_asked(dataset):
    recorded = np.array([[1], [2**60], [3]])
    assert set(drawn_users(recorded, dataset, np.random.default_rng(0))[:, 0]) == {1, 3}
    assert len(drawn_users(recorded, dataset, np.random.default_rng(0))) == ROWS


def test_a_repository_of_other_users_is_refused(dataset):
    with pytest.raises(ConfigError, match="exported from another data set"):
        drawn_users(np.array([[2**60]]), dataset, np.random.default_rng(0))


def test_ours_is_sent_every_tensor_and_the_baseline_the_id():
    user_ids = np.array([[7], [8]])
    assert list(bench.requests_of(bench.baseline_spec(), user_ids)) == ["user_id"]
    ours = ensemble_spec(stage_specs(Axes(), (ContextColumn("device", "string"),)))
    rows = bench.requests_of(ours, user_ids)
    assert set(rows) == {tensor.name for tensor in ours.inputs}
    assert rows["user_id"] is user_ids
    assert (rows["history"] == FROM_STORE).all()
    assert (rows["exclude"] == PAD_ID).all()


def result_of(p50_ms, rate):
    """Medians 1 ms and 1,000/s for ours; the given ones, round by round, for every variant."""
    result = bench.Result()
    for name in bench.OURS:
        result.rounds[name] = bench.Rounds(clients=8, p50_ms=[1.0] * 3, rate=[1_000.0] * 3)
    for variant in VARIANTS:
        result.rounds[variant.name] = bench.Rounds(clients=1, p50_ms=p50_ms, rate=rate)
    return result


def test_bounds_are_judged_by_the_median_ratio_of_the_rounds():
    facts = tables.bound_facts(result_of(p50_ms=[79.0, 81.0, 300.0], rate=[4.0, 4.1, 1.0]))
    verdicts = {(fact["ours"], fact["baseline"], fact["metric"]): fact for fact in facts}
    assert len(verdicts) == len(facts) == 16
    exported = verdicts[bench.FUSED_LAYOUT, bench.AS_EXPORTED, "p50_ms"]
    assert (exported["ratio"], exported["low"], exported["high"], exported["met"]) == (81.0, 79.0, 300.0, True)
    slower = verdicts[bench.FUSED_LAYOUT, bench.AS_EXPORTED, "rate"]
    assert (slower["ratio"], slower["met"]) == (250.0, True)
    assert {fact["bound"] for fact in facts if fact["baseline"] == bench.BEST} == {1, 1.8, 3.0}


def test_a_missed_bound_is_shown():
    table = tables.bound_table(result_of(p50_ms=[0.5] * 3, rate=[4.0] * 3))
    assert [row.cells[-1] for row in table.rows if row.kept is False] == ["MISSED"] * 8


def test_contenders_are_shown_by_their_medians():
    first = tables.contender_table(result_of(p50_ms=[3.0, 1.0, 2.0], rate=[4.0] * 3)).rows[2]
    assert first.cells[:4] == (bench.AS_EXPORTED, "2.00", "500.0", "4.0")


@pytest.fixture
def recorded(tmp_path):
    """Our two layouts' repositories with nothing but what was answered in process. -> the folder that holds them."""
    outputs = {"item_ids": np.arange(3)[None], "scores": np.zeros((1, 3), np.float32)}
    for layout in LAYOUTS.values():
        own = tmp_path / layout / ENSEMBLE / "1"
        own.mkdir(parents=True)
        Recorded({"user_id": np.array([[1]])}, outputs).write(own / RECORDED_FILE)
    return tmp_path


@pytest.fixture
def differing(recorded, monkeypatch):
    """-> call it with item ids by name of a contender, and by layout for recorded requests: what is said of them."""

    def said(ids, at_once=""):
        def answer(name):
            return {"item_ids": ids.get(name, np.arange(3)[None]), "scores": np.zeros((1, 3), np.float32)}

        monkeypatch.setattr(bench, "_answers", lambda contender, users: answer(contender.name))
        monkeypatch.setattr(bench, "site_of", lambda state: SimpleNamespace(repo=state, generation=1, grpc_url=state.name))
        monkeypatch.setattr("perf.answers.asked", lambda url, recommend, inputs: answer(url))
        monkeypatch.setattr("perf.answers.differing_at_once", lambda url, recommend, recorded: at_once)
        turns, spec = SimpleNamespace(turn=contextlib.nullcontext), bench.baseline_spec()
        states = {name: recorded / layout for name, layout in LAYOUTS.items()} | {variant.name: None for variant in VARIANTS}
        served = [bench.Contender(name, state, turns, spec, None, (1,), 1.0) for name, state in states.items()]
        return bench.differing_answers(served, np.array([[1]]))

    return said


OTHER = np.array([[0, 2, 1]])


def test_variants_that_answer_differently_are_named(differing):
    assert differing({}) == ""
    assert differing({bench.HARDENED: OTHER}).startswith("hardened against as exported: 1 of 1 id lists")


def test_ours_answer_as_in_process_and_not_only_alike(differing):
    """Both layouts wrong in the same way agree with each other."""
    alike = differing(dict.fromkeys(LAYOUTS.values(), OTHER))
    assert [part.split(": ")[0] for part in alike.split("; ")] == [
        "ours against in process, ensemble",
        "ours against in process, fused",
    ]
    at_once = differing({}, at_once="256 requests at once: 1 of 256 id lists differ")
    assert at_once.count("256 requests at once: ") == len(LAYOUTS)
    assert differing({"fused": OTHER}).startswith("ours against in process, fused: 1 of 1 id lists")
    assert differing({bench.FUSED_LAYOUT: OTHER}).startswith("ours, fused against ours, ensemble: 1 of 1 id lists")


def test_the_last_line_is_json_and_the_rounds_are_kept(tmp_path, capsys):
    machine = {"commit": "abc1234", "cores": 2, "load_before": 0.1}
    assert report(result_of(p50_ms=[90.0] * 3, rate=[2.0] * 3), tmp_path, machine)
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (document["perf"], document["answers_equal"], document["all_met"]) == ("merlin", True, True)
    assert document.items() >= machine.items()
    assert len(document["bounds"]) == 16
    assert json.loads((tmp_path / "merlin.json").read_text())["rounds"][bench.BEST]["p50_ms"] == [90.0] * 3


def test_bounds_do_not_count_when_answers_differ(tmp_path, capsys):
    result = result_of(p50_ms=[90.0] * 3, rate=[2.0] * 3)
    result.answers = "hardened against as exported: 1 of 1 id lists differ"
    assert not report(result, tmp_path, {})
    said = capsys.readouterr().out
    assert "the ratios do not count" in said
    assert not json.loads(said.splitlines()[-1])["all_met"]


def test_every_round_is_saved_and_the_levels_are_tried_once(monkeypatch):
    monkeypatch.setattr(bench, "differing_answers", lambda served, user_ids: "")
    monkeypatch.setattr(bench, "read_memory", lambda tag: [])
    asked = []

    def measure(self, clients):
        asked.append((self.name, clients))
        return 2.0, {1: 10.0, 2: 30.0, 4: 20.0}[clients]

    monkeypatch.setattr(bench.Contender, "measure", measure)
    state, spec = SimpleNamespace(tag=""), bench.baseline_spec()
    served = [
        bench.Contender("a", state, None, spec, None, (2, 4), 1.0),
        bench.Contender("b", state, None, spec, None, (4,), 1.0),
    ]
    lengths = []
    result = bench.measure_all(
        served, np.array([[1]]), 2, lambda what: None, lambda result: lengths.append(len(result.rounds["a"].rate))
    )
    assert lengths == [1, 2]
    assert {name: rounds.clients for name, rounds in result.rounds.items()} == {"a": 2, "b": 4}
    first, second = [("a", 1), ("a", 2)], [("b", 1), ("b", 4)]
    assert asked == [("a", 2), ("a", 4), *first, *second, *second, *first]
    assert result.rounds["a"].rate == [30.0, 30.0]
