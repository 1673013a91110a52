"""From a data set to a published generation: the whole export, in the order it happens.

log ─▶ features (NVTabular, compiled and replayed) ─▶ retriever, ranker, re-ranker ─▶ stage folders
    ─▶ rehearsal: recorded requests answered from the staged files ─▶ publication
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from rich.console import Console

from export.catalogue import write_catalogue
from export.nvidia.hugectr.ranker import imported_ranker
from export.profiles import DEFAULT, Profile, Rehearsed, load_profile
from export.recording import requests_like
from export.rehearsal import rehearse
from export.settings import TAUGHT_WIDTH, PipelineSettings, Settings
from export.tables import plan_tables, shapes_of, write_tables
from repository.publish import Staging
from repository.recorded import Recorded
from repository.rules import compile_rules
from server.environment import RUN_DIR
from server.launcher import held_generations
from serving.contract.artifacts import StageInfo
from serving.contract.tensors import ENSEMBLE, Axes, ModelSpec, ensemble_spec, stage_specs
from serving.stages.rank import TABLES_FOLDER
from serving.stages.rules.config import RulesConfig
from training.dataset import Dataset
from training.dataset.matrix import matrix_of
from training.features.build import Features, build_features
from training.features.schema import FeatureSettings
from training.models.distill import STUDENT
from training.models.ranking import FitRanker, FitRetrieve, Ranking, RankingSettings, fit_ranking, save_ranking
from training.models.ranking_data import Retrieve
from training.models.reranker import RerankerSettings
from training.models.retriever import Retriever, RetrieverSettings, fit_retriever, retriever_data
from training.models.train_ranker import RankerSettings, train_ranker
from training.retrieval.effort import widen_search
from training.retrieval.save import save_retriever

SAMPLE_USERS = 512  # real users on whom parity and the index's recall are measured
LIBRARIES = ("numpy", "onnxruntime", "faiss-cpu", "nvtabular", "torch", "onnx", "nvidia-pytriton")

Say = Callable[[str], None]


def build_repository(
    dataset: Dataset,
    repository: Path,
    settings: Settings,
    console: Console,
    layout: str = "ensemble",
    profile: str = DEFAULT,
) -> int:
    """Train on all of a data set's log and publish -> the generation. Raises ConfigError or ExportError."""
    plugin, say = load_profile(profile), progress(console)
    with tempfile.TemporaryDirectory() as folder:
        workflow = Path(folder, "workflow") if plugin.keeps_workflow(settings) else None
        return _build(dataset, repository, settings, say, layout, plugin, workflow)


def _build(
    dataset: Dataset, repository: Path, settings: Settings, say: Say, layout: str, plugin: Profile, workflow: Path | None
) -> int:
    """workflow: where NVTabular's own is kept meanwhile, if it is to serve."""
    rules = RulesConfig.from_dict(settings.rules)
    say(f"{dataset.description.name}: {dataset.report}")
    pipeline = settings.pipeline
    chosen = FeatureSettings(history_length=pipeline.history)
    features = build_features(dataset, dataset.interactions, chosen, pipeline.seed, workflow)
    say(f"features: {len(features.user_rows)} categorical columns of users, {len(features.item_rows)} of items, replayed")
    axes = axes_of(features, pipeline)
    specs = stage_specs(axes, features.context)
    with Staging(repository, layout, find_held=lambda repo: held_generations(repo, RUN_DIR)) as staging:
        plugin.refuse_early(repository, staging, specs, settings)
        write_rules(staging.folder("rerank"), rules, dataset, features, pipeline)
        serving = settings.serving_of()["rank"]
        samples = serving.max_batch_size * axes.candidates
        shapes = shapes_of(features, settings.table_width, settings.ranker.cold)
        plan_tables(settings.tables, shapes, serving.instances, samples)
        ranking, retriever = fit_models(dataset, features, settings, say)
        reports = write_stages(staging, dataset, features, retriever, ranking, axes, settings)
        tables = staging.folder("rank") / TABLES_FOLDER
        reports["tables"], said = write_tables(tables, settings.tables, serving.instances, samples)
        say(said)
        write_catalogue(staging.folder(ENSEMBLE), dataset)
        recorded = rehearse_and_seal(staging, dataset, specs, settings, reports, say)
        generation = plugin.publish(Rehearsed(repository, staging, specs, settings, recorded, workflow), say)
    say(f"generation {generation} published in {repository}")
    return generation


