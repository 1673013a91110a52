"""Measure leave-one-out quality, as papers on sequential recommendation do: served lists, baselines and published figures.

    python -m experiments.leave_one_out --data amazon-sports --seeds 0,1,2 [--resume]

    each user's events:  e1 e2 … │ validation │ test
                         models learn from e1 e2 … alone; settings are chosen on the validation items

At the end every user's test item is predicted, with everything before it as history. All items are ranked except those that the
user has seen. Every event counts as a positive, whatever its rating. As in those papers, times tell nothing but the order of a
user's events: the last events of all users get one time, those before them an earlier one, and so on. This compares:

    served       the whole pipeline, in process: an export of e1 e2 …, then the validation items are observed live
    SASRec       a plain transformer with sampled softmax (training/models/candidates/sequence.py without knowledge of
                 times): every shape of SHAPES is trained with the first seed; the one that finds the most validation items
                 learns from these items too, with every seed
    popularity, item-kNN, EASE    settings chosen on the validation items; they learn from these items too

Served lists must beat SASRec by a tenth. Often another baseline is better; the comparison with the best one of each measure has
no bound. Published figures that an answer may be compared with are in PUBLISHED. Hours per data set and seed, on two cores:
each part is kept in WORK once it is measured, and --resume takes what is kept there.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated

import numpy as np
import pandas as pd
import scipy.sparse as sp
import typer
from rich.console import Console

from experiments.harness import RESULTS, DataSets, Figure, ResultsFolder, Seeds, finish, read_machine
from export.build import build_repository
from export.continuous.prequential import EVENTS_PER_BATCH, make_event_inputs, split_blocks
from export.settings import PipelineSettings, Settings, TrainingSettings
from perf.command import run
from serving.contract.errors import DataError
from serving.contract.generations import read_pinned_generation
from serving.contract.tensors import OBSERVE, PAD_ID
from serving.live.reader import Reader
from serving.live.store import find_live_folder
from serving.pipeline import Pipeline
from serving.stages.live.models import Observe
from training.dataset import Dataset, load_dataset
from training.dataset.matrix import make_matrix
from training.evaluation.baselines import GRAM_LIMIT, GRIDS, Split, search
from training.evaluation.metrics import coverage, ndcg_at, rank_top_k, recall_at
from training.features.build import Examples
from training.models.candidates.sequence import SequenceModel, SequenceShape
from training.models.candidates.train_sequence import DAY_S, SequenceSettings, Taken, cut_windows, train_sequence

WORK = Path(".run/leave-one-out")
DATA = ["amazon-sports", "movielens"]
BASELINES = ("popularity", "item-kNN", "EASE")
MEASURES = {"recall_at_10": "Recall@10", "ndcg_at_10": "NDCG@10", "coverage": "coverage"}
SERVED, SASREC = "served", "SASRec with sampled softmax"
SHAPES = [
    SequenceShape(width=width, dropout=dropout, length=50, knows_time=False)
    for width, dropout in ((64, 0.2), (64, 0.5), (128, 0.5))
]
EPOCHS, BATCH_EVENTS = 40, 2_048
MINUTES = 30.0  # of training, so that the sequence model is tried
LIST_LENGTH, USERS_PER_CALL = 20, 64
PUBLISHED = {  # data set -> (model, Recall@10, NDCG@10), by this protocol
    "amazon-sports": (
        # From github.com/aHuiWang/CIKM2020-S3Rec: the paper itself ranks each test item among 99 random ones alone.
        ("SASRec (repository of S3-Rec)", 0.0350, 0.0192),
        ("S3-Rec (repository of Zhou et al. 2020)", 0.0385, 0.0204),
        ("TIGER (Rajput et al. 2023)", 0.0400, 0.0225),
        ("ActionPiece (Hou et al. 2025)", 0.0500, 0.0264),
    )
}


@dataclass(frozen=True)
class Parts:
    """The log in three: rows of `events`, sorted by user, then by time, whose timestamps hold their order alone.

    All events of a user with less than 3 are learned.
    """

    events: pd.DataFrame
    learned: np.ndarray
    validation: np.ndarray
    test: np.ndarray

    @classmethod
    def of(cls, dataset: Dataset) -> Parts:
        """Divide the log of a data set. Raises DataError when no user has a last event to find."""
        events = dataset.interactions.sort_values("user_id", kind="stable", ignore_index=True).assign(positive=True)
        by_user = events.groupby("user_id")["user_id"]
        left, lengths = by_user.cumcount(ascending=False).to_numpy(), by_user.transform("size").to_numpy()
        events["timestamp"] = events["timestamp"].max() - left * int(DAY_S)
        if not (lengths >= 3).any():
            raise DataError(
                f"{dataset.description.name}: no user has 3 events, so that none is left to find. "
                "Leave one out needs users with at least 3 events; the export does not."
            )
        last = [np.flatnonzero((left == place) & (lengths >= 3)) for place in (0, 1)]
        return cls(events, np.flatnonzero((left > 1) | (lengths < 3)), last[1], last[0])


@dataclass(frozen=True)
class Quality:
    recall_at_10: float
    ndcg_at_10: float
    coverage: float

    @classmethod
    def of(cls, positions: np.ndarray, targets: np.ndarray, n_items: int) -> Quality:
        """Average over users. positions: int64 [U, 10 or more], padded with n_items; targets: int64 [U]"""
        relevant = sp.csr_matrix((np.ones(len(targets)), (np.arange(len(targets)), targets)), shape=(len(targets), n_items))
        positions = positions[:, :10]
        recall, ndcg = recall_at(positions, relevant, 10).mean(), ndcg_at(positions, relevant, 10).mean()
        return cls(float(recall), float(ndcg), coverage(positions, n_items))


Qualities = dict[str, list[Quality]]  # by the name of what answered: SERVED, SASREC or a baseline


@dataclass(frozen=True)
class Measured:
    """Values that a run has measured so far, by part, in a JSON file, so that a run of hours can be resumed.

    The file holds no trace of the code that measured: resume only what the same code began.
    """

    path: Path

    def take(self, part: str, measure: Callable[[], dict[str, float]]) -> dict[str, float]:
        """Return the values of a part: from the file, or measured now and added to it."""
        known = json.loads(self.path.read_text()) if self.path.exists() else {}
        if part not in known:
            known[part] = measure()
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.write_text(json.dumps(known))
        return known[part]


def measure_served(dataset: Dataset, repository: Path, seed: int, console: Console) -> Quality:
    """Return the quality of the lists that the whole pipeline serves."""
    parts, item_ids = Parts.of(dataset), dataset.items["item_id"].to_numpy()
    settings = Settings(pipeline=PipelineSettings(seed=seed), training=TrainingSettings(minutes=MINUTES))
    build_repository(take_part(dataset, parts, parts.learned), repository, settings, console)
    positions = np.searchsorted(item_ids, ask_served(repository, dataset, parts))
    return Quality.of(positions, find_targets(dataset, parts), len(item_ids))


def find_targets(dataset: Dataset, parts: Parts) -> np.ndarray:
    """Return int64 [U]: the positions of the test items."""
    return np.searchsorted(dataset.items["item_id"].to_numpy(), parts.events["item_id"].to_numpy()[parts.test])


def take_part(dataset: Dataset, parts: Parts, rows: np.ndarray) -> Dataset:
    """Return the data set with some rows of `parts.events` only, sorted by time."""
    events = parts.events.iloc[rows].sort_values("timestamp", kind="stable", ignore_index=True)
    return replace(dataset, interactions=events)


def ask_served(repository: Path, dataset: Dataset, parts: Parts) -> np.ndarray:
    """Return int64 [U, 20] item ids for the users of the test rows, once the validation items are observed."""
    folder = find_live_folder(repository)
    shutil.rmtree(folder, ignore_errors=True)
    observed = take_part(dataset, parts, parts.validation)
    observe = Observe.load(repository / OBSERVE / str(read_pinned_generation(repository)))
    users = parts.events["user_id"].to_numpy(np.int64)[parts.test]
    with closing(observe), closing(Reader(folder)) as reader, closing(Pipeline.load(repository, live=reader)) as pipeline:
        for rows in split_blocks(np.arange(len(observed.interactions)), EVENTS_PER_BATCH):
            observe(make_event_inputs(observed, rows))
        blocks = [pipeline({"user_id": block[:, None]})["item_ids"] for block in split_blocks(users, USERS_PER_CALL)]
    answers = np.concatenate(blocks)[:, :LIST_LENGTH]
    return np.where(answers == PAD_ID, np.iinfo(np.int64).max, answers)


def validate_sasrec(dataset: Dataset, shape: SequenceShape, seed: int) -> Quality:
    """Return how well a shape finds the validation items."""
    parts = Parts.of(dataset)
    log, n_items = encode_log(dataset, parts), len(dataset.items)
    model = fit_sasrec(log, parts.learned, n_items, shape, seed)
    return Quality.of(ask_model(model, log, parts.validation, n_items), log[1][parts.validation], n_items)


def measure_sasrec(dataset: Dataset, shape: SequenceShape, seed: int) -> Quality:
    """Return how well a shape finds the test items once it has learned from the validation items as well."""
    parts = Parts.of(dataset)
    log, n_items = encode_log(dataset, parts), len(dataset.items)
    known = np.sort(np.concatenate([parts.learned, parts.validation]))
    model = fit_sasrec(log, known, n_items, shape, seed)
    return Quality.of(ask_model(model, log, parts.test, n_items), log[1][parts.test], n_items)


def fit_sasrec(
    log: tuple[np.ndarray, np.ndarray, np.ndarray], rows: np.ndarray, n_items: int, shape: SequenceShape, seed: int
) -> SequenceModel:
    """Train SASRec on rows of the log, int64 [N]. log: from `encode_log`"""
    windows = cut_windows(Taken(*(values[rows] for values in log)), n_items, shape.length)
    settings = SequenceSettings(
        shape, epochs=EPOCHS, most_events=EPOCHS * len(rows), batch_events=BATCH_EVENTS, learning_rate=1e-3
    )
    return train_sequence(windows, n_items, settings, seed, lambda _: None)


def encode_log(dataset: Dataset, parts: Parts) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return users numbered from 0, item positions and times, int64 [N] of `parts.events`."""
    _, users = np.unique(parts.events["user_id"].to_numpy(), return_inverse=True)
    items = np.searchsorted(dataset.items["item_id"].to_numpy(), parts.events["item_id"].to_numpy())
    return users, items, parts.events["timestamp"].to_numpy()


