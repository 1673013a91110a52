"""Run an export, from a data set to a published generation, in order.

log ─▶ features (NVTabular, compiled and replayed) ─▶ retriever, ranker, re-ranker ─▶ stage folders
    ─▶ rehearsal: recorded requests answered from the staged files ─▶ publication by the profile (export/profiles.py)
"""

from __future__ import annotations

import tempfile
from dataclasses import asdict, replace
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from export.catalogue import write_catalogue
from export.learning import Learning
from export.nvidia.hugectr.ranker import import_ranker
from export.profiles import DEFAULT, Rehearsed, load_profile
from export.progress import Progress
from export.recording import requests_like
from export.references import REFERENCE_TIMES, write_drift_references
from export.rehearsal import rehearse
from export.settings import TAUGHT_WIDTH, DaskSettings, PipelineSettings, Settings
from export.stages import write_rules, write_stages
from export.tables import find_shapes, plan_tables, write_tables
from repository.applied_rules import read_current_values
from repository.publish import Staging
from repository.recorded import Recorded
from server.environment import RUN_DIR
from server.launcher import held_generations
from serving.contract.tensors import ENSEMBLE, STAGES, Axes, ModelSpec, ensemble_spec, stage_specs
from serving.live.store import live_folder
from serving.stages.rank import TABLES_FOLDER
from serving.stages.rules.applied import FOLDER
from serving.stages.rules.config import RulesConfig
from training.dataset import Dataset
from training.features.build import Features, build_features
from training.features.cluster import Cluster
from training.features.schema import FeatureSettings
from training.models.distill import STUDENT
from training.models.graph import GraphSettings
from training.models.ranking import (
    FitTrainingRetriever,
    Ranking,
    RankingSettings,
    TrainRanker,
    collect_lessons,
    fit_ranker,
    fit_reranker,
    take_sample,
)
from training.models.ranking_data import Retrieve, statistics_of
from training.models.reranker import RerankerSettings
from training.models.sequence import SequenceShape
from training.models.teachers import NETWORKS
from training.models.train_ranker import Ranker, RankerSettings, train_ranker
from training.models.train_sequence import SequenceSettings
from training.models.warm_start import EARLIER, SERVED, write_learned
from training.retrieval.choose import Choices, choose_sources
from training.retrieval.effort import widen_search
from training.retrieval.fit import RetrievalSettings, fit_served_retriever

LIBRARIES = ("numpy", "onnxruntime", "faiss-cpu", "nvtabular", "torch", "onnx", "nvidia-pytriton")

EVENTS_PER_MINUTE = 500_000  # from which the sequence model learns in a minute on two cores
SEQUENCE_SHARE = 0.2  # of the minutes, for the sequence model
TAUGHT_PER_MINUTE = 300  # training requests from which two more teachers learn in a quarter of the minutes
FEWEST_EVENTS, FEWEST_EPOCHS = 20_000, 3  # with fewer, the sequence model learns nothing useful
MOST_READ = 50  # latest events of a history that the sequence model reads


