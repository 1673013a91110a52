"""Measure what fp16 and int8 do to the recommendations: `python -m experiments.quality.precision [--data … --repo …]`.

Each data set is split by time as `make eval` does it; its repository, exported from the training part, is the one that `make
eval` leaves under .run/eval, or is exported there. The networks that an export lowers are replaced by their lowered graphs, as
it would choose them, and the evaluation split is answered in process, rounded as the graphs' types say
(export/nvidia/precision/faithful.py).
Changes of NDCG@10 come with their standard error over users: few users cannot tell a change of a thousandth from none.
Latencies are of ONNX Runtime's CPU kernels, which have no fp16 arithmetic of their own: they say what the stand-in costs, not
what TensorRT gains. The last line is one line of JSON.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated

import numpy as np
import onnx
import onnxruntime as ort
import typer
from rich.console import Console
from rich.table import Table

from export.build import build_repository
from export.evaluate import blocks, moved_up, positions_of, refuse_nothing_to_find, retrieval_order
from export.nvidia.precision.agreement import HALF, beyond
from export.nvidia.precision.calibration import NETWORKS, Arrays, stage_folders, with_networks
from export.nvidia.precision.faithful import faithful_session
from export.nvidia.precision.graphs import weight_bytes
from export.nvidia.precision.lower import PRECISIONS, Lowered, lower_networks
from export.nvidia.precision.trial import LOWERED_STAGES, Trial, joined
from export.settings import Settings
from perf.command import BROKEN, run
from perf.report.results import last_line
from serving.contract.errors import ConfigError, RecommenderError
from serving.contract.tensors import ENSEMBLE
from serving.pipeline import Pipeline
from training.dataset import Dataset, load_dataset, split_by_time
from training.evaluation.metrics import auc, ndcg_at
from training.evaluation.problem import TEST_SHARE, Problem, problem_of

DATA = ("online-retail", "movielens")
WORK = Path(".run/eval")
LEAST_AUC_SHARE = 0.999  # of fp32's
MOST_NDCG_CHANGE = 0.001
BATCHES = (1, 8)
RUNS = 60
WIDTH = 150  # of the tables, wherever they are printed

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

Networks = dict[str, dict[str, Lowered]]  # precision -> stage -> network


@dataclass(frozen=True)
class Graph:
    """One network as an export would write it when asked for `asked`. max_change: largest difference of an output to fp32's."""

    stage: str
    asked: str
    precision: str
    share: float  # of its multiply-adds below fp32
    file_bytes: int
    weight_bytes: int  # as executed
    max_change: float
    latency_ms: dict[int, float]  # batch size -> median of one run


@dataclass(frozen=True)
class Quality:
    """auc, ndcg_at_10: float64 [U], NaN where a user cannot be counted; answers: `item_ids` [U, K] and `scores` [U, K]."""

    auc: np.ndarray
    ndcg_at_10: np.ndarray
    answers: Arrays


@dataclass(frozen=True)
class Verdict:
    """Quality of the whole pipeline in one precision, the two bounds, and how the lists differ from fp32's."""

    precision: str
    users: int
    auc: float
    ndcg_at_10: float
    auc_share: float
    ndcg_change: float
    ndcg_error: float  # standard error of the change, over users
    score_change: float  # largest, of a served place
    other_lists: int  # with other ids, or the same in another order
    beyond_half: int  # lists that differ by more than scores within 2e-3 explain: what fp16 promises

    @property
    def met(self) -> bool:
        return self.auc_share >= LEAST_AUC_SHARE and abs(self.ndcg_change) <= MOST_NDCG_CHANGE