def ask_model(
    model: SequenceModel, log: tuple[np.ndarray, np.ndarray, np.ndarray], rows: np.ndarray, n_items: int
) -> np.ndarray:
    """Return int64 [U, 20] positions for events, rows of the log, from the user's events before each."""
    users, items, times_s = log
    answers = []
    for block in split_blocks(rows, 512):
        back = block[:, None] - 1 - np.arange(model.encoder.shape.length)
        is_own = (back >= 0) & (users[np.maximum(back, 0)] == users[block][:, None])
        history = np.where(is_own, items[np.maximum(back, 0)], n_items)
        ages = np.where(is_own, (times_s[block][:, None] - times_s[np.maximum(back, 0)]) / DAY_S, 0.0).astype(np.float32)
        nothing = np.zeros((len(block), 0))
        scores = model.compute_user_vectors(Examples(nothing, nothing, history, ages)) @ model.item_vectors.T
        answers.append(rank_top_k(scores, find_earlier_items(users, items, block, n_items), LIST_LENGTH))
    return np.concatenate(answers)


def find_earlier_items(users: np.ndarray, items: np.ndarray, rows: np.ndarray, n_items: int) -> sp.csr_matrix:
    """Return CSR [U, n_items]: the items of each row's user in earlier rows."""
    starts = np.searchsorted(users, users[rows])
    lengths = rows - starts
    positions = np.repeat(starts - (np.cumsum(lengths) - lengths), lengths) + np.arange(lengths.sum())
    entries = (np.ones(len(positions), np.float32), (np.repeat(np.arange(len(rows)), lengths), items[positions]))
    return sp.csr_matrix(entries, shape=(len(rows), n_items))


