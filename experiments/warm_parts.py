"""Measure whether the two towers and the ranker gain by starting from the weights of the generation before.

    python -m experiments.warm_parts --data online-retail

Towers of both generations read the features of the whole log, so every row of a table keeps its number and nothing has to be
matched: the best case for such a start. Rankers are trained and kept as in `export follow`.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, NamedTuple

import numpy as np
import pandas as pd
import torch
import typer

from experiments.harness import RESULTS, Figure, ResultsFolder, finish, read_machine
from experiments.warm_start import KNOWN_SHARE, SCRATCH, WARM
from perf.command import run
from training.dataset import Dataset, load_dataset
from training.dataset.matrix import make_matrix
from training.features.build import Features, build_features
from training.gain import average
from training.models.distill import Lesson, distil
from training.models.dlrm import RankingModel
from training.models.item_item import fit_neighbours
from training.models.ranking import Lessons, RankingSettings, add_unlabelled, collect_lessons
from training.models.ranking_data import Requests, fit_item_statistics
from training.models.retriever import (
    Retriever,
    RetrieverSettings,
    compute_item_vectors,
    compute_log_popularity,
    factorise,
    prepare_data,
)
from training.models.train_ranker import (
    Ranker,
    Start,
    compute_rank_scores,
    compute_shares,
    find_best_blend,
    predict,
    take_retrieval_z,
    train_ranker,
)
from training.models.train_two_tower import train_towers
from training.models.two_tower import TwoTower
from training.models.validation import split_training_log
from training.models.warm_ranker import start_ranker, write_ranker
from training.retrieval.choose import make_questions, measure_quality
from training.retrieval.fit import FittedRetriever, RetrievalSettings

SETTINGS, CHOICES = RetrieverSettings(), RetrievalSettings(candidates=256)
RANKING = RankingSettings(compression="distilled", most_moments=1)

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


class Part(NamedTuple):
    """One part of the log. earlier: what models learn from; later: what they are asked for or, rankers, learn from"""

    log: pd.DataFrame
    earlier: pd.DataFrame
    later: pd.DataFrame


class Generation(NamedTuple):
    """lessons: validation requests are of users whom neither generation learns from"""

    features: Features
    lessons: Lessons


def measure(dataset: Dataset, seed: int = 0) -> list[Figure]:
    """Compare both ways for towers and ranker."""
    log, features = dataset.interactions, build_features(dataset, dataset.interactions)
    before, now = (Part(part, *split_training_log(part)) for part in (log.iloc[: int(KNOWN_SHARE * len(log))], log))
    first, _ = learn_towers(dataset, features, before, seed)
    towers = {
        SCRATCH: learn_towers(dataset, features, now, seed),
        WARM: learn_towers(dataset, features, now, seed, first.retriever.model),
    }
    questions = make_questions(features, log, now.later, CHOICES)
    found = {way: average([measure_quality(fitted, kind) for kind in questions]) for way, (fitted, _) in towers.items()}
    known = replace(dataset, interactions=before.log.reset_index(drop=True))
    of_before = build_features(known, known.interactions)
    rankers = compare_rankers(
        make_generation(known, of_before, before, learn_towers(known, of_before, before, seed)[0], seed),
        make_generation(dataset, features, now, towers[SCRATCH][0], seed),
        seed,
    )
    return [
        *(Figure(name=f"two towers {way}: NDCG@10 + Recall@20", values=[value]) for way, value in found.items()),
        Figure(name=f"two towers {WARM} over {SCRATCH}: processor time", values=[towers[WARM][1] / towers[SCRATCH][1]]),
        *rankers,
    ]


def learn_towers(
    dataset: Dataset, features: Features, part: Part, seed: int, start: TwoTower | None = None
) -> tuple[FittedRetriever, float]:
    """Fit item-item neighbours and towers on the earlier part. Return them and the processor time of the towers.

    start: towers to start from, in place of the factors of the neighbours
    """
    rows = np.sort(part.earlier.loc[part.earlier["positive"].to_numpy(), "row"].to_numpy())
    data, towers = prepare_data(features, part.log, rows), SETTINGS.towers
    neighbours = fit_neighbours(data.positives, SETTINGS.item_item, np.random.default_rng(seed))
    torch.manual_seed(seed)
    model = TwoTower(data.items, data.user_rows, data.examples.user_continuous.shape[1], towers.width)
    if start is None:
        model.initialise(*factorise(neighbours, towers.width - 1, seed), compute_log_popularity(data.positives))
    else:
        model.load_state_dict(start.state_dict())
    began_s = time.process_time()
    train_towers(model, data.examples, data.targets, data.takers, towers, seed, lambda _: None)
    spent_s = time.process_time() - began_s
    users, items = dataset.users["user_id"].to_numpy(), dataset.items["item_id"].to_numpy()
    retriever = Retriever(model, neighbours, SETTINGS, compute_item_vectors(model))
    return FittedRetriever(retriever, users, make_matrix(part.earlier, users, items), CHOICES.candidates), spent_s


def compare_rankers(before: Generation, now: Generation, seed: int) -> list[Figure]:
    """Train the ranker and its student from scratch and from the weights of the generation before, on different features."""
    first, _ = teach(before, seed)
    with tempfile.TemporaryDirectory() as folder:
        write_ranker(Path(folder), before.features, first, 1)
        start = partial(start_ranker, Path(folder), now.features)
        trained = {SCRATCH: teach(now, seed), WARM: teach(now, seed, start)}
    figures, asked = [], now.lessons.validation
    for way, (ranker, _) in trained.items():
        figures += [
            Figure(name=f"ranker {way}: NDCG@10", values=[rank_best(ranker.teacher or ranker.model, asked)]),
            Figure(name=f"its student {way}: NDCG@10", values=[ranker.quality["ndcg_at_10"]]),
        ]
    for number, name in enumerate(("ranker", "its student")):
        spent_s = {way: times_s[number] for way, (_, times_s) in trained.items()}
        figures.append(Figure(name=f"{name} {WARM} over {SCRATCH}: processor time", values=[spent_s[WARM] / spent_s[SCRATCH]]))
    return figures


def teach(generation: Generation, seed: int, start: Start | None = None) -> tuple[Ranker, tuple[float, float]]:
    """Train a ranker and its student. Return the student, and the processor time of each in seconds."""
    features, lessons = generation
    tables = (dict(features.user_rows), dict(features.item_rows))
    quiet: Callable[[str], None] = lambda _: None  # noqa: E731
    began_s = time.process_time()
    known = (lessons.teaching, lessons.validation, tables)
    ranker = train_ranker(*known, RANKING.ranker, seed, quiet, start, lessons.without_events)
    taught_s = time.process_time()
    imitated = [*lessons.teaching, *lessons.unlabelled]
    lesson = Lesson.of(ranker, imitated, lessons.validation, lambda part: compute_shares(compute_rank_scores(ranker, part)))
    student = distil(lesson, RANKING.student, seed, quiet, start)
    return student, (taught_s - began_s, time.process_time() - taught_s)


def make_generation(dataset: Dataset, features: Features, part: Part, earlier: FittedRetriever, seed: int) -> Generation:
    """Return the requests of one generation, as an export makes them. earlier: fitted on the earlier part"""
    rng, whole = np.random.default_rng(0), part._replace(earlier=part.log.assign(row=np.arange(len(part.log))))
    served, _ = learn_towers(dataset, features, whole, seed)
    lessons = collect_lessons(dataset, part.log, features, lambda _: earlier, RANKING, rng)
    statistics = fit_item_statistics(features, part.log, RANKING.statistics)
    return Generation(features, add_unlabelled(lessons, part.log, features, statistics, served, RANKING, rng))


def rank_best(model: RankingModel, asked: Requests) -> float:
    """Return NDCG@10 with the best blend weight of the retrieval score."""
    return find_best_blend(predict(model, asked), take_retrieval_z(asked), asked, RANKING.ranker.blends)[1]["ndcg_at_10"]


@app.command()
def main(
    data: Annotated[str, typer.Option(help="a folder with a dataset.toml, or a bundled name")] = "online-retail",
    results: ResultsFolder = RESULTS,
) -> None:
    """Measure what towers and a ranker that start from earlier weights find, and what it saves. Some minutes."""
    machine, dataset = read_machine(), load_dataset(data)
    figures, name = measure(dataset), dataset.description.name
    command = f"python -m experiments.warm_parts --data {data}"
    conditions = f"the generation before knew {KNOWN_SHARE:.0%} of the log; both read the features of the whole log; one seed"
    finish(f"warm-start-parts-{name}", f"Warm start of other models on {name}", command, conditions, figures, results, machine)


if __name__ == "__main__":
    run(app, "python -m experiments.warm_parts")
