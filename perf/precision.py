"""What fp16 and int8 do to the recommendations: `python -m perf.precision --repo REPO --data DATA`.

REPO must be exported from the training part of DATA (`make eval` leaves such a repository under .run/eval/DATA). The networks
that an export lowers are replaced by their lowered graphs, ranges and choices coming from the recorded requests, and the
evaluation split is answered in process. Where the re-ranker is published with no trust, its network has no say; then the same
is done once more with its correction added in full. Changes of NDCG@10 come with their standard error over users: few users
cannot tell a change of a thousandth from none. The graphs run on ONNX Runtime's CPU kernels, which have no fp16 arithmetic of
their own: latencies say what the stand-in costs, not what TensorRT gains. The last line is one line of JSON.
"""

from __future__ import annotations

import json
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

from export.dataset import load_dataset
from export.evaluation.evaluate import blocks, moved_up, positions_of, refuse_nothing_to_find, retrieval_order
from export.evaluation.metrics import auc, ndcg_at
from export.evaluation.problem import Problem, problem_of
from export.precision.calibration import NETWORKS, Arrays, recorded_feeds, stage_folders, with_networks
from export.precision.graphs import weight_bytes
from export.precision.lower import LOWERED_STAGES, PRECISIONS, lowered
from stages.pipeline import Pipeline

LEAST_AUC_SHARE = 0.999  # of fp32's
MOST_NDCG_CHANGE = 0.001
BATCHES = (1, 8)
RUNS = 60


@dataclass(frozen=True)
class Graph:
    """One network in one precision, on ONNX Runtime. max_change: largest difference of an output to fp32's."""

    stage: str
    precision: str
    file_bytes: int
    weight_bytes: int  # as executed
    max_change: float
    latency_ms: dict[int, float]  # batch size -> median of one run


@dataclass(frozen=True)
class Quality:
    """float64 [U] each, NaN where a user cannot be counted."""

    auc: np.ndarray
    ndcg_at_10: np.ndarray


@dataclass(frozen=True)
class Verdict:
    """Quality of the whole pipeline in one precision, and the two bounds."""

    case: str
    precision: str
    users: int
    auc: float
    ndcg_at_10: float
    auc_share: float
    ndcg_change: float
    ndcg_error: float  # standard error of the change, over users

    @property
    def met(self) -> bool:
        return self.auc_share >= LEAST_AUC_SHARE and abs(self.ndcg_change) <= MOST_NDCG_CHANGE


def lower_networks(folders: dict[str, Path], feeds: dict[str, list[Arrays]]) -> dict[str, dict[str, onnx.ModelProto]]:
    """-> precision -> stage -> graph."""
    source = {stage: onnx.load(str(folders[stage] / f"{name}.onnx")) for stage, name in NETWORKS.items()}
    return {
        precision: {stage: lowered(model, precision, feeds[stage])[0] for stage, model in source.items()}
        for precision in PRECISIONS
    }


def session_of(model: onnx.ModelProto) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def measure_graphs(graphs: dict[str, dict[str, onnx.ModelProto]], feeds: dict[str, list[Arrays]]) -> list[Graph]:
    """-> sizes, differences and latencies of every graph. Precisions take turns, so that a slow minute is everybody's."""
    measured = []
    for stage in NETWORKS:
        sessions = {precision: session_of(graphs[precision][stage]) for precision in PRECISIONS}
        expected = [sessions["fp32"].run(None, feed)[0] for feed in feeds[stage]]
        latencies = {batch: medians_ms(sessions, first_rows(feeds[stage][0], batch)) for batch in BATCHES}
        for precision, session in sessions.items():
            model = graphs[precision][stage]
            changes = [np.abs(session.run(None, f)[0] - e).max() for f, e in zip(feeds[stage], expected, strict=True)]
            own = {batch: of_batch[precision] for batch, of_batch in latencies.items()}
            measured.append(Graph(stage, precision, model.ByteSize(), weight_bytes(model), float(max(changes)), own))
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


def cases_of(pipeline: Pipeline) -> dict[str, Pipeline]:
    """-> what is evaluated: the pipeline as served, and one in which the re-ranker has a say if it has none there."""
    rerank = pipeline.stages["rerank"]
    cases = {"as served": pipeline}
    if not rerank.settings.trust:
        trusting = replace(rerank, settings=replace(rerank.settings, trust=1.0))
        cases["re-ranker trusted in full"] = replace(pipeline, stages=pipeline.stages | {"rerank": trusting})
    return cases


