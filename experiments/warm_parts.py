"""Measure whether the two towers and the ranker would gain by going on from the weights of the generation before.

    python -m experiments.warm_parts --data online-retail

Both generations read the features of the whole log here, so every row of a table keeps its number and nothing has to be
matched: the best case for going on.
"""

from __future__ import annotations

import copy
import time
from dataclasses import replace
from typing import Annotated, NamedTuple

import numpy as np
import pandas as pd
import torch
import typer

from experiments.harness import RESULTS, Figure, ResultsFolder, finish, read_machine
from experiments.warm_start import KNOWN_SHARE, SCRATCH, WARM
from perf.command import run
from serving.loops.hashing import hash_integers
from training.dataset import Dataset, load_dataset
from training.dataset.matrix import make_matrix
from training.features.build import Features, build_features
from training.models.dlrm import DLRM, RankingModel
from training.models.item_item import fit_neighbours
from training.models.ranking import RankingSettings, make_requests_by_moment
from training.models.ranking_data import Requests, split_again
from training.models.retriever import (
    Retriever,
    RetrieverSettings,
    compute_log_popularity,
    factorise,
    item_vectors,
    prepare_data,
)
from training.models.train_ranker import best_blend, fit, predict, retrieval_z, train_ranker
from training.models.train_two_tower import train_towers
from training.models.two_tower import TwoTower
from training.retrieval.choose import make_questions, measure_quality
from training.retrieval.fit import FittedRetriever, RetrievalSettings

SETTINGS, CHOICES = RetrieverSettings(), RetrievalSettings(candidates=256)
WARM_EPOCHS = 3  # of the ranker's ten
HASHES, HELD_OUT = 1_000, 150  # users of hashes below HELD_OUT are asked and never learned from, by either generation

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


class Part(NamedTuple):
    """One part of the log. earlier: what models learn from; later: what they are asked for or, rankers, learn from"""

    log: pd.DataFrame
    earlier: pd.DataFrame
    later: pd.DataFrame


def measure(dataset: Dataset, seed: int = 0) -> list[Figure]:
    """Compare both ways for towers and ranker."""
    log, features = dataset.interactions, build_features(dataset, dataset.interactions)
    before, now = (Part(part, *split_again(part)) for part in (log.iloc[: int(KNOWN_SHARE * len(log))], log))
    first, _ = learn_towers(dataset, features, before, seed)
    towers = {
        SCRATCH: learn_towers(dataset, features, now, seed),
        WARM: learn_towers(dataset, features, now, seed, first.retriever.model),
    }
    questions = make_questions(features, log, now.later, CHOICES)
    found = {way: float(np.mean([measure_quality(fitted, kind) for kind in questions])) for way, (fitted, _) in towers.items()}
    ndcg, ranker_s = compare_rankers(dataset, features, (before, first), (now, towers[SCRATCH][0]), seed)
    return [
        *(Figure(name=f"two towers {way}: NDCG@10 + Recall@20", values=[value]) for way, value in found.items()),
        Figure(name=f"two towers {WARM} over {SCRATCH}: processor time", values=[towers[WARM][1] / towers[SCRATCH][1]]),
        *(Figure(name=f"ranker {way}: NDCG@10", values=[value]) for way, value in ndcg.items()),
        Figure(name=f"ranker {WARM} over {SCRATCH}: processor time", values=[ranker_s[WARM] / ranker_s[SCRATCH]]),
    ]


def learn_towers(
    dataset: Dataset, features: Features, part: Part, seed: int, start: TwoTower | None = None
) -> tuple[FittedRetriever, float]:
    """Fit item-item neighbours and towers on the earlier part. Return them and the processor time of the towers.

    start: towers to go on from, in place of the factors of the neighbours
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
    retriever = Retriever(model, neighbours, SETTINGS, item_vectors(model))
    return FittedRetriever(retriever, users, make_matrix(part.earlier, users, items), CHOICES.candidates), spent_s


def compare_rankers(
    dataset: Dataset,
    features: Features,
    before: tuple[Part, FittedRetriever],
    now: tuple[Part, FittedRetriever],
    seed: int,
) -> tuple[dict[str, float], dict[str, float]]:
    """Return NDCG@10 on users whom neither generation learned from, and the processor time, by way."""
    settings, tables = RankingSettings().ranker, (dict(features.user_rows), dict(features.item_rows))
    (old_teaching, old_asked), (teaching, asked) = (make_lessons(dataset, features, *part) for part in (before, now))
    first = train_ranker(old_teaching, old_asked, tables, settings, seed, lambda _: None)
    began_s = time.process_time()
    scratch = train_ranker(teaching, asked, tables, settings, seed, lambda _: None)
    scratch_s = time.process_time() - began_s
    warm: DLRM = copy.deepcopy(first.model)
    warm.read_like(scratch.model)
    began_s = time.process_time()
    fit(warm, teaching, asked, replace(settings, epochs=WARM_EPOCHS), np.random.default_rng(seed), lambda _: None)
    warm_s = time.process_time() - began_s
    return {SCRATCH: rank_best(scratch.model, asked), WARM: rank_best(warm, asked)}, {SCRATCH: scratch_s, WARM: warm_s}


def make_lessons(
    dataset: Dataset, features: Features, part: Part, retriever: FittedRetriever
) -> tuple[list[Requests], Requests]:
    """Return requests to learn from, by moment, and those of held-out users.."""
    rng, settings = np.random.default_rng(0), replace(RankingSettings(), most_moments=1)
    (latest,), visits = make_requests_by_moment(dataset, part.log, features, lambda _: retriever, settings, rng)
    parts = [latest] if visits is None else [latest, visits]
    held_out = [hash_integers(requests.users.user_categorical[:, 0]) % HASHES < HELD_OUT for requests in parts]
    teaching = [
        requests.take(np.flatnonzero(~own & requests.taken.any(axis=1))) for requests, own in zip(parts, held_out, strict=True)
    ]
    return teaching, latest.take(np.flatnonzero(held_out[0]))


def rank_best(model: RankingModel, asked: Requests) -> float:
    """Return NDCG@10 with the best blend weight of the retrieval score."""
    blends = RankingSettings().ranker.blends
    return best_blend(predict(model, asked), retrieval_z(asked), asked, blends)[1]["ndcg_at_10"]


@app.command()
def main(
    data: Annotated[str, typer.Option(help="a folder with a dataset.toml, or a bundled name")] = "online-retail",
    results: ResultsFolder = RESULTS,
) -> None:
    """Measure what towers and a ranker that go on find, and what it saves. Some minutes."""
    machine, dataset = read_machine(), load_dataset(data)
    figures, name = measure(dataset), dataset.description.name
    command = f"python -m experiments.warm_parts --data {data}"
    conditions = f"the generation before knew {KNOWN_SHARE:.0%} of the log; both read the features of the whole log; one seed"
    finish(f"warm-start-parts-{name}", f"Warm start of other models on {name}", command, conditions, figures, results, machine)


if __name__ == "__main__":
    run(app, "python -m experiments.warm_parts")