def session_of(model: onnx.ModelProto) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def measure_graphs(networks: Networks, feeds: dict[str, list[Arrays]]) -> list[Graph]:
    """-> sizes, differences and latencies of every graph. Precisions take turns, so that a slow minute is everybody's."""
    measured = []
    for stage in LOWERED_STAGES:
        own = {precision: networks[precision][stage] for precision in PRECISIONS}
        sessions = {precision: session_of(lowered.model) for precision, lowered in own.items()}
        latencies = {batch: medians_ms(sessions, first_rows(feeds[stage][0], batch)) for batch in BATCHES}
        expected = [sessions["fp32"].run(None, feed)[0] for feed in feeds[stage]]
        for asked, lowered in own.items():
            faithful, model = faithful_session(lowered.model), lowered.model
            change = max(np.abs(faithful.run(None, f)[0] - e).max() for f, e in zip(feeds[stage], expected, strict=True))
            sizes = (model.ByteSize(), weight_bytes(model), float(change))
            times = {batch: of_batch[asked] for batch, of_batch in latencies.items()}
            measured.append(Graph(stage, asked, lowered.precision, lowered.share, *sizes, times))
    return measured


def first_rows(feed: Arrays, rows: int) -> Arrays:
    return {name: values[:rows] for name, values in feed.items()}


def medians_ms(sessions: dict[str, ort.InferenceSession], feed: Arrays) -> dict[str, float]:
    times: dict[str, list[float]] = {name: [] for name in sessions}
    for _ in range(RUNS):
        for name, session in sessions.items():
            started = time.perf_counter()
            session.run(None, feed)
            times[name].append(1e3 * (time.perf_counter() - started))
    return {name: float(np.median(values)) for name, values in times.items()}


def evaluate(pipeline: Pipeline, networks: Networks, dataset: Dataset) -> list[Verdict]:
    problem = problem_of(dataset)
    refuse_nothing_to_find(dataset, problem)
    found = {}
    for precision in PRECISIONS:
        sessions = {stage: faithful_session(lowered.model) for stage, lowered in networks[precision].items()}
        found[precision] = quality_of(with_networks(pipeline, sessions), problem)
    return [verdict_of(precision, quality, found["fp32"]) for precision, quality in found.items()]


def quality_of(pipeline: Pipeline, problem: Problem) -> Quality:
    """AUC over the whole catalogue, behind the list in the order of the stages before; NDCG of the list (as `make eval`)."""
    aucs, ndcgs, answers = [], [], []
    for block in blocks(problem.test_users):
        tensors = pipeline.trace({"user_id": problem.user_ids[block][:, None]})
        by_rank = np.argsort(-tensors["rank_scores"], axis=1, kind="stable")
        ranked = np.take_along_axis(tensors["candidate_ids"], by_rank, axis=1)
        order = retrieval_order(pipeline, tensors, problem)
        for ids in (tensors["candidate_ids"], ranked, tensors["item_ids"]):
            order = moved_up(order, positions_of(ids, problem))
        relevant = problem.test.relevant[block]
        aucs.append(auc(order, relevant, problem.test.seen[block]))
        ndcgs.append(ndcg_at(positions_of(tensors["item_ids"], problem), relevant, 10))
        answers.append({name: tensors[name] for name in ("item_ids", "scores")})
    return Quality(np.concatenate(aucs), np.concatenate(ndcgs), joined(answers))


def verdict_of(precision: str, got: Quality, exact: Quality) -> Verdict:
    """exact: fp32's, of the same users."""
    auc_mean, exact_auc = float(np.nanmean(got.auc)), float(np.nanmean(exact.auc))
    ndcg, exact_ndcg = float(np.nanmean(got.ndcg_at_10)), float(np.nanmean(exact.ndcg_at_10))
    changes = got.ndcg_at_10 - exact.ndcg_at_10
    error = float(np.nanstd(changes) / np.sqrt(np.isfinite(changes).sum()) / exact_ndcg)
    score_change = float(np.abs(got.answers["scores"] - exact.answers["scores"]).max())
    other = int((got.answers["item_ids"] != exact.answers["item_ids"]).any(axis=1).sum())
    apart = int(beyond(got.answers, exact.answers, HALF).sum())
    shares = (auc_mean / exact_auc, ndcg / exact_ndcg - 1.0, error)
    return Verdict(precision, len(changes), auc_mean, ndcg, *shares, score_change, other, apart)