def evaluate(pipeline: Pipeline, graphs: dict[str, dict[str, onnx.ModelProto]], data: str, console: Console) -> list[Verdict]:
    dataset = load_dataset(data)
    problem = problem_of(dataset)
    refuse_nothing_to_find(dataset, problem)
    verdicts = []
    for case, own in cases_of(pipeline).items():
        exact = None
        for precision in PRECISIONS:
            networks = {stage: session_of(graphs[precision][stage]) for stage in LOWERED_STAGES}
            quality = quality_of(with_networks(own, networks), problem)
            exact = exact or quality
            verdicts.append(verdict_of(case, precision, quality, exact))
            console.print(f"[dim]{verdicts[-1]}[/]", highlight=False)
    return verdicts


def quality_of(pipeline: Pipeline, problem: Problem) -> Quality:
    """AUC over the whole catalogue, behind the list in the order of the stages before; NDCG of the list (as `make eval`)."""
    aucs, ndcgs = [], []
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
    return Quality(np.concatenate(aucs), np.concatenate(ndcgs))


def verdict_of(case: str, precision: str, got: Quality, exact: Quality) -> Verdict:
    """exact: fp32's, of the same users."""
    auc_mean, exact_auc = float(np.nanmean(got.auc)), float(np.nanmean(exact.auc))
    ndcg, exact_ndcg = float(np.nanmean(got.ndcg_at_10)), float(np.nanmean(exact.ndcg_at_10))
    changes = got.ndcg_at_10 - exact.ndcg_at_10
    error = np.nanstd(changes) / np.sqrt(np.isfinite(changes).sum()) / exact_ndcg
    shares = (auc_mean / exact_auc, ndcg / exact_ndcg - 1.0)
    return Verdict(case, precision, len(changes), auc_mean, ndcg, *shares, float(error))


def graph_table(graphs: list[Graph]) -> Table:
    table = Table(title="Networks on ONNX Runtime (CPU, one thread)")
    for heading in ("network", "precision", "file kB", "weights kB", "largest change", *(f"ms, batch {b}" for b in BATCHES)):
        table.add_column(heading, justify="left" if heading in ("network", "precision") else "right")
    for graph in graphs:
        sizes = (f"{graph.file_bytes / 1e3:.0f}", f"{graph.weight_bytes / 1e3:.0f}", f"{graph.max_change:.2g}")
        table.add_row(NETWORKS[graph.stage], graph.precision, *sizes, *(f"{graph.latency_ms[b]:.2f}" for b in BATCHES))
    return table


def verdict_table(verdicts: list[Verdict]) -> Table:
    table = Table(title=f"Whole pipeline, ranker and re-ranker in that precision, {verdicts[0].users:,} test users")
    table.caption = f"bounds: AUC at least {LEAST_AUC_SHARE:.1%} of fp32, NDCG@10 within {MOST_NDCG_CHANGE:.1%}"
    for heading in ("", "precision", "AUC", "of fp32", "NDCG@10", "change", "bounds"):
        table.add_column(heading, justify="left" if heading in ("", "precision") else "right")
    for v in verdicts:
        shares = (f"{v.auc:.4f}", f"{v.auc_share:.3%}", f"{v.ndcg_at_10:.4f}", f"{v.ndcg_change:+.3%} ± {v.ndcg_error:.3%}")
        table.add_row(v.case, v.precision, *shares, "met" if v.met else "missed")
    return table


def main(
    repo: Annotated[Path, typer.Option(help="repository exported from the training part of the data")],
    data: Annotated[str, typer.Option(help="folder with a dataset.toml, or bundled name")] = "online-retail",
) -> None:
    """AUC, NDCG@10, sizes and latencies of fp32, fp16 and int8. Exit code 1 when a bound is missed."""
    console = Console(soft_wrap=True)
    folders = stage_folders(repo)
    feeds = recorded_feeds(folders)
    graphs = lower_networks(folders, feeds)
    measured = measure_graphs(graphs, feeds)
    verdicts = evaluate(Pipeline.load(repo), graphs, data, console)
    console.print(graph_table(measured), verdict_table(verdicts))
    facts = {"graphs": [asdict(g) for g in measured], "verdicts": [asdict(v) | {"met": v.met} for v in verdicts]}
    print(json.dumps({"perf": "precision", "data": data, **facts}))
    if not all(verdict.met for verdict in verdicts):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