def rehearse_and_seal(
    staging: Staging, dataset: Dataset, specs: dict[str, ModelSpec], settings: Settings, reports: dict[str, Any], say: Say
) -> Recorded:
    """What is left when all stages are written: search widely enough, answer recorded requests, write the manifests."""
    pipeline = settings.pipeline
    rng = np.random.default_rng(pipeline.seed)
    requests = requests_like(dataset, ensemble_spec(specs), pipeline.recorded_requests, rng)
    fixed = settings.compute.index_effort > 0
    widened = widen_search(staging.folder("preprocess"), staging.folder("retrieve"), requests, fixed)
    reports["index"]["requests"] = [asdict(trial) for trial in widened]
    staging.seal_stages(specs)
    recorded, reports["rehearsal"] = rehearse(staging, dataset, requests)
    say("rehearsal: {requests:,} requests, {full_lists:.1%} of the lists full".format(**reports["rehearsal"]))
    staging.seal(
        {
            "dataset": dataset.description.model_dump(mode="json"),
            "settings": settings.model_dump(mode="json"),
            "versions": {name: metadata.version(name) for name in LIBRARIES},
            "reports": reports,
        }
    )
    return recorded


def progress(console: Console) -> Say:
    """-> a function that prints one line of progress behind the seconds since now."""
    started = time.monotonic()

    def say(text: str) -> None:
        console.print(f"[dim]{time.monotonic() - started:5.0f} s[/]  {text}", highlight=False)

    return say


def axes_of(features: Features, pipeline: PipelineSettings) -> Axes:
    return Axes(
        candidates=pipeline.candidates,
        history=pipeline.history,
        exclusions=pipeline.exclusions,
        items_returned=pipeline.items_returned,
        user_categorical=len(features.user_rows),
        user_continuous=len(features.user_plan.continuous),
    )


def fit_models(dataset: Dataset, features: Features, settings: Settings, say: Say) -> tuple[Ranking, Retriever]:
    """The ranking models learn from a retriever that has not seen what they must predict; the one that is served has."""
    log, pipeline = dataset.interactions, settings.pipeline
    say("retriever, on the whole log")
    retriever = retriever_of(dataset, features, np.flatnonzero(log["positive"].to_numpy()), pipeline, say)
    retrievers = retrieve_fitter(dataset, features, pipeline, say), asked(retriever, dataset, log, pipeline)
    choices = ranking_settings(settings)
    return fit_ranking(
        dataset, log, features, *retrievers, choices, pipeline.seed, say, ranker_fitter(settings, features)
    ), retriever


def ranking_settings(settings: Settings) -> RankingSettings:
    pipeline, choice = settings.pipeline, settings.ranker
    width = settings.table_width
    return RankingSettings(
        ranker=RankerSettings(width=max(width, TAUGHT_WIDTH) if settings.distilled else width, cold=choice.cold),
        student=replace(STUDENT, width=width) if settings.distilled else None,
        reranker=RerankerSettings(list_length=max(pipeline.items_returned, min(100, pipeline.candidates))),
    )


def ranker_fitter(settings: Settings, features: Features) -> FitRanker:
    """-> what gives `fit_ranking` its ranker: training, or a model of HugeCTR's."""
    if not settings.hugectr.model:
        return train_ranker
    return imported_ranker(Path(settings.hugectr.model), settings.hugectr.name, features)