def graph_table(graphs: list[Graph]) -> Table:
    table = Table(title="Networks on ONNX Runtime (CPU, one thread)")
    latencies = [f"ms, batch {batch}" for batch in BATCHES]
    for heading in ("network", "asked", "is", "of its work", "file kB", "weights kB", "largest change", *latencies):
        table.add_column(heading, justify="left" if heading in ("network", "asked", "is") else "right")
    for graph in graphs:
        sizes = (f"{graph.file_bytes / 1e3:.0f}", f"{graph.weight_bytes / 1e3:.0f}", f"{graph.max_change:.2g}")
        names = (NETWORKS[graph.stage], graph.asked, graph.precision, f"{graph.share:.0%}")
        table.add_row(*names, *sizes, *(f"{graph.latency_ms[batch]:.2f}" for batch in BATCHES))
    return table


def verdict_table(verdicts: list[Verdict]) -> Table:
    table = Table(title=f"Whole pipeline, ranker and re-ranker in that precision, {verdicts[0].users:,} test users")
    table.caption = f"bounds: AUC at least {LEAST_AUC_SHARE:.1%} of fp32, NDCG@10 within {MOST_NDCG_CHANGE:.1%}"
    lists = ("largest score change", "other lists", f"beyond {HALF}")
    for heading in ("precision", "AUC", "of fp32", "NDCG@10", "change", "bounds", *lists):
        table.add_column(heading, justify="left" if heading == "precision" else "right")
    for v in verdicts:
        shares = (f"{v.auc:.4f}", f"{v.auc_share:.3%}", f"{v.ndcg_at_10:.4f}", f"{v.ndcg_change:+.3%} ± {v.ndcg_error:.3%}")
        met = "met" if v.met else "missed"
        table.add_row(v.precision, *shares, met, f"{v.score_change:.2g}", str(v.other_lists), str(v.beyond_half))
    return table


def exported(dataset: Dataset, repository: Path, console: Console) -> Path:
    """-> a repository exported from the training part, as `make eval` leaves it."""
    if not (repository / ENSEMBLE).is_dir():
        train, _ = split_by_time(dataset.interactions, TEST_SHARE)
        build_repository(replace(dataset, interactions=train), repository, Settings(), console)
    return repository


def compare_precisions(dataset: Dataset, repository: Path, console: Console) -> dict[str, object]:
    """Print both tables -> the same as facts."""
    folders, say = stage_folders(repository), console.print
    networks = {precision: lower_networks(folders, precision, say) for precision in PRECISIONS}
    measured = measure_graphs(networks, Trial(folders).feeds)
    verdicts = evaluate(Pipeline.load(repository), networks, dataset)
    console.print(graph_table(measured), verdict_table(verdicts))
    return {"graphs": [asdict(g) for g in measured], "verdicts": [asdict(v) | {"met": v.met} for v in verdicts]}


@app.command()
def main(
    data: Annotated[
        str | None, typer.Option(help="folder with a dataset.toml, or bundled name; default: two real logs")
    ] = None,
    repo: Annotated[Path | None, typer.Option(help="repository exported from the training part of --data")] = None,
) -> None:
    """AUC, NDCG@10, sizes and latencies of fp32, fp16 and int8. Exit code 1 when a bound is missed."""
    console, facts = Console(width=WIDTH), {}
    for name in (data,) if data else DATA:
        console.rule(name)
        try:
            dataset = load_dataset(name)
        except RecommenderError as error:
            if data:
                raise
            console.print(f"skipped: {error}")
            continue
        facts[name] = compare_precisions(dataset, repo or exported(dataset, WORK / dataset.description.name, console), console)
    if not facts:
        raise ConfigError(
            f"None of {', '.join(DATA)} is here, so nothing was measured. Name a data set that is: --data FOLDER."
        )
    print(last_line({"perf": "precision", **facts}))
    if not all(verdict["met"] for fact in facts.values() for verdict in fact["verdicts"]):
        raise typer.Exit(BROKEN)


if __name__ == "__main__":
    run(app, "python -m experiments.quality.precision")
