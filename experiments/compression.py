"""Compare smaller ranking networks: quality against latency.

    python -m experiments.compression --data online-retail

Trains the DLRM on the training part of a data set, makes smaller ones of it, and lets all of them rank the same candidates of
the test users. Every network runs as it would be served: as ONNX, on ONNX Runtime's CPU kernels, with one thread. Latencies are
medians of many rounds in turns: only their ratios count. The bounds are of the student that an export serves by default.
"""

from __future__ import annotations

import copy
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated

import numpy as np
import onnx
import onnxruntime as ort
import scipy.sparse as sp
import typer
from rich.console import Console

from experiments.harness import RESULTS, Figure, ResultsFolder, finish, read_machine
from export.nvidia.precision.graphs import tidy
from export.nvidia.precision.int8 import quantized, weighted_products
from export.nvidia.precision.lower import outputs
from export.progress import Progress
from export.settings import PipelineSettings
from perf.command import run
from training.dataset import Dataset, load_dataset, split_by_time
from training.evaluation.metrics import auc, ndcg_at, recall_at
from training.evaluation.problem import TEST_SHARE, problem_of
from training.features.build import build_features
from training.features.schema import FeatureSettings
from training.models.distill import STUDENT, distil, macs, strongest_units_of, student_of
from training.models.dlrm_graph import export_dlrm
from training.models.ranking import RankingSettings, moments
from training.models.ranking_data import Requests, served_requests, statistics_of, unlabelled_requests
from training.models.save_ranker import network_inputs
from training.models.train_ranker import Ranker, RankerSettings, parts, retrieval_z, train_ranker
from training.retrieval.fit import RetrievalSettings, fit_training_retriever

MOST_USERS = 3_000  # test users, drawn at random where there are more
BATCHES = (1, 32)
ROUNDS = 25
CALIBRATION_BATCHES = 8
TOLERATED = 0.003  # by a product in int8: root mean square of the change, in standard deviations of the logits
WIDE_STUDENT = replace(STUDENT, width=RankerSettings().width)
SERVED = f"distilled, tables of {STUDENT.width}"  # by default
PRUNED = RankerSettings(bottom=(16,), top=(32, 16), epochs=4, learning_rate=1e-3)
LEAST_NDCG_SHARE, LEAST_AUC_SHARE = 0.99, 0.999  # of the DLRM as taught
LEAST_SAVING = 12.0  # times fewer multiply-accumulates

Say = Callable[[str], None]
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@dataclass(frozen=True)
class Workload:
    """Requests to learn from, to choose by, and to be measured on. relevant: CSR bool [N, n_items] of the test requests.

    unlabelled: of other users after the training part; what they took is unknown, so only students learn from them
    """

    teaching: tuple[Requests, ...]
    unlabelled: Requests
    validation: Requests
    test: Requests
    relevant: sp.csr_matrix
    tables: tuple[dict[str, int], dict[str, int]]


@dataclass(frozen=True)
class Variant:
    """A network as it is served, and the ranker it was exported from."""

    name: str
    ranker: Ranker
    session: ort.InferenceSession


@dataclass(frozen=True)
class Row:
    """latency_us: batch size -> median of one run, microseconds. macs: multiply-accumulates per candidate."""

    name: str
    macs: int
    ndcg_at_10: float
    recall_at_20: float
    auc: float
    latency_us: dict[int, float]


def make_workload(dataset: Dataset, say: Say, seed: int = 0) -> Workload:
    problem, pipeline = problem_of(dataset), PipelineSettings(seed=seed)
    train, _ = split_by_time(dataset.interactions, TEST_SHARE)
    dataset = replace(dataset, interactions=train)
    features = build_features(dataset, train, FeatureSettings(history_length=pipeline.history), seed)
    chosen, settings = RetrievalSettings(pipeline.candidates, pipeline.filter_seen, seed), RankingSettings()
    fit_retrieve = partial(fit_training_retriever, dataset, features, chosen, lambda _: None)
    rng = np.random.default_rng(seed)
    say("requests of the training part, as a retriever of its time would have served them")
    (latest, *older), of_visits = moments(dataset, train, features, fit_retrieve, settings, rng)
    older += [of_visits] if of_visits else []
    teaching, validation = parts(latest, settings.ranker.validation_share, rng)
    say("requests of the test users")
    users = problem.test_users
    users = np.sort(rng.choice(users, min(len(users), MOST_USERS), replace=False))
    retrieve = fit_retrieve(train.assign(row=np.arange(len(train))))
    statistics = statistics_of(features, train, settings.statistics)
    test = served_requests(features, problem.user_ids[users], statistics, retrieve)
    others = train[~train["user_id"].isin(problem.user_ids[users])]
    unlabelled = unlabelled_requests(features, others, statistics, retrieve, settings.most_requests, rng)
    tables = (dict(features.user_rows), dict(features.item_rows))
    return Workload((teaching, *older), unlabelled, validation, test, problem.test.relevant[users], tables)