def retrieve_fitter(dataset: Dataset, features: Features, pipeline: PipelineSettings, say: Say) -> FitRetrieve:
    """-> what `fit_ranking` asks for: part of the log -> a retriever fitted on that part alone."""

    def fit(events: pd.DataFrame) -> Retrieve:
        say("retriever, on the earlier part of the log")
        rows = np.sort(events.loc[events["positive"].to_numpy(), "row"].to_numpy())
        return asked(retriever_of(dataset, features, rows, pipeline, say), dataset, events, pipeline)

    return fit


def retriever_of(dataset: Dataset, features: Features, rows: np.ndarray, pipeline: PipelineSettings, say: Say) -> Retriever:
    """rows: int64 ascending, the positive events of the log to learn from."""
    data = retriever_data(features, dataset.interactions, rows, pipeline.filter_seen)
    return fit_retriever(data, RetrieverSettings(), pipeline.seed, say)


def asked(retriever: Retriever, dataset: Dataset, events: pd.DataFrame, pipeline: PipelineSettings) -> Retrieve:
    """-> candidates for users who have met what is in `events`."""
    user_ids, item_ids = dataset.users["user_id"].to_numpy(), dataset.items["item_id"].to_numpy()
    seen = matrix_of(events if pipeline.filter_seen else events.iloc[:0], user_ids, item_ids)
    return lambda users, ids: retriever.retrieve(users, seen[np.searchsorted(user_ids, ids)], pipeline.candidates)


def write_stages(
    staging: Staging,
    dataset: Dataset,
    features: Features,
    retriever: Retriever,
    ranking: Ranking,
    axes: Axes,
    export_settings: Settings,
) -> dict[str, Any]:
    """Write what the four stages load -> the reports for the manifest."""
    pipeline, compute = export_settings.pipeline, export_settings.compute
    rng = np.random.default_rng(pipeline.seed)
    user_ids = dataset.interactions["user_id"].unique()
    sample = features.encode_users(rng.choice(user_ids, min(SAMPLE_USERS, len(user_ids)), replace=False))
    features.save_preprocess(staging.folder("preprocess"))
    available = dataset.items["available"].to_numpy()
    retrieve, towers, choice = save_retriever(
        staging.folder("retrieve"),
        retriever,
        features,
        available,
        sample,
        axes.candidates,
        pipeline.filter_seen,
        compute.index_effort,
    )
    rank, rerank = save_ranking(staging.folder("rank"), staging.folder("rerank"), ranking, features)
    ranks = rank.settings | {"threads": compute.rank_threads}
    settings = {"preprocess": {}, "retrieve": retrieve, "rank": ranks, "rerank": rerank.settings}
    for name, own in settings.items():
        StageInfo(name, staging.generation, axes, features.context, own).write(staging.folder(name))
    return {
        "preprocess_replay": features.parity,
        "onnx_parity": [parity.as_dict() for parity in (towers, rank.parity, rerank.parity)],
        "index": choice.report(),
        "validation": {"ranker": ranking.ranker.quality, "reranker": ranking.reranker.quality},
    }


def write_rules(folder: Path, rules: RulesConfig, dataset: Dataset, features: Features, pipeline: PipelineSettings) -> None:
    """Compile the shop's rules against its catalogue into the rerank folder. Raises ConfigError."""
    items = dataset.items
    positives = dataset.interactions.loc[dataset.interactions["positive"].to_numpy(), "item_id"].to_numpy()
    names = None if dataset.item_names is None else dict(zip(dataset.item_names["name"], dataset.item_names["id"], strict=True))
    compile_rules(
        folder,
        rules,
        item_ids=features.items.ids,
        category=none_for_missing(items["category"]),
        provider=none_for_missing(items["provider"]),
        price=dataset.prices,
        popularity=np.bincount(features.items.positions(positives), minlength=len(items)),
        items_returned=pipeline.items_returned,
        item_names=names,
    )


def none_for_missing(texts: pd.Series) -> list[str | None]:
    return [text if isinstance(text, str) else None for text in texts]
