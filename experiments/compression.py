"""Compare the four values of `[ranker] compression`: quality, bytes and latency of the network.

    python -m experiments.compression --data online-retail

Trains the DLRM on the training part of a data set, derives every smaller network from it, and lets all of them rank the same
candidates of the test users. A further student learns from the ensemble of the DLRM and two more teachers, and is compared
with it. The quality of a student differs by a hundredth from seed to seed, so the networks of several seeds are measured. Every
network runs as it is served: its file on ONNX Runtime, with one thread, in chunks as large as those of the rank stage.
Latencies are medians of many rounds in turns: only their ratios count. The bounds apply to the default.
"""

from __future__ import annotations

import copy
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import scipy.sparse as sp
import typer
from rich.console import Console

from experiments.harness import RESULTS, Figure, ResultsFolder, Seeds, finish, read_machine
from export.progress import Progress
from export.settings import PipelineSettings
from perf.command import run
from serving.contract.artifacts import open_network
from serving.stages.rank import PAIRS_AT_ONCE, choose_chunk_size
from training.dataset import Dataset, load_dataset, split_log
from training.evaluation.metrics import auc, ndcg_at, recall_at
from training.evaluation.problem import TEST_SHARE, make_problem
from training.features.build import build_features
from training.features.schema import FeatureSettings
from training.models.rankers.dlrm_graph import export_dlrm
from training.models.rankers.ranking_data import Requests, fit_item_statistics, make_served_requests, make_unlabelled_requests
from training.models.rankers.save_ranker import make_network_inputs
from training.models.rankers.teachers import NETWORKS, Teacher, Teachers, train_teacher
from training.models.rankers.train_ranker import Ranker, RankerSettings, take_retrieval_z, train_ranker
from training.models.ranking import RankingSettings, hold_out, make_requests_by_moment
from training.models.student.distill import STUDENT, Lesson, count_macs, distil
from training.models.student.prune import prune
from training.models.student.quantise import quantise, quantise_after_training, train_in_int8
from training.retrieval.fit import RetrievalSettings, fit_training_retriever

MOST_USERS = 3_000  # test users, drawn at random where there are more
ROWS = (1, 64)  # of a request to the rank stage
ROUNDS = 25
SEED = 0
DLRM = RankerSettings()
TEACHER, SERVED = "none", "distilled"  # the DLRM, with which all others are compared; the default
TAUGHT, ENSEMBLE = "distilled, taught by the ensemble", "ensemble of the DLRM, cross and attention networks"
AFTER, WITHIN = "int8, quantised after training", "int8, trained in int8"  # "int8" is one of the two, as `quantise` chooses
LEAST_NDCG_SHARE, LEAST_AUC_SHARE = 0.99, 0.999  # of the DLRM; the first also of the ensemble
LEAST_SAVING = 12.0  # times fewer multiply-accumulates

Say = Callable[[str], None]


@dataclass(frozen=True)
class Workload:
    """Requests to learn from, to choose by, and to be measured on. relevant: CSR bool [N, n_items] of the test requests.

    without_events: as in `train_ranker`
    imitated: what students learn from: requests with live events, and those of other users after the training part
    """

    teaching: tuple[Requests, ...]
    without_events: tuple[Requests, ...]
    imitated: tuple[Requests, ...]
    validation: Requests
    test: Requests
    relevant: sp.csr_matrix
    tables: tuple[dict[str, int], dict[str, int]]


@dataclass(frozen=True)
class Variant:
    """A network as it is served, and the ranker it was exported from. session: of ONNX Runtime"""

    name: str
    ranker: Ranker
    session: Any
    n_bytes: int


@dataclass(frozen=True)
class Measured:
    """The figures of one network.

    latency_us: rows of a request -> median, microseconds; macs: multiply-accumulates per candidate; n_bytes: of the file
    """

    name: str
    macs: int
    n_bytes: int
    ndcg_at_10: float
    recall_at_20: float
    auc: float
    latency_us: dict[int, float]


def make_workload(dataset: Dataset, say: Say) -> Workload:
    problem, pipeline = make_problem(dataset), PipelineSettings(seed=SEED)
    train, _ = split_log(dataset.interactions, TEST_SHARE)
    dataset = replace(dataset, interactions=train)
    features = build_features(dataset, train, FeatureSettings(history_length=pipeline.history), SEED)
    chosen, settings = RetrievalSettings(pipeline.candidates, pipeline.filter_seen, SEED), RankingSettings()
    fit_retrieve = partial(fit_training_retriever, dataset, features, chosen, lambda _: None)
    rng = np.random.default_rng(SEED)
    say("requests of the training part, as a retriever of its time would have served them")
    by_moment, in_visits = make_requests_by_moment(dataset, train, features, fit_retrieve, settings, rng)
    teaching, without_events, validation = hold_out(by_moment, in_visits, settings.ranker.validation_share)
    say("requests of the test users")
    users = problem.test_users
    users = np.sort(rng.choice(users, min(len(users), MOST_USERS), replace=False))
    retrieve = fit_retrieve(train.assign(row=np.arange(len(train))))
    statistics = fit_item_statistics(features, train, settings.statistics)
    test = make_served_requests(features, problem.user_ids[users], statistics, retrieve)
    others = train[~train["user_id"].isin(problem.user_ids[users])]
    unlabelled = make_unlabelled_requests(features, others, statistics, retrieve, settings.most_requests, rng)
    tables = (dict(features.user_rows), dict(features.item_rows))
    imitated, relevant = (*teaching, unlabelled), problem.test.relevant[users]
    return Workload(teaching, without_events, imitated, validation, test, relevant, tables)