def say_nothing(_: str) -> None:
    pass


def make_variants(work: Workload, say: Say, folder: Path, seed: int = 0) -> list[Variant]:
    """Train every network; the DLRM as taught comes first, because the others are compared with it."""
    lessons = (*work.teaching, work.unlabelled)
    say("the DLRM, as taught")
    full = train_ranker(work.teaching, work.validation, work.tables, RankerSettings(), seed, say_nothing)
    found = {"as taught": full}
    for name, settings, begin in (
        (SERVED, STUDENT, student_of),
        (f"distilled, tables of {WIDE_STUDENT.width}", WIDE_STUDENT, student_of),
        ("pruned", PRUNED, strongest_units_of),
    ):
        say(name)
        found[name] = distil(full, lessons, work.validation, settings, seed, say_nothing, begin, least_kept=0.0)
    say("as small as the distilled one, taught without a teacher")
    alone = replace(STUDENT, blends=RankerSettings().blends)
    found["small, without a teacher"] = train_ranker(work.teaching, work.validation, work.tables, alone, seed, say_nothing)
    variants = [export_variant(name, ranker, work, folder) for name, ranker in found.items()]
    for variant in variants[:2]:
        say(f"int8: {variant.name}")
        variants.append(quantise(variant, work, folder))
    return variants


def export_variant(name: str, ranker: Ranker, work: Workload, folder: Path) -> Variant:
    ranker = copy.deepcopy(ranker)
    ranker.model.network.fold()
    path = folder / f"{len(list(folder.iterdir()))}.onnx"
    export_dlrm(ranker.model.network, network_inputs(ranker.model, work.test.take(np.arange(8))), path)
    return Variant(name, ranker, open_session(path))


def quantise(variant: Variant, work: Workload, folder: Path) -> Variant:
    """Return the variant with its matrix products in int8, except those that would move the logits."""
    blocks = np.array_split(np.arange(min(len(work.validation), 32 * CALIBRATION_BATCHES)), CALIBRATION_BATCHES)
    feeds = [network_inputs(variant.ranker.model, work.validation.take(rows)) for rows in blocks if len(rows)]
    graph, kept = to_int8(tidy(onnx.load(variant.session._model_path)), feeds)
    path = folder / f"{len(list(folder.iterdir()))}.onnx"
    onnx.save(graph, str(path))
    return replace(variant, name=f"{variant.name}, int8 ({len(kept)} products stay fp32)", session=open_session(path))


def to_int8(model: onnx.ModelProto, feeds: list[dict[str, np.ndarray]]) -> tuple[onnx.ModelProto, list[str]]:
    """Return a graph with Q/DQ pairs and the products that stay fp32; ranges and errors come from different batches.

    model: a tidy one
    """
    ranges, measured = feeds[::2], feeds[1::2] or feeds
    exact, names = outputs(model, measured), weighted_products(model)
    errors = {name: np.sqrt(np.mean((outputs(quantized(model, ranges, {name}), measured) - exact) ** 2)) for name in names}
    kept = [name for name in names if errors[name] > TOLERATED * exact.std()]
    return quantized(model, ranges, set(names) - set(kept)), kept