def list_baselines(n_users: int, n_items: int) -> list[str]:
    """Return the names in BASELINES, without EASE where its matrices are too large to invert. n_users: with a test item"""
    return [name for name in BASELINES if name != "EASE" or min(n_users, n_items) <= GRAM_LIMIT]


def measure_baseline(dataset: Dataset, name: str) -> Quality:
    """Return the quality of one of BASELINES, which no seed changes."""
    parts, item_ids = Parts.of(dataset), dataset.items["item_id"].to_numpy()
    user_ids = np.unique(parts.events["user_id"].to_numpy()[parts.test])
    learned, validation = (
        make_matrix(parts.events.iloc[rows], user_ids, item_ids)
        for rows in (
            parts.learned[np.isin(parts.events["user_id"].to_numpy()[parts.learned], user_ids)],
            parts.validation,
        )
    )
    before = learned.maximum(validation)
    tuned = Split(learned, learned, validation - validation.multiply(learned))
    fit, grid = GRIDS[name]
    scores = fit(before, **(search(fit, grid, tuned) if grid else {}))
    users = split_blocks(np.arange(len(user_ids)), 512)
    positions = np.concatenate([rank_top_k(scores(block), before[block], LIST_LENGTH) for block in users])
    return Quality.of(positions, find_targets(dataset, parts), len(item_ids))


