"""Run an export, from a data set to a published generation, in order.

log ─▶ features (NVTabular, compiled and replayed) ─▶ retriever, ranker, re-ranker ─▶ stage folders
    ─▶ rehearsal: recorded requests answered from the staged files ─▶ publication by the profile (export/profiles.py)
"""

from __future__ import annotations

from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console

from export.profiles import DEFAULT, Profile, Rehearsed, load_profile
from export.progress import Progress
from export.settings import PipelineSettings, Settings
from export.steps.catalogue import write_catalogue
from export.steps.describe import describe_export, describe_ranker, describe_sources
from export.steps.learning import Learning, keep_weights
from export.steps.lost_log import describe_other_shop, refuse_lost_log, refuse_other_ids
from export.steps.recording import draw_requests
from export.steps.references import REFERENCE_TIMES, write_drift_references
from export.steps.rehearsal import rehearse
from export.steps.stages import write_rules, write_stages
from export.steps.training_settings import (
    choose_ranking_settings,
    choose_retrieval_settings,
    choose_sequence_settings,
    choose_trainer,
    explain_no_graph,
    explain_no_sequence,
    find_cluster,
)
from export.tables import find_shapes, plan_tables, write_tables
from repository.applied_rules import read_current_values
from repository.checks.recorded import Recorded
from repository.publish import Staging, refuse_other_contract
from server.control import find_held_generations
from server.start.environment import RUN_DIR
from serving.contract.scratch import hold_scratch
from serving.contract.tensors import ENSEMBLE, STAGES, Axes, ModelSpec, make_ensemble_spec, make_stage_specs
from serving.live.store import find_live_folder
from serving.stages.rank import TABLES_FOLDER
from serving.stages.rules.applied import FOLDER
from serving.stages.rules.config import RulesConfig
from training.dataset import Dataset
from training.features.build import Features, build_features
from training.features.schema import FeatureSettings
from training.models.candidates.graph import GraphSettings
from training.models.rankers.ranking_data import Retrieve, fit_item_statistics
from training.models.rankers.train_ranker import Start
from training.models.rankers.warm_ranker import start_ranker
from training.models.ranking import (
    FitTrainingRetriever,
    Lessons,
    Ranking,
    TrainRanker,
    add_unlabelled,
    collect_lessons,
    fit_ranker,
    fit_reranker,
    take_sample,
)
from training.retrieval.choose import Choices, NotTried, PastRetrievers, choose_sources
from training.retrieval.effort import widen_search
from training.retrieval.fit import FittedRetriever, RetrievalSettings, fit_served_retriever

FEW_FULL_LISTS = 0.9  # of the recorded requests; with fewer, a person should look


def build_repository(
    dataset: Dataset,
    repository: Path,
    settings: Settings,
    console: Console,
    layout: str = "ensemble",
    profile: str = DEFAULT,
    verbose: bool = False,
    learning: Learning | None = None,
    keep: int = 1,
    meant_for: Path | None = None,
) -> int:
    """Train on the whole log and publish. Return the generation. Raises ConfigError, ExportError or ArtifactError.

    learning: what to start from and where to keep what is learned; None: train from scratch, and keep nothing
    keep: as in `Staging`
    meant_for: repository into which the generation is published later: it gets the rules of that one, and is refused before
        training if that one would not take it; None: `repository`
    """
    target = meant_for or repository
    refuse_lost_log(dataset, target)
    refuse_other_ids(dataset, target)
    plugin, progress = load_profile(profile), Progress(console, verbose)
    progress.note(f"{dataset.description.name}: {dataset.report}")
    if other_shop := describe_other_shop(dataset, target):
        progress.warn(other_shop)
    staged = Staging(repository, layout, lambda repo: find_held_generations(repo, RUN_DIR), keep)
    with hold_scratch() as scratch, staged as staging:  # staged first, so that a bad place costs no training
        rules = read_rules(dataset, target, settings, progress)
        workflow = scratch / "workflow" if plugin.keeps_workflow(settings) else None
        features = compute_features(dataset, settings, workflow, progress)
        axes = make_axes(features, settings.pipeline)
        specs = make_stage_specs(axes, features.context)
        plugin.refuse_early(repository, staging, specs, settings)
        if meant_for:
            refuse_other_contract(meant_for, layout, specs)
        write_rules(staging, rules, dataset, features, settings.pipeline)
        refuse_tables_that_do_not_fit(features, axes, settings)

        start_from = learning.start_from if learning else None
        start = partial(start_ranker, start_from, features) if start_from else None
        trainer = choose_trainer(settings, features, start)  # reads a model of HugeCTR, before anything is trained for it
        sources = try_sources(dataset, features, settings, plugin.serves_sequences, start_from, progress)
        choices, retrieval = sources.choices, sources.retrieval
        earlier_sequence = sources.past.retriever.retriever.sequence
        rng = np.random.default_rng(settings.pipeline.seed)
        lessons = make_lessons(dataset, features, sources.past, settings, rng, progress)
        del sources  # on a large log, the retriever of the past takes gigabytes
        retriever = fit_retriever(dataset, features, retrieval, progress)
        ranking = fit_ranking(dataset, features, retriever, lessons, settings, rng, progress, trainer, start)
        del lessons
        if learning:  # before the stages are written, which changes the network
            keep_weights(learning, features, earlier_sequence, retriever, ranking)

        trained = Trained(features, choices, retriever, ranking)
        reports = write_generation(staging, dataset, trained, axes, settings, progress)
        recorded = rehearse_and_seal(staging, dataset, specs, settings, reports, progress)
        generation = publish(plugin, Rehearsed(repository, staging, specs, settings, recorded, workflow), progress)
        progress.note_memory()
    return generation


