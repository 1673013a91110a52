"""Measure what the sequence network adds to a request: one history of 50 events, one core.

    python -m experiments.sequence_latency

An untrained network of the default shape is written as by an export, and asked as `retrieve` asks it: rows of the items are
gathered, and ONNX Runtime computes the vector of the user. Some seconds.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import numpy as np
import typer

from experiments.harness import RESULTS, Figure, ResultsFolder, finish, read_machine
from perf.command import run
from serving.contract.artifacts import open_network
from serving.stages.features.sequence import NETWORK, SequenceSource
from training.models.sequence import SequenceModel, SequenceShape
from training.retrieval.save import save_sequence

EVENTS, ITEMS, REQUESTS, ROUNDS = 50, 10_000, 500, 5

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


def measure(folder: Path, n_items: int, n_requests: int, rounds: int) -> list[Figure]:
    """Return the median latency of requests in each round."""
    rng = np.random.default_rng(0)
    model = SequenceModel(n_items, SequenceShape(length=EVENTS)).eval()
    history = rng.integers(0, n_items, (n_requests, EVENTS))
    age_days = np.sort(rng.exponential(30.0, history.shape).astype(np.float32), axis=1)
    save_sequence(folder, model, history[:8], age_days[:8])
    source = SequenceSource(open_network(folder, NETWORK), model.item_vectors, 1.0, EVENTS)
    medians_ms = []
    for _ in range(rounds):
        taken_s = []
        for row in range(n_requests):
            start_s = time.perf_counter()
            source.compute_vectors(history[row, None], age_days[row, None])
            taken_s.append(time.perf_counter() - start_s)
        medians_ms.append(1_000 * float(np.median(taken_s)))
    return [Figure(name=f"p50 of the sequence network, {EVENTS} events", values=medians_ms, unit="ms", at_most=1.0)]


@app.command()
def main(results: ResultsFolder = RESULTS) -> None:
    """p50 of the sequence network for one history, on one core."""
    machine = read_machine()
    with tempfile.TemporaryDirectory() as folder:
        figures = measure(Path(folder), ITEMS, REQUESTS, ROUNDS)
    conditions = f"one request at a time, one thread, {ITEMS:,} items, {REQUESTS} requests in each of {ROUNDS} rounds"
    command = "python -m experiments.sequence_latency"
    finish("sequence-latency", "The sequence network in a request", command, conditions, figures, results, machine)


if __name__ == "__main__":
    run(app, "python -m experiments.sequence_latency")