def measure(dataset: Dataset, seeds: list[int], measured: Measured, console: Console) -> tuple[Qualities, SequenceShape]:
    """Return the qualities and the shape of SASRec that was chosen, with the first of the seeds."""

    def take(part: str, measure_part: Callable[[], Quality]) -> Quality:
        quality = Quality(**measured.take(part, lambda: asdict(measure_part())))
        console.print(f"{part}: NDCG@10 {quality.ndcg_at_10:.4f}")
        return quality

    repository, validated = WORK / dataset.description.name, []
    baselines = list_baselines(len(Parts.of(dataset).test), len(dataset.items))
    fixed = {name: [take(name, partial(measure_baseline, dataset, name))] for name in baselines}
    for shape in SHAPES:
        validated.append(
            take(f"validation of {describe(shape)}, seed {seeds[0]}", partial(validate_sasrec, dataset, shape, seeds[0]))
        )
    best = SHAPES[int(np.argmax([quality.ndcg_at_10 for quality in validated]))]
    sasrec = [take(f"{describe(best)}, seed {seed}", partial(measure_sasrec, dataset, best, seed)) for seed in seeds]
    served = [take(f"served, seed {seed}", partial(measure_served, dataset, repository, seed, console)) for seed in seeds]
    return {SERVED: served, SASREC: sasrec, **fixed}, best


def describe(shape: SequenceShape) -> str:
    return f"SASRec of width {shape.width} and dropout {shape.dropout:g}"


def make_figures(name: str, qualities: Qualities) -> list[Figure]:
    """Return the figures. qualities: of SERVED and SASREC, by seed; of the baselines, one each

    The best baseline of a measure may be SASREC. Medians are compared with it, because not every baseline depends on a seed.
    """
    measured = {
        answerer: {title: [getattr(quality, field) for quality in rounds] for field, title in MEASURES.items()}
        for answerer, rounds in qualities.items()
    }
    figures = [
        Figure(name=f"{answerer}: {title}", values=values)
        for answerer, by_title in measured.items()
        for title, values in by_title.items()
    ]
    served_values = measured.pop(SERVED)
    for title in ("Recall@10", "NDCG@10"):
        ratios = [value / other for value, other in zip(served_values[title], measured[SASREC][title], strict=True)]
        figures.append(Figure(name=f"served over SASRec: {title}", values=ratios, unit="x", at_least=1.1))
    for title, values in served_values.items():
        best = max(np.median(by_title[title]) for by_title in measured.values())
        ratio = float(np.median(values) / best)
        figures.append(Figure(name=f"served over the best baseline: {title}", values=[ratio], unit="x"))
    for model, recall, ndcg in PUBLISHED.get(name, ()):
        figures.append(Figure(name=f"published, {model}: Recall@10", values=[recall]))
        figures.append(Figure(name=f"published, {model}: NDCG@10", values=[ndcg]))
    return figures


def main(
    data: DataSets = DATA,
    seeds: Seeds = "0,1,2",
    resume: Annotated[bool, typer.Option("--resume", help="take what an interrupted run of the same code measured")] = False,
    results: ResultsFolder = RESULTS,
) -> None:
    """Measure Recall@10 and NDCG@10 of each user's last item: the served lists, baselines, and published figures."""
    console = Console(stderr=True)
    for source in data:
        machine, dataset = read_machine(), load_dataset(source)
        name = dataset.description.name
        measured = Measured(WORK / f"{name}.json")
        if not resume:
            measured.path.unlink(missing_ok=True)
        qualities, shape = measure(dataset, [int(seed) for seed in seeds.split(",")], measured, console)
        conditions = (
            f"last item of each user, all items ranked, seeds {seeds}, [training] minutes = {MINUTES:g}, in process; "
            f"{describe(shape)} found the most validation items, of {len(SHAPES)} shapes"
        )
        command = f"python -m experiments.leave_one_out --data {source} --seeds {seeds}"
        figures = make_figures(name, qualities)
        finish(f"leave-one-out-{name}", f"Leave one out on {name}", command, conditions, figures, results, machine)


if __name__ == "__main__":
    run(main, "python -m experiments.leave_one_out")