class ChosenSources(NamedTuple):
    """The candidate sources that a trial chose.

    retrieval: settings of the retriever to serve; past: fits retrievers for training the ranker
    """

    choices: Choices
    retrieval: RetrievalSettings
    past: PastRetrievers


class Trained(NamedTuple):
    """Everything that is learned from a log. retriever: the one to serve, fitted on the whole log"""

    features: Features
    choices: Choices
    retriever: FittedRetriever
    ranking: Ranking


def read_rules(dataset: Dataset, repository: Path, settings: Settings, progress: Progress) -> RulesConfig:
    """Return the rules that operators changed since the last export, or else those of the settings."""
    applied = read_current_values(find_live_folder(repository, settings.live.folder) / FOLDER, dataset.description.name)
    if applied is not None:
        progress.note("rules are those of `python -m server rules list`, not those of the settings")
    return RulesConfig.from_dict(settings.rules if applied is None else applied)


def compute_features(dataset: Dataset, settings: Settings, workflow: Path | None, progress: Progress) -> Features:
    """Fit the feature plans on the whole log. workflow: where to keep NVTabular's own workflow; None: nowhere"""
    with progress.phase("features") as phase:
        chosen = FeatureSettings(history_length=settings.pipeline.history, session_hours=settings.live.session_hours)
        cluster = find_cluster(settings.dask)
        seed, log = settings.pipeline.seed, dataset.interactions
        features = build_features(dataset, log, chosen, seed, workflow, cluster, progress.note_detail)
        phase.result = f"{len(features.user_rows)} categorical columns of users, {len(features.item_rows)} of items"
    return features


def try_sources(
    dataset: Dataset,
    features: Features,
    settings: Settings,
    may_serve_sequences: bool,
    start_from: Path | None,
    progress: Progress,
) -> ChosenSources:
    """Choose the candidate sources on a validation split. start_from: folder of weights; None: learn from scratch"""
    with progress.phase("sources") as phase:
        n_positives = int(dataset.interactions["positive"].sum())
        sequence = choose_sequence_settings(settings, n_positives) if may_serve_sequences else None
        why_no_sequence = "this profile serves none" if not may_serve_sequences else explain_no_sequence(settings, n_positives)
        not_tried = NotTried(why_no_sequence, explain_no_graph(settings, n_positives))
        tried_settings = choose_retrieval_settings(settings.pipeline, sequence, None if not_tried.graph else GraphSettings())
        tried_settings = replace(tried_settings, start_from=start_from)
        sources = ChosenSources(*choose_sources(dataset, features, tried_settings, progress.note_detail, not_tried))
        phase.result = describe_sources(sources.choices)
    return sources


def fit_retriever(dataset: Dataset, features: Features, retrieval: RetrievalSettings, progress: Progress) -> FittedRetriever:
    """Fit the retriever to serve on the whole log."""
    with progress.phase("retriever") as phase:
        retriever = fit_served_retriever(dataset, features, retrieval, progress.note_detail)
        phase.result = f"of {len(dataset.items):,} items, fitted on the whole log"
    return retriever


def make_lessons(
    dataset: Dataset,
    features: Features,
    fit_past_retriever: FitTrainingRetriever,
    settings: Settings,
    rng: np.random.Generator,
    progress: Progress,
) -> Lessons:
    """Make the ranker's training requests, with candidates of retrievers that were fitted before the labels."""
    with progress.phase("requests") as phase:
        lessons = collect_lessons(
            dataset, dataset.interactions, features, fit_past_retriever, choose_ranking_settings(settings), rng
        )
        phase.result = f"{sum(map(len, lessons.teaching)):,} to learn from, {len(lessons.validation):,} to validate"
    return lessons


