"""int8: the trained network computes as it is served, and can be trained so."""

from dataclasses import replace

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch

from tests.long.training.models.conftest import QUIET, order_agreement
from tests.long.training.models.test_dlrm import SHAPE, random_inputs, random_network, run
from tests.present import present
from training.models.rankers.dlrm_graph import export_dlrm
from training.models.rankers.quantised_network import QuantisedNetwork
from training.models.rankers.save_ranker import make_network_inputs
from training.models.rankers.train_ranker import compute_loss, compute_rank_scores, predict
from training.models.student import quantise as quantise_module
from training.models.student.distill import STUDENT, distil, measure_agreement
from training.models.student.quantise import quantise, quantise_after_training, train_in_int8


@pytest.fixture(scope="module")
def student(lesson):
    return distil(lesson, replace(STUDENT, epochs=6), **QUIET)


def random_quantised(shape=SHAPE):
    network = QuantisedNetwork(random_network(shape=shape)).eval()
    with network.measuring_ranges():
        run(network, random_inputs(32, 16, shape=shape))
    return network


@pytest.mark.parametrize("layers", [{"bottom": (), "top": (5,)}, {"bottom": (7, 6), "top": (9, 8, 3)}], ids=["shallow", "deep"])
def test_the_graph_is_the_network_whatever_its_shape(tmp_path, layers):
    network = random_quantised(replace(SHAPE, **layers))
    inputs, path = random_inputs(5, 40, seed=2, shape=network.shape), tmp_path / "rank.onnx"
    export_dlrm(network, inputs, path)
    session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    apart = np.abs(session.run(["logits"], inputs)[0] - run(network, inputs))
    assert np.mean(apart < 1e-5) > 0.95  # others read a value that is rounded up here and down there


def test_every_weighted_product_of_a_candidate_runs_in_int8(tmp_path):
    network, path = random_quantised(), tmp_path / "rank.onnx"
    export_dlrm(network, random_inputs(2, 3), path)
    options = ort.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "as_run.onnx")
    ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    run_ops = [node.op_type for node in onnx.load(options.optimized_model_filepath).graph.node]
    assert run_ops.count("MatMulIntegerToFloat") == len(network.products) == 5


def test_values_beyond_the_measured_range_are_those_at_its_ends():
    network, inputs = random_quantised(), random_inputs(2, 3)
    far, further = (run(network, inputs | {"pair_numbers": inputs["pair_numbers"] * scale}) for scale in (1e4, 1e5))
    np.testing.assert_array_equal(far, further)


def test_measuring_computes_as_the_network_in_float32():
    network, inputs = QuantisedNetwork(random_network()), random_inputs(2, 3)
    with network.measuring_ranges():
        np.testing.assert_allclose(run(network, inputs), run(random_network(), inputs), rtol=1e-5, atol=1e-5)
    assert not np.array_equal(run(network, inputs), run(random_network(), inputs))


def test_quantising_keeps_the_students_order(lesson, student, monkeypatch):
    monkeypatch.setattr(quantise_module, "MOST_LOST", 1.0)
    said: list[str] = []
    got = quantise(lesson, student, STUDENT, report=said.append)
    assert got.compression == "int8"
    assert len(said) == 1
    scores = (compute_rank_scores(ranker, lesson.validation) for ranker in (got, student))
    assert order_agreement(*scores) > 0.95


def test_what_loses_too_much_is_trained_in_int8(lesson, student, monkeypatch):
    monkeypatch.setattr(quantise_module, "MOST_LOST", -1.0)
    said: list[str] = []
    got = quantise(lesson, student, STUDENT, report=said.append)
    assert said[-1].startswith("int8 ranker: epoch 6 of 6")
    after = quantise_after_training(lesson, student, STUDENT)
    assert got.quality["ndcg_at_10"] > 0
    assert not np.array_equal(predict(got.model, lesson.validation), predict(after.model, lesson.validation))
    assert (
        order_agreement(compute_rank_scores(got, lesson.validation), compute_rank_scores(lesson.teacher, lesson.validation))
        > 0.8
    )


def test_training_in_int8_that_makes_it_worse_is_not_kept(lesson, student, monkeypatch):
    """As where the teacher's shares, which it learns, say the contrary of what users took."""

    def reverse(requests):
        shares = requests.taken.astype(np.float32)
        taken = np.where(requests.valid, shares.max(axis=1, keepdims=True) - shares, 0.0)
        return replace(requests, taken=(taken / taken.sum(axis=1, keepdims=True)).astype(np.float32))

    misled = replace(
        lesson, imitated=tuple(map(reverse, lesson.imitated)), imitated_validation=reverse(lesson.imitated_validation)
    )
    after = quantise_after_training(misled, student, STUDENT)
    trained = train_in_int8(misled, after, STUDENT, **QUIET)
    assert trained.validated < after.validated
    monkeypatch.setattr(quantise_module, "MOST_LOST", -1.0)
    got = quantise(misled, student, STUDENT, report=lambda _: None)
    np.testing.assert_array_equal(predict(got.model, lesson.validation), predict(after.model, lesson.validation))


def test_training_in_int8_regains_what_coarse_steps_lost(lesson, student):
    coarse = quantise_after_training(lesson, student, STUDENT)
    with torch.no_grad():
        for ends in ("lowest", "highest"):
            coarse.model.network.get_buffer(ends).mul_(30)
    trained = train_in_int8(lesson, coarse, STUDENT, **QUIET)
    shares = lesson.imitated_validation.taken
    before, after, unrounded = (
        measure_agreement(predict(ranker.model, lesson.validation), shares)["agreement"]
        for ranker in (coarse, trained, student)
    )
    assert before < unrounded
    assert after > before + (unrounded - before) / 4


def test_rounding_hides_no_gradient(lesson, student):
    model = quantise_after_training(lesson, student, STUDENT).model
    compute_loss(model, lesson.imitated[0].take(np.arange(32))).backward()
    assert all(present(parameter.grad).abs().sum() > 0 for parameter in model.network.parameters())


def test_the_served_network_ranks_as_the_trained_one(lesson, student, tmp_path):
    ranker = quantise_after_training(lesson, student, STUDENT)
    inputs = make_network_inputs(ranker.model, lesson.validation)
    export_dlrm(ranker.model.network, inputs, tmp_path / "rank.onnx")
    session = ort.InferenceSession(str(tmp_path / "rank.onnx"), providers=["CPUExecutionProvider"])
    with torch.no_grad():
        expected = run(ranker.model.network, inputs)
    assert np.mean(np.abs(session.run(["logits"], inputs)[0] - expected) < 1e-5) > 0.99