def open_session(path: Path) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def score(variant: Variant, requests: Requests) -> np.ndarray:
    """Return float32 [N, C] as the rank stage serves them, -inf at padding."""
    blocks = np.array_split(np.arange(len(requests)), -(-len(requests) // 32))
    feeds = (network_inputs(variant.ranker.model, requests.take(rows)) for rows in blocks)
    logits = np.concatenate([variant.session.run(["logits"], feed)[0] for feed in feeds])
    return np.where(requests.valid, logits + np.float32(variant.ranker.blend) * retrieval_z(requests), -np.inf)


@dataclass(frozen=True)
class Qualities:
    """Quality of each test request, float64 [N]; NaN where there is nothing to find. auc: among its candidates."""

    ndcg_at_10: np.ndarray
    recall_at_20: np.ndarray
    auc: np.ndarray


def measure_qualities(scores: np.ndarray, work: Workload) -> Qualities:
    """Return the quality of each test request. scores: float32 [N, C] of its candidates, as the rank stage serves them."""
    test = work.test
    ranked = np.take_along_axis(test.candidates, np.argsort(-scores, axis=1, kind="stable"), axis=1)[:, :20]
    rows, columns = np.nonzero(test.valid)
    positions = test.candidates[rows, columns]
    taken = sp.csr_matrix(scores.shape, dtype=bool).tolil()
    hit = np.asarray(work.relevant[rows, positions]).ravel() > 0
    taken[rows[hit], columns[hit]] = True
    among = auc(np.where(test.valid, scores, 0.0), taken.tocsr(), sp.csr_matrix(~test.valid))
    return Qualities(ndcg_at(ranked, work.relevant, 10), recall_at(ranked, work.relevant, 20), among)


def measure_quality(variant: Variant, work: Workload, latency_us: dict[int, float]) -> Row:
    quality = measure_qualities(score(variant, work.test), work)
    ndcg, recall, mean_auc = (float(np.nanmean(each)) for each in (quality.ndcg_at_10, quality.recall_at_20, quality.auc))
    return Row(variant.name, macs(variant.ranker.model.shape), ndcg, recall, mean_auc, latency_us)


def measure_latencies(variants: list[Variant], work: Workload) -> list[dict[int, float]]:
    """Return the median µs of one run by batch size, for each variant, measured in turns."""
    times: list[dict[int, list[float]]] = [{batch: [] for batch in BATCHES} for _ in variants]
    for batch in BATCHES:
        feeds = [network_inputs(variant.ranker.model, work.test.take(np.arange(batch))) for variant in variants]
        for _ in range(ROUNDS):
            for variant, feed, own in zip(variants, feeds, times, strict=True):
                started = time.perf_counter()
                variant.session.run(None, feed)
                own[batch].append((time.perf_counter() - started) * 1e6)
    return [{batch: float(np.median(values)) for batch, values in own.items()} for own in times]


def figures_of(rows: list[Row]) -> list[Figure]:
    """Return each network's figures; rows: the DLRM as taught first. The student served by default has bounds."""
    taught, figures = rows[0], []
    for row in rows:
        at_least = dict.fromkeys(("ndcg", "auc", "saving"))
        if row.name == SERVED:
            at_least = {"ndcg": LEAST_NDCG_SHARE, "auc": LEAST_AUC_SHARE, "saving": LEAST_SAVING}
        figures += [
            Figure(name=f"{row.name}: NDCG@10", values=[row.ndcg_at_10]),
            Figure(name=f"{row.name}: Recall@20", values=[row.recall_at_20]),
            Figure(name=f"{row.name}: AUC of the candidates", values=[row.auc]),
            share_figure(f"{row.name}: NDCG@10 over as taught", row.ndcg_at_10, taught.ndcg_at_10, at_least["ndcg"]),
            share_figure(f"{row.name}: AUC over as taught", row.auc, taught.auc, at_least["auc"]),
            share_figure(f"{row.name}: times less arithmetic", taught.macs, row.macs, at_least["saving"]),
            *(Figure(name=f"{row.name}: batch of {b}", values=[us], unit="µs") for b, us in row.latency_us.items()),
        ]
    return figures


def share_figure(name: str, value: float, reference: float, at_least: float | None) -> Figure:
    return Figure(name=name, values=[value / reference], at_least=at_least)


def measure(dataset: Dataset, say: Say) -> list[Figure]:
    work = make_workload(dataset, say)
    with tempfile.TemporaryDirectory() as folder:
        variants = make_variants(work, say, Path(folder))
        latencies = measure_latencies(variants, work)
        return figures_of([measure_quality(variant, work, us) for variant, us in zip(variants, latencies, strict=True)])


@app.command()
def main(
    data: Annotated[str, typer.Option(help="folder with a dataset.toml, or a bundled name")] = "online-retail",
    results: ResultsFolder = RESULTS,
) -> None:
    """Measure quality and latency of smaller ranking networks; trains them all, for minutes.

    Exit code 1 when a bound is missed.
    """
    machine, dataset = read_machine(), load_dataset(data)
    figures = measure(dataset, Progress(Console(width=130, soft_wrap=True)).note)
    name = f"compression-{dataset.description.name}"
    conditions = f"{data}, test users that no student was taught on, one thread"
    command = f"python -m experiments.compression --data {data}"
    finish(name, f"Smaller ranking networks on {dataset.description.name}", command, conditions, figures, results, machine)


if __name__ == "__main__":
    run(app, "python -m experiments.compression")