def build_repository(
    dataset: Dataset,
    repository: Path,
    settings: Settings,
    console: Console,
    layout: str = "ensemble",
    profile: str = DEFAULT,
    verbose: bool = False,
    learning: Learning | None = None,
) -> int:
    """Train on the whole log and publish. Return the generation. Raises ConfigError, ExportError or ArtifactError.

    learning: what to start from and where to keep what is learned; None: train from scratch, and keep nothing
    """
    plugin, pipeline, progress = load_profile(profile), settings.pipeline, Progress(console, verbose)
    applied = read_current_values(live_folder(repository, settings.live.folder) / FOLDER, dataset.description.name)
    rules = RulesConfig.from_dict(settings.rules if applied is None else applied)
    progress.note(f"{dataset.description.name}: {dataset.report}")
    if applied is not None:
        progress.note("rules are those of `python -m server rules list`, not those of the settings")
    staged = Staging(repository, layout, find_held=lambda repo: held_generations(repo, RUN_DIR))
    with tempfile.TemporaryDirectory() as folder:
        workflow = Path(folder, "workflow") if plugin.keeps_workflow(settings) else None
        with progress.phase("features") as phase:
            chosen = FeatureSettings(history_length=pipeline.history)
            features = build_features(
                dataset, dataset.interactions, chosen, pipeline.seed, workflow, find_cluster(settings.dask)
            )
            phase.result = f"{len(features.user_rows)} categorical columns of users, {len(features.item_rows)} of items"
        axes = make_axes(features, pipeline)
        specs = stage_specs(axes, features.context)
        with staged as staging:
            plugin.refuse_early(repository, staging, specs, settings)
            write_rules(staging.folder("rerank"), rules, dataset, features, pipeline)
            refuse_tables_that_do_not_fit(features, axes, settings)

            with progress.phase("sources") as phase:
                n_positives = int(dataset.interactions["positive"].sum())
                sequence = sequence_settings(settings, n_positives) if plugin.serves_sequences else None
                tried = retrieval_settings(pipeline, sequence, graph_settings(settings, n_positives))
                tried = replace(tried, start_from=learning.start_from if learning else None)
                choices, retrieval, past = choose_sources(dataset, features, tried, progress.detail)
                phase.result = describe_sources(choices)
            with progress.phase("retriever") as phase:
                served = fit_served_retriever(dataset, features, retrieval, progress.detail)
                phase.result = f"of {len(dataset.items):,} items, fitted on the whole log"
            ranking = fit_ranking(dataset, features, served, past, settings, progress)

            with progress.phase("index") as phase:
                reports = write_stages(staging, dataset, features, served.retriever, ranking, axes, settings)
                reports["sources"] = choices.report()
                reports["tables"], tables = write_ranker_tables(staging, axes, settings)
                write_catalogue(staging.folder(ENSEMBLE), dataset)
                phase.result = f"{reports['index']['kind']}; {tables}"
            with progress.phase("rehearsal") as phase:
                recorded = rehearse_and_seal(staging, dataset, specs, settings, reports)
                phase.result = "{requests:,} requests, {full_lists:.1%} of the lists full".format(**reports["rehearsal"])
            with progress.phase("publication") as phase:
                rehearsed = Rehearsed(repository, staging, specs, settings, recorded, workflow)
                generation = plugin.publish(rehearsed, progress.note)
                phase.result = f"generation {generation} published in {repository}"
    if learning:
        models = {EARLIER: past.retriever.retriever.sequence, SERVED: served.retriever.sequence}
        write_learned(learning.keep_in, features.items.ids, models, learning.generations)
    return generation


def find_cluster(settings: DaskSettings) -> Cluster | None:
    """Return the Dask cluster that fits NVTabular; None where this process fits it."""
    return Cluster(settings.scheduler, Path(settings.folder)) if settings.scheduler else None


def fit_ranking(
    dataset: Dataset,
    features: Features,
    served: Retrieve,
    of_the_past: FitTrainingRetriever,
    settings: Settings,
    progress: Progress,
) -> Ranking:
    """Train the ranker and the re-ranker on candidates of retrievers that were fitted before the labels.

    served: the retriever fitted on the whole log; a student imitates the ranker on its candidates, without labels
    """
    log, pipeline, choices = dataset.interactions, settings.pipeline, ranking_settings(settings)
    rng = np.random.default_rng(pipeline.seed)
    with progress.phase("ranker") as phase:
        statistics = statistics_of(features, log, choices.statistics)
        lessons = collect_lessons(dataset, log, features, statistics, of_the_past, served, choices, rng)
        ranker = fit_ranker(lessons, features, choices, pipeline.seed, progress.detail, choose_trainer(settings, features))
        phase.result = describe_ranker(ranker, choices)
    with progress.phase("re-ranker") as phase:
        reranker = fit_reranker(lessons, ranker, choices.reranker, pipeline.seed, progress.detail)
        phase.result = f"trust {reranker.trust:g}"
    return Ranking(ranker, reranker, statistics, take_sample(lessons, features))


def describe_sources(choices: Choices) -> str:
    """Return the candidate sources for one line of output."""
    optional = {"sequence model": choices.sequence.chosen, "graph": choices.graph.chosen}
    return ", ".join(
        ["item-item", "two towers", *(f"{name} with weight {weight:g}" for name, weight in optional.items() if weight)]
    )


def describe_ranker(ranker: Ranker, choices: RankingSettings) -> str:
    """Return a description of a ranker for one line of output."""
    if not ranker.learned:
        return "learned nothing, because no user in this log returns: items keep retrieval's order"
    quality = ranker.quality
    found = "NDCG@10 {ndcg_at_10:.4f}, Recall@20 {recall_at_20:.4f} on validation requests".format(**quality)
    if ranker.compression == choices.compression:
        return f"{found}, {ranker.compression}"
    served = "the distilled network" if ranker.compression == "distilled" else "the DLRM itself"
    return f"{found}; made smaller ({choices.compression}), it keeps too little, so {served} is served"


