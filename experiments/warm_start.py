"""Compare a sequence model that starts from the weights of the generation before with one that learns from scratch.

    python -m experiments.warm_start --data online-retail

    log ──split by time──▶ first 90 % ─▶ the generation before: from scratch
                           all of it  ─▶ from scratch, and from the weights of the generation before

Each learns from the earlier part of its log, as the retriever that gives the ranker its candidates does. It is asked for the
later part: the next item of a visit, and all items of a user's last events. The generation before learned only from events of
the earlier part.
"""

from __future__ import annotations

import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from experiments.harness import RESULTS, Figure, ResultsFolder, finish, read_machine
from export.training_settings import MOST_READ
from perf.command import run
from training.dataset import Dataset, load_dataset
from training.features.build import build_features
from training.gain import average
from training.models.sequence import SequenceShape
from training.models.train_sequence import SequenceSettings
from training.models.validation import split_training_log
from training.models.warm_start import EARLIER, write_learned
from training.retrieval.choose import make_questions, measure_quality
from training.retrieval.fit import RetrievalSettings, fit_training_retriever

KNOWN_SHARE = 0.9  # share of the log that the generation before knew
SCRATCH, WARM, WITHOUT = "from scratch", "from the weights before", "without a sequence model"

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


class Learned(NamedTuple):
    """quality: NDCG@10 + Recall@20 with the sequence model, mean over the kinds of questions; without: that without it"""

    quality: float
    without: float
    training_s: float


def learn(dataset: Dataset, settings: SequenceSettings, folder: Path, is_warm: bool) -> Learned:
    """Fit a retriever on the earlier part of a log, and measure it on the later part.

    folder: weights to start from if is_warm, and where the weights are written otherwise
    """
    log, features = dataset.interactions, build_features(dataset, dataset.interactions)
    chosen = RetrievalSettings(candidates=100, sequence=settings, start_from=folder if is_warm else None)
    earlier, later = split_training_log(log)
    began_s = time.process_time()
    fitted = fit_training_retriever(dataset, features, chosen, lambda _: None, earlier, EARLIER)
    training_s = time.process_time() - began_s
    if not is_warm:
        write_learned(folder, features.items.ids, {EARLIER: fitted.retriever.sequence}, 1)
    kinds = make_questions(features, log, later, chosen)
    quality, without = (
        average([measure_quality(replace(fitted, retriever=retriever), questions) for questions in kinds])
        for retriever in (fitted.retriever, fitted.retriever.weigh(sequence=0.0, graph=0.0, repeats=0.0))
    )
    return Learned(quality, without, training_s)


def measure(dataset: Dataset, settings: SequenceSettings) -> list[Figure]:
    known = int(len(dataset.interactions) * KNOWN_SHARE)
    before = replace(dataset, interactions=dataset.interactions.iloc[:known].reset_index(drop=True))
    with tempfile.TemporaryDirectory() as folder:
        learn(before, settings, Path(folder, "before"), is_warm=False)
        scratch = learn(dataset, settings, Path(folder, "scratch"), is_warm=False)
        warm = learn(dataset, settings, Path(folder, "before"), is_warm=True)
    return [
        Figure(name=f"NDCG@10 + Recall@20 {WITHOUT}", values=[scratch.without]),
        Figure(name=f"NDCG@10 + Recall@20 {SCRATCH}", values=[scratch.quality]),
        Figure(name=f"NDCG@10 + Recall@20 {WARM}", values=[warm.quality]),
        Figure(
            name=f"{WARM} over {SCRATCH}: NDCG@10 + Recall@20", values=[warm.quality / scratch.quality], unit="x", at_least=1
        ),
        Figure(name=f"{WARM} over {SCRATCH}: processor time of all sources", values=[warm.training_s / scratch.training_s]),
    ]


@app.command()
def main(
    data: Annotated[str, typer.Option(help="a log that is large enough for a sequence model")] = "online-retail",
    minutes: Annotated[float, typer.Option(help="minutes of training; the sequence model takes a fifth")] = 12.0,
    results: ResultsFolder = RESULTS,
) -> None:
    """Measure what a start from the weights before saves in time and gains in quality. Some minutes."""
    machine, dataset = read_machine(), load_dataset(data)
    events = int(minutes * 100_000)
    figures = measure(dataset, SequenceSettings(SequenceShape(length=MOST_READ), most_events=events))
    name, command = dataset.description.name, f"python -m experiments.warm_start --data {data} --minutes {minutes:g}"
    conditions = f"the generation before knew {KNOWN_SHARE:.0%} of the log; weight 1 of the sequence model; one seed"
    finish(f"warm-start-{name}", f"Warm start on {name}", command, conditions, figures, results, machine)


if __name__ == "__main__":
    run(app, "python -m experiments.warm_start")