def say_nothing(_: str) -> None:
    pass


def make_variants(
    work: Workload, say: Say, folder: Path, dlrm: RankerSettings = DLRM, student: RankerSettings = STUDENT, seed: int = SEED
) -> tuple[list[Variant], Teachers]:
    """Train the ensemble and every network, the DLRM first, because the others are compared with it."""
    say(f"{TEACHER}: the DLRM")
    known = (work.teaching, work.validation, work.tables)
    teacher = train_ranker(*known, dlrm, seed, say_nothing, without_events=work.without_events)
    alone = Teacher(teacher.model, teacher.blend)
    lesson = Lesson.of(teacher, work.imitated, work.validation, alone.give_shares)
    say(SERVED)
    small = distil(lesson, student, seed, say_nothing)
    rankers = {TEACHER: teacher, SERVED: small}
    say("pruned")
    rankers["pruned"] = prune(lesson, small, student, seed, say_nothing)
    say("int8")
    rankers["int8"] = quantise(lesson, small, student, seed, say)
    rankers[AFTER] = quantise_after_training(lesson, small, student, seed)
    rankers[WITHIN] = train_in_int8(lesson, rankers[AFTER], student, seed, say_nothing)
    say(ENSEMBLE)
    labelled = (*work.teaching, *work.without_events)
    others = {name: train_teacher(name, teacher, labelled, work.validation, dlrm, seed, say_nothing) for name in NETWORKS}
    ensemble = Teachers({"dlrm": alone} | others, {})
    say(TAUGHT)
    taught = Lesson.of(teacher, work.imitated, work.validation, ensemble.give_shares)
    rankers[TAUGHT] = distil(taught, student, seed, say_nothing)
    variants = [export_variant(name, ranker, work, folder / str(place)) for place, (name, ranker) in enumerate(rankers.items())]
    return variants, ensemble


def export_variant(name: str, ranker: Ranker, work: Workload, folder: Path) -> Variant:
    """Write the network into a new folder and open it as the rank stage does."""
    ranker = copy.deepcopy(ranker)
    ranker.model.network.fold()
    folder.mkdir()
    path = folder / "rank.onnx"
    export_dlrm(ranker.model.network, make_network_inputs(ranker.model, work.test.take(np.arange(8))), path)
    return Variant(name, ranker, open_network(folder, "rank"), path.stat().st_size)