def fit_ranking(
    dataset: Dataset,
    features: Features,
    served_retriever: Retrieve,
    lessons: Lessons,
    settings: Settings,
    rng: np.random.Generator,
    progress: Progress,
    trainer: TrainRanker,
    start: Start | None,
) -> Ranking:
    """Train the ranker and the re-ranker.

    served_retriever: the retriever fitted on the whole log; a student imitates the ranker on its candidates, without labels
    trainer: of `choose_trainer`; start: sets the weights that ranker and student start from; None: they start from scratch
    """
    log, pipeline, choices = dataset.interactions, settings.pipeline, choose_ranking_settings(settings)
    with progress.phase("ranker") as phase:
        statistics = fit_item_statistics(features, log, choices.statistics)
        lessons = add_unlabelled(lessons, log, features, statistics, served_retriever, choices, rng)
        ranker = fit_ranker(lessons, features, choices, pipeline.seed, progress.note_detail, trainer, start)
        phase.result = describe_ranker(ranker, choices)
    if not ranker.learned:
        progress.warn("the ranker learned nothing: does user_id in dataset.toml name customers, and do some take several?")
    with progress.phase("re-ranker") as phase:
        reranker = fit_reranker(lessons, ranker, choices.reranker, pipeline.seed, progress.note_detail)
        phase.result = f"{reranker.trust:.0%} of its correction is used"
    return Ranking(ranker, reranker, statistics, take_sample(lessons, features))


def write_generation(
    staging: Staging, dataset: Dataset, trained: Trained, axes: Axes, settings: Settings, progress: Progress
) -> dict[str, Any]:
    """Write the stages with index, tables and catalogue. Return the reports for the manifest."""
    with progress.phase("index") as phase:
        retriever = trained.retriever.retriever
        reports = write_stages(staging, dataset, trained.features, retriever, trained.ranking, axes, settings)
        reports["sources"] = trained.choices.report()
        sequence = retriever.sequence is not None and retriever.started
        reports["started_from_weights"] = {"ranker": trained.ranking.ranker.started, "sequence model": sequence}
        reports["tables"], tables = write_ranker_tables(staging, axes, settings)
        write_catalogue(staging.folder(ENSEMBLE), dataset)
        phase.result = f"{reports['index']['kind']}; {tables}"
    return reports


def publish(plugin: Profile, rehearsed: Rehearsed, progress: Progress) -> int:
    """Publish as the profile does. Return the generation."""
    with progress.phase("publication") as phase:
        generation = plugin.publish(rehearsed, progress.note)
        phase.result = f"generation {generation} published in {rehearsed.repository}"
    return generation


def rehearse_and_seal(
    staging: Staging,
    dataset: Dataset,
    specs: dict[str, ModelSpec],
    settings: Settings,
    reports: dict[str, Any],
    progress: Progress,
) -> Recorded:
    """Tune the search effort, answer recorded requests from the staged files, and write the manifests."""
    with progress.phase("rehearsal") as phase:
        rng, n_requests = np.random.default_rng(settings.pipeline.seed), settings.pipeline.recorded_requests
        requests, watched = (
            draw_requests(dataset, make_ensemble_spec(specs), times * n_requests, rng) for times in (1, REFERENCE_TIMES)
        )
        fixed = settings.compute.index_effort > 0
        widened = widen_search(staging.folder("preprocess"), staging.folder("retrieve"), requests, fixed)
        reports["index"]["requests"] = [asdict(trial) for trial in widened]
        write_drift_references({name: staging.folder(name) for name in STAGES}, watched)
        staging.seal_stages(specs)
        recorded, reports["rehearsal"] = rehearse(staging, dataset, requests)
        staging.seal(describe_export(dataset, settings, reports))
        phase.result = "{requests:,} requests, {full_lists:.1%} of the lists full".format(**reports["rehearsal"])
    if (full := reports["rehearsal"]["full_lists"]) < FEW_FULL_LISTS:
        returned = settings.pipeline.items_returned
        progress.warn(f"only {full:.1%} of the lists have {returned} items: do log, catalogue and rules leave enough to show?")
    return recorded


def make_axes(features: Features, pipeline: PipelineSettings) -> Axes:
    return Axes(
        candidates=pipeline.candidates,
        history=pipeline.history,
        exclusions=pipeline.exclusions,
        items_returned=pipeline.items_returned,
        user_categorical=len(features.user_rows),
        user_continuous=len(features.user_plan.continuous),
    )


def refuse_tables_that_do_not_fit(features: Features, axes: Axes, settings: Settings) -> None:
    """Raise ConfigError before training when the ranker's tables will not fit their budgets."""
    serving = settings.merge_serving()["rank"]
    shapes = find_shapes(features, settings.table_width)
    plan_tables(settings.tables, shapes, serving.instances, serving.max_batch_size * axes.candidates)


def write_ranker_tables(staging: Staging, axes: Axes, settings: Settings) -> tuple[dict[str, int], str]:
    """Write the settings of the ranker's tables. Return their bytes by level, and a line for people."""
    serving = settings.merge_serving()["rank"]
    folder, samples = staging.folder("rank") / TABLES_FOLDER, serving.max_batch_size * axes.candidates
    return write_tables(folder, settings.tables, serving.instances, samples)
