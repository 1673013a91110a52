"""Measure the quality of what is served beside the baselines: as `make eval`, on several data sets, and write the figures.

    python -m experiments.quality [--data online-retail --data movielens] [--seeds 0,1,2]

The log is split by time (training/dataset/split.py: the last 20 % are the test, of each user where few users return), a
repository is exported from the earlier part alone and served by a real tritonserver. Items a user already had are neither
served nor counted, unless `--repeats` sets `[pipeline] filter_seen = false`. Other settings are the defaults everywhere. Beside
the qualities stands what the export tried of the sources of candidates that it may leave out (training/retrieval/choose.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from experiments.harness import RESULTS, DataSets, Figure, ResultsFolder, Seeds, finish, read_machine
from export.evaluate import SERVED, evaluate_dataset
from export.settings import PipelineSettings, Settings
from perf.command import run
from serving.contract.artifacts import MANIFEST_FILE, find_stage_folder, read_json
from serving.contract.generations import read_pinned_generation
from serving.contract.tensors import ENSEMBLE
from training.dataset import Dataset, load_dataset, split_log
from training.evaluation.baselines import Quality
from training.evaluation.problem import TEST_SHARE

WORK = Path(".run/eval")
TUNED_ON = {"online-retail", "movielens"}  # their test parts chose the towers' learning rate, batch and stopping rule
MEASURES = {"recall_at_20": "Recall@20", "ndcg_at_10": "NDCG@10"}
DATA = ["online-retail", "movielens", "amazon-grocery", "synthetic:small"]


def make_figures(runs: Sequence[Mapping[str, Quality]]) -> list[Figure]:
    """Return the figures. runs: per seed, the quality by name of a baseline, "after <stage>", and SERVED"""
    figures = []
    for name in runs[0]:
        for measure, title in MEASURES.items():
            figures.append(Figure(name=f"{name}: {title}", values=[getattr(run[name], measure) for run in runs]))
    baselines = [name for name in runs[0] if name != SERVED and not name.startswith("after ")]
    for measure, title in MEASURES.items():
        best = [max(getattr(run[name], measure) for name in baselines) for run in runs]
        ratios = [getattr(run[SERVED], measure) / value for run, value in zip(runs, best, strict=True)]
        figures.append(Figure(name=f"{SERVED} over the best baseline: {title}", values=ratios, unit="x"))
    return figures


def make_choice_figures(sources: Mapping[str, Mapping[str, Any]]) -> list[Figure]:
    """Return what one export found of each source on its own validation part. sources: `reports.sources` of its manifest

    The measure is NDCG@10 + Recall@20 of the candidates, without the source and with it at the best weight that was tried.
    """
    figures = []
    for name, choice in sources.items():
        quality_by_weight = {float(weight): value for weight, value in choice["validation"].items()}
        if len(quality_by_weight) > 1:  # the model was tried
            best = max(value for weight, value in quality_by_weight.items() if weight)
            figures.append(Figure(name=f"auto: weight of the {name} model", values=[choice["weight"]]))
            figures.append(Figure(name=f"auto, validation without the {name} model", values=[quality_by_weight[0.0]]))
            figures.append(Figure(name=f"auto, validation with the {name} model", values=[best]))
    return figures


def describe_test(dataset: Dataset) -> str:
    """Return which part of the log is the test."""
    train, test = split_log(dataset.interactions, TEST_SHARE)
    is_moment = train["timestamp"].max() < test["timestamp"].min()
    return "last 20 % of the events" + ("" if is_moment else " of each user, because few users return")


def main(
    data: DataSets = DATA,
    seeds: Seeds = "0,1,2",
    repeats: Annotated[bool, typer.Option(help="serve and count what users took before, too")] = False,
    results: ResultsFolder = RESULTS,
) -> None:
    """Measure Recall@20 and NDCG@10 of the served lists, beside baselines. Some minutes per data set and seed."""
    for source in data:
        machine, dataset = read_machine(), load_dataset(source)
        name = dataset.description.name
        repository = WORK / name
        pipelines = [PipelineSettings(seed=int(seed), filter_seen=not repeats) for seed in seeds.split(",")]
        exports = [Settings(pipeline=pipeline) for pipeline in pipelines]
        figures = make_figures([evaluate_dataset(dataset, repository, each, Console(stderr=True)) for each in exports])
        exported = read_json(find_stage_folder(repository, ENSEMBLE, read_pinned_generation(repository)), MANIFEST_FILE)
        figures += make_choice_figures(exported["reports"]["sources"])
        changed = f"the seeds {seeds}" + (" and filter_seen = false" if repeats else "")
        conditions = f"{describe_test(dataset)}, default settings but for {changed}, a real server"
        if name in TUNED_ON:
            conditions += "; settings of the towers were compared on this test part, so the gain is somewhat optimistic"
        command = f"python -m experiments.quality --data {source} --seeds {seeds}" + (" --repeats" if repeats else "")
        kind, title = ("repeats", f"Quality on {name}, repeats served") if repeats else ("quality", f"Quality on {name}")
        finish(f"{kind}-{name}", title, command, conditions, figures, results, machine)


if __name__ == "__main__":
    run(main, "python -m experiments.quality")