def score(variant: Variant, requests: Requests) -> np.ndarray:
    """Return the scores as the rank stage serves them, float32 [N, C], -inf at padding."""
    blocks = np.array_split(np.arange(len(requests)), -(-len(requests) // 32))
    feeds = (make_network_inputs(variant.ranker.model, requests.take(rows)) for rows in blocks)
    logits = np.concatenate([variant.session.run(["logits"], feed)[0] for feed in feeds])
    return np.where(requests.valid, logits + np.float32(variant.ranker.blend) * take_retrieval_z(requests), -np.inf)


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
    labels = sp.csr_matrix(scores.shape, dtype=bool).tolil()
    is_hit = np.asarray(work.relevant[rows, positions]).ravel() > 0
    labels[rows[is_hit], columns[is_hit]] = True
    candidate_auc = auc(np.where(test.valid, scores, 0.0), labels.tocsr(), sp.csr_matrix(~test.valid))
    return Qualities(ndcg_at(ranked, work.relevant, 10), recall_at(ranked, work.relevant, 20), candidate_auc)


def measure_quality(variant: Variant, work: Workload, latency_us: dict[int, float]) -> Measured:
    quality = measure_qualities(score(variant, work.test), work)
    ndcg, recall, mean_auc = (float(np.nanmean(each)) for each in (quality.ndcg_at_10, quality.recall_at_20, quality.auc))
    return Measured(variant.name, count_macs(variant.ranker.model.shape), variant.n_bytes, ndcg, recall, mean_auc, latency_us)


def measure_ensemble(ensemble: Teachers, work: Workload) -> float:
    """Return NDCG@10 of lists by the mean of the teachers' shares."""
    shares = np.where(work.test.valid, ensemble.give_shares(work.test), -np.inf)
    return float(np.nanmean(measure_qualities(shares, work).ndcg_at_10))


def measure_latencies(variants: list[Variant], work: Workload) -> list[dict[int, float]]:
    """Return for each variant: rows of a request -> median, microseconds. The variants run in turns."""
    times: list[dict[int, list[float]]] = [{rows: [] for rows in ROWS} for _ in variants]
    for rows in ROWS:
        requests = work.test.take(np.resize(np.arange(len(work.test)), rows))
        at_once = choose_chunk_size(rows, max(1, PAIRS_AT_ONCE // requests.candidates.shape[1]))
        runs = [requests.take(np.arange(first, min(first + at_once, rows))) for first in range(0, rows, at_once)]
        feeds = [[make_network_inputs(variant.ranker.model, part) for part in runs] for variant in variants]
        for _ in range(ROUNDS):
            for variant, variant_feeds, variant_times in zip(variants, feeds, times, strict=True):
                started_s = time.perf_counter()
                for feed in variant_feeds:
                    variant.session.run(None, feed)
                variant_times[rows].append((time.perf_counter() - started_s) * 1e6)
    return [{rows: float(np.median(values)) for rows, values in variant_times.items()} for variant_times in times]


def make_figures(networks: list[Measured], ensemble: float) -> list[Figure]:
    """Return the figures. The network served by default has bounds. networks: the DLRM first; ensemble: its NDCG@10"""
    teacher, figures = networks[0], []
    for network in networks:
        at_least = dict.fromkeys(("ndcg", "auc", "saving"))
        if network.name == SERVED:
            at_least = {"ndcg": LEAST_NDCG_SHARE, "auc": LEAST_AUC_SHARE, "saving": LEAST_SAVING}
        figures += [
            Figure(name=f"{network.name}: NDCG@10", values=[network.ndcg_at_10]),
            Figure(name=f"{network.name}: Recall@20", values=[network.recall_at_20]),
            Figure(name=f"{network.name}: AUC of the candidates", values=[network.auc]),
            make_ratio_figure(f"{network.name}: NDCG@10 over none", network.ndcg_at_10, teacher.ndcg_at_10, at_least["ndcg"]),
            make_ratio_figure(f"{network.name}: AUC over none", network.auc, teacher.auc, at_least["auc"]),
            make_ratio_figure(f"{network.name}: times less arithmetic", teacher.macs, network.macs, at_least["saving"]),
            Figure(name=f"{network.name}: bytes of the network", values=[network.n_bytes], unit="bytes"),
            *(
                Figure(name=f"{network.name}: request of {rows} rows", values=[us], unit="µs")
                for rows, us in network.latency_us.items()
            ),
        ]
    [taught] = [network for network in networks if network.name == TAUGHT]
    figures.append(Figure(name=f"{ENSEMBLE}: NDCG@10", values=[ensemble]))
    figures.append(make_ratio_figure(f"{ENSEMBLE}: NDCG@10 over none", ensemble, teacher.ndcg_at_10, None))
    over_ensemble = (taught.ndcg_at_10, ensemble, LEAST_NDCG_SHARE)
    figures.append(make_ratio_figure(f"{TAUGHT}: NDCG@10 over the ensemble", *over_ensemble))
    return figures


def make_ratio_figure(name: str, value: float, reference: float, at_least: float | None) -> Figure:
    return Figure(name=name, values=[value / reference], at_least=at_least)


def measure(dataset: Dataset, seeds: list[int], say: Say) -> list[Figure]:
    """Return the figures, each with a value per seed of the networks; the requests are the same."""
    work, rounds = make_workload(dataset, say), []
    for seed in seeds:
        say(f"seed {seed}")
        with tempfile.TemporaryDirectory() as folder:
            variants, ensemble = make_variants(work, say, Path(folder), seed=seed)
            latencies = measure_latencies(variants, work)
            networks = [measure_quality(variant, work, us) for variant, us in zip(variants, latencies, strict=True)]
        rounds.append(make_figures(networks, measure_ensemble(ensemble, work)))
    values = [[figure.values[0] for figure in same] for same in zip(*rounds, strict=True)]
    return [figure.model_copy(update={"values": own_values}) for figure, own_values in zip(rounds[0], values, strict=True)]


def main(
    data: Annotated[str, typer.Option(help="folder with a dataset.toml, or a bundled name")] = "online-retail",
    seeds: Seeds = "0,1,2",
    results: ResultsFolder = RESULTS,
) -> None:
    """Measure quality, bytes and latency of each value of the ranker's `compression`. Some ten minutes per seed.

    Exit code 1 when a bound is missed.
    """
    machine, dataset = read_machine(), load_dataset(data)
    figures = measure(dataset, [int(seed) for seed in seeds.split(",")], Progress(Console(width=130, soft_wrap=True)).note)
    name = f"compression-{dataset.description.name}"
    conditions = f"{data}, requests of the test part, seeds {seeds} of the networks, one thread"
    command = f"python -m experiments.compression --data {data} --seeds {seeds}"
    finish(name, f"Smaller ranking networks on {dataset.description.name}", command, conditions, figures, results, machine)


if __name__ == "__main__":
    run(main, "python -m experiments.compression")