def rehearse_and_seal(
    staging: Staging, dataset: Dataset, specs: dict[str, ModelSpec], settings: Settings, reports: dict[str, Any]
) -> Recorded:
    """Tune the search effort, answer recorded requests from the staged files, and write the manifests."""
    pipeline = settings.pipeline
    rng = np.random.default_rng(pipeline.seed)
    requests, watched = (
        requests_like(dataset, ensemble_spec(specs), times * pipeline.recorded_requests, rng) for times in (1, REFERENCE_TIMES)
    )
    fixed = settings.compute.index_effort > 0
    widened = widen_search(staging.folder("preprocess"), staging.folder("retrieve"), requests, fixed)
    reports["index"]["requests"] = [asdict(trial) for trial in widened]
    write_drift_references({name: staging.folder(name) for name in STAGES}, watched)
    staging.seal_stages(specs)
    recorded, reports["rehearsal"] = rehearse(staging, dataset, requests)
    staging.seal(
        {
            "dataset": dataset.description.model_dump(mode="json"),
            "log": describe_log(dataset),
            "settings": settings.model_dump(mode="json"),
            "versions": {name: metadata.version(name) for name in LIBRARIES},
            "reports": reports,
        }
    )
    return recorded


def describe_log(dataset: Dataset) -> dict[str, Any]:
    """Return how many events a log has, and the days of its first and last one, UTC."""
    times_s = dataset.interactions["timestamp"].to_numpy()
    days = (datetime.fromtimestamp(int(time_s), UTC).date().isoformat() for time_s in (times_s.min(), times_s.max()))
    return {"events": len(times_s), **dict(zip(("first", "last"), days, strict=True))}


def make_axes(features: Features, pipeline: PipelineSettings) -> Axes:
    return Axes(
        candidates=pipeline.candidates,
        history=pipeline.history,
        exclusions=pipeline.exclusions,
        items_returned=pipeline.items_returned,
        user_categorical=len(features.user_rows),
        user_continuous=len(features.user_plan.continuous),
    )


def retrieval_settings(
    pipeline: PipelineSettings, sequence: SequenceSettings | None = None, graph: GraphSettings | None = None
) -> RetrievalSettings:
    return RetrievalSettings(pipeline.candidates, pipeline.filter_seen, pipeline.seed, sequence, graph=graph)


def graph_settings(settings: Settings, n_positives: int) -> GraphSettings | None:
    """Return how to fit the graph model on trial; None where it is switched off, or the log is too large for the minutes."""
    training = settings.training
    if training.graph == "never" or n_positives > training.minutes * EVENTS_PER_MINUTE:
        return None
    return GraphSettings()


def sequence_settings(settings: Settings, n_positives: int) -> SequenceSettings | None:
    """Return how to train the sequence model on trial; None where it is off, the log too small, or the minutes too few."""
    pipeline, training = settings.pipeline, settings.training
    most_events = int(training.minutes * SEQUENCE_SHARE * EVENTS_PER_MINUTE)
    if training.sequence == "never" or pipeline.history < 2 or not FEWEST_EVENTS <= n_positives <= most_events / FEWEST_EPOCHS:
        return None
    return SequenceSettings(SequenceShape(length=min(pipeline.history, MOST_READ)), most_events=most_events)


def ranking_settings(settings: Settings) -> RankingSettings:
    pipeline, choice = settings.pipeline, settings.ranker
    width, compressed = settings.table_width, settings.compression != "none"
    return RankingSettings(
        ranker=RankerSettings(width=max(width, TAUGHT_WIDTH) if compressed else width, cold=choice.cold),
        compression=settings.compression,
        student=replace(STUDENT, width=width),
        teachers=tuple(NETWORKS) if settings.training.teachers == "auto" else (),
        most_taught=int(settings.training.minutes * TAUGHT_PER_MINUTE),
        reranker=RerankerSettings(list_length=max(pipeline.items_returned, min(100, pipeline.candidates))),
    )


def choose_trainer(settings: Settings, features: Features) -> TrainRanker:
    """Return the function that trains the ranker, or imports a model that HugeCTR trained."""
    if not settings.hugectr.model:
        return train_ranker
    return import_ranker(Path(settings.hugectr.model), settings.hugectr.name, features)


def refuse_tables_that_do_not_fit(features: Features, axes: Axes, settings: Settings) -> None:
    """Raise ConfigError before training when the ranker's tables will not fit their budgets."""
    serving = settings.serving_of()["rank"]
    shapes = find_shapes(features, settings.table_width, settings.ranker.cold)
    plan_tables(settings.tables, shapes, serving.instances, serving.max_batch_size * axes.candidates)


def write_ranker_tables(staging: Staging, axes: Axes, settings: Settings) -> tuple[dict[str, int], str]:
    """Write the settings of the ranker's tables. Return their bytes by level, and a line for people."""
    serving = settings.serving_of()["rank"]
    folder, samples = staging.folder("rank") / TABLES_FOLDER, serving.max_batch_size * axes.candidates
    return write_tables(folder, settings.tables, serving.instances, samples)
