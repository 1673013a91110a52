"""Continuous training: train a generation on what happened since the last one, and publish it if the newest events favour it.

    log + live events ──split by time──▶ earlier ─▶ export into a repository of its own: the candidate
                                         newest  ─▶ questions to candidate and serving generation, each with live state
                                                 ─▶ verdict ─▶ published and served, to all or to some, or a report of why not

What was judged is what is published. The candidate was not trained on the newest events; once published, it reads them from the
live store.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from rich.console import Console

from export.build import build_repository
from export.continuous.continued import continue_log, find_prompted, read_changes
from export.continuous.prequential import Upserted, answer_live, choose_questions
from export.continuous.verdict import LEAST_QUESTIONS, Verdict, judge
from export.continuous.waits import count_awaited, find_rest, format_time, name_experiment
from export.relayout import relayout
from export.settings import Settings, read_served_settings
from export.steps.learning import Learning, keep_learned, measure_erasures, plan_learning
from repository.experiments import find_experiment_folder, find_running
from repository.generations import pin
from repository.publish import make_read_only
from repository.registry import REASON, read_manifest, record_act, record_publication
from repository.rounds import Outcome, hold_round_lock, mark_round
from repository.triton.config import CONFIG_FILE, read_layout
from repository.triton.models import read_config
from server.control import find_running_servers, move_servers
from server.experiment import begin_experiment
from server.generations.challenger import unload_challenger
from server.promotion import awaits_move
from server.start.environment import RUN_DIR
from server.state import ServerState
from serving.contract.artifacts import find_stage_folder, read_stage
from serving.contract.errors import ConfigError, ServerError
from serving.contract.generations import read_pinned_generation
from serving.contract.rounds import make_scratch_prefix, remove_scratch
from serving.contract.tensors import ENSEMBLE, OBSERVE, STAGES
from serving.live.catalogue_times import CatalogueTimes
from serving.live.events import ITEM_CHANGED
from serving.live.experiment import Experiment, read_experiment
from serving.live.reader import Change
from serving.live.store import find_live_folder
from serving.stages.features.user_store import UserStore
from serving.stages.rules.applied import FOLDER as RULES_FOLDER
from training.dataset import Dataset

JUDGED_SHARE = 0.2  # of the events since the serving generation: the newest, on which both are judged
MOST_QUESTIONS = 2_000
STARTED = "Started from the weights"  # in the report of a round whose models started from those of the serving generation


@dataclass(frozen=True)
class Round:
    """The outcome of one round. generation: the published one, 0 for none; report: one line for people"""

    generation: int
    report: str
    verdict: Verdict | None = None

    @property
    def outcome(self) -> Outcome:
        if self.generation:
            return "published"
        return "not published" if self.verdict else "waits"


@dataclass(frozen=True)
class Terms:
    """The terms on which a round publishes a generation.

    share: of the users who meet it; below 1 it is the challenger of an A/B experiment, and takes over once it is better
    days: after so long, an undecided experiment ends: the challenger takes over if it is not worse
    keep: how many of the newest generations stay in the repository, besides those in use
    """

    share: float = 1.0
    days: float = 7.0
    keep: int = 1


def follow_once(
    dataset: Dataset,
    repo: Path,
    settings: Settings | None,
    least_events: int,
    console: Console,
    terms: Terms = Terms(),
) -> Round:
    """Train and judge a generation if `least_events` are new, and publish it if it passes. Servers of `repo` move to it.

    dataset: without live events
    settings: of the export; None: those of the export of the serving generation

    Raises ConfigError, ArtifactError, ExportError or ServerError.
    """
    serving = read_pinned_generation(repo)
    with hold_round_lock(repo) as is_alone:
        if not is_alone:
            return Round(0, "waits: another round trains for this repository")
        remove_scratch(repo)
        with mark_round(repo):
            return follow_alone(dataset, repo, serving, settings, least_events, console, terms)


def follow_alone(
    dataset: Dataset,
    repo: Path,
    serving: int,
    settings: Settings | None,
    least_events: int,
    console: Console,
    terms: Terms,
) -> Round:
    """Do what `follow_once` says, while no other round of the repository runs. serving: the pinned generation"""
    if reason := find_unfinished(repo):
        return Round(0, f"waits: {reason}")
    refuse_follow(repo, terms.share, serving, dataset.description.name)
    if reason := find_rest(repo, serving, time.time()):
        return Round(0, f"waits: {reason}")
    settings = take_settings(repo, settings, serving)
    least_events = count_awaited(repo, serving, least_events)
    split = split_for_round(dataset, repo, serving, settings, least_events)
    if isinstance(split, str):
        return Round(0, f"waits: {split}")
    with tempfile.TemporaryDirectory(dir=repo.resolve().parent, prefix=make_scratch_prefix(repo)) as scratch:
        candidate, layout = Path(scratch, "candidate"), read_layout(read_config(repo / ENSEMBLE / CONFIG_FILE))
        # An export by hand keeps no weights: those of its number are of a repository that was removed, and know later events.
        learned = serving if REASON in read_manifest(repo, serving) else 0
        learning = plan_learning(split.live, learned, Path(scratch, "learned"), settings.training.scratch_every)
        trained = build_repository(split.earlier, candidate, settings, console, layout, learning=learning, meant_for=repo)
        began = describe_start(read_manifest(candidate, trained)["reports"]["started_from_weights"], learning, serving)
        verdict = judge_candidate(candidate, repo, split, Path(scratch, "store"), settings.pipeline.seed)
        if verdict.fault:
            record_act(repo, "not published", serving, reason=str(verdict))
            return Round(0, f"generation {serving} stays. {verdict}. {began}", verdict)
        generation = publish_candidate(candidate, repo, layout, serving, terms, verdict)
        if isinstance(generation, str):
            return Round(0, f"not published: {generation}", verdict)
        not_kept = keep_learned(learning, split.live, serving, generation, split.erasures)
    share_text = f" meets {terms.share:.1%} of the users" if terms.share < 1 else ""
    loss_text = f". The next one learns from scratch: {not_kept}" if not_kept else ""
    return Round(generation, f"generation {generation}{share_text}. {verdict}. {began}{loss_text}", verdict)


def describe_start(started: Mapping[str, bool], learning: Learning, serving: int) -> str:
    """Return in words which models of a round started from the weights of the serving generation. started: by model"""
    names = [f"the {name}" for name, is_started in started.items() if is_started]
    if names:
        return f"{STARTED} of generation {serving}: {', '.join(names)}"
    return "All models from scratch" if learning.start_from is None else f"All from scratch: generation {serving}'s do not fit"


@dataclass(frozen=True)
class Split:
    """A log with live events, split by time: a candidate is trained on the earlier part, and judged by the newest events.

    live: folder of the live store; erasures: size of the log of erasures before the log was read, in bytes
    questions: int64 [Q] rows of `whole`
    first, serving_first: the first rows that the candidate, and the serving generation, have not learned
    """

    live: Path
    erasures: int
    whole: Dataset
    earlier: Dataset
    questions: np.ndarray
    first: int
    serving_first: int


def refuse_follow(repo: Path, share: float, serving: int, shop: str) -> None:
    """Raise ConfigError for faults that time does not correct, so that every later round would fail too.

    That is another shop's data set, no live events, no user to meet a new generation, or a folder that cannot be written.
    """
    if (data_set := read_manifest(repo, serving)["dataset"]["name"]) != shop:
        raise ConfigError(
            f"Generation {serving} of {repo} learned from the data set {data_set!r}, and --data names {shop!r}. Expected the "
            "same one, as the live events are of its users: correct --data, or --repo."
        )
    if share < 1 and not find_running_servers(RUN_DIR, repo):
        raise ConfigError(f"No server started here serves {repo}, so no user can meet a new generation. Start one: make serve")
    if not (repo / OBSERVE).is_dir():
        raise ConfigError(
            f"{repo} has no model `{OBSERVE}`, so there are no live events to learn from. Export with PROFILE=cpu."
        )
    if not os.access(parent := repo.resolve().parent, os.W_OK | os.X_OK):
        raise ConfigError(
            f"This user cannot write {parent}, and a round trains and publishes in folders of its own beside {repo.name}. Give "
            f"{parent} to the user, or move the repository, with its live store, into a folder that the user can write."
        )


def take_settings(repo: Path, settings: Settings | None, serving: int) -> Settings:
    """Return the settings of a round: those that are given, or those of the export of the serving generation.

    Raises ConfigError for a live store that the serving generation does not write: no event would ever be new.
    """
    if settings is None:
        return read_served_settings(repo)
    served = read_stage(find_stage_folder(repo, STAGES[0], serving)).live_folder
    folder, served_folder = (find_live_folder(repo, live_folder) for live_folder in (settings.live.folder, served))
    if folder.resolve() != served_folder.resolve():
        raise ConfigError(
            f"--config names {folder} as the live store, and generation {serving} of {repo} writes to {served_folder}. "
            f'Expected the store that events arrive in: set [live] folder = "{served}".'
        )
    return settings


def split_for_round(dataset: Dataset, repo: Path, serving: int, settings: Settings, least_events: int) -> Split | str:
    """Split the log; return why to wait where it does not hold enough that generation `serving` has not learned."""
    live = find_live_folder(repo, settings.live.folder)
    erasures, whole = measure_erasures(live), continue_log(dataset, live)
    times_s = whole.interactions["timestamp"].to_numpy()
    known_until_s = UserStore(find_stage_folder(repo, STAGES[0], serving) / "store").as_of_s
    new_s = times_s[times_s > known_until_s]
    if len(new_s) < least_events:
        known_text = f", which learned events until {format_time(known_until_s)}" if known_until_s > time.time() else ""
        return f"{len(new_s):,} events are newer than generation {serving}, of {least_events:,}{known_text}"
    last_s = int(dataset.interactions["timestamp"].max())
    newest_s, split_s = int(new_s[-1]), int(np.quantile(new_s, 1 - JUDGED_SHARE, method="lower"))
    judged_from_s = max(min(split_s + 1, newest_s), last_s + 1)
    if judged_from_s > newest_s:
        return (
            f"no live event is newer than the data set's own log, which ends at {format_time(last_s)} and is learned whole, so "
            "that none is left to judge by"
        )
    earlier = continue_log(dataset, live, judged_from_s)
    if int(earlier.interactions["timestamp"].max()) <= known_until_s:
        return "the new events are all of one second, and cannot be split into earlier ones to learn and later ones to judge by"
    first, serving_first = np.searchsorted(times_s, (judged_from_s, known_until_s + 1)).tolist()
    questions = choose_judged(whole.interactions, live, first, settings.pipeline.filter_seen)
    if len(questions) < LEAST_QUESTIONS:
        return f"the newest events hold {len(questions)} questions, and {LEAST_QUESTIONS} are needed to judge"
    return Split(live, erasures, whole, earlier, questions, first, serving_first)


def judge_candidate(candidate: Path, repo: Path, split: Split, store: Path, seed: int) -> Verdict:
    """Let the candidate and the serving generation predict the newest events, and compare. store: new folder for live state

    Like the running server, both know what `upsert` has set until now, except what their own newer catalogue replaces. Both
    keep the current rules. The candidate was exported with them; the serving one may be older than they are.
    """
    item_ids, user_ids = (split.whole.interactions[name].to_numpy()[split.questions] for name in ("item_id", "user_id"))
    changes = read_changes(split.live)
    candidate_changes, serving_changes = (
        put_on_sale(drop_replaced(changes, repository), split.whole.items, item_ids) for repository in (candidate, repo)
    )
    return judge(
        answer_live(candidate, split.whole, split.questions, split.first, store, candidate_changes),
        answer_live(repo, split.whole, split.questions, split.serving_first, store, serving_changes, split.live / RULES_FOLDER),
        item_ids,
        user_ids,
        np.random.default_rng(seed),
    )


def drop_replaced(changes: Sequence[Change], repository: Path) -> Sequence[Change]:
    """Return changes without those that the catalogue of the pinned generation replaces."""
    times = CatalogueTimes.load(find_stage_folder(repository, STAGES[0], read_pinned_generation(repository)))
    return times.drop_older(changes) if times else changes


def put_on_sale(changes: Sequence[Change], items: pd.DataFrame, item_ids: np.ndarray) -> list[Upserted]:
    """Return the changes of a live store, and put the items of `item_ids`, int64 [N], on sale, because they were bought.

    items: the catalogue with these changes
    """
    item_columns = {change.id: change.columns for change in changes if change.type == ITEM_CHANGED}
    for item_id in np.intersect1d(item_ids, items["item_id"][~items["available"]]).tolist():
        item_columns[item_id] = item_columns.get(item_id, {}) | {"available": True}
    user_changes = [Upserted("user", change.id, change.columns) for change in changes if change.type != ITEM_CHANGED]
    return [*user_changes, *(Upserted("item", item_id, columns) for item_id, columns in item_columns.items())]


def publish_candidate(candidate: Path, repo: Path, layout: str, serving: int, terms: Terms, verdict: Verdict) -> int | str:
    """Publish the candidate for all users, or for a share of them. Return its generation, or why it was not published.

    Until then, and in an experiment, a restart serves what was served before. Raises ExportError where another generation than
    `serving`, which the candidate was compared with, has become the pinned one, and ServerError or ConfigError where the
    candidate is published and not every server moves to it.
    """
    if running := find_running(repo):
        return f"experiment {running.name} was started meanwhile, and its verdict comes first"
    generation = relayout(candidate, repo, layout, beside=serving, keep=terms.keep, reason=str(verdict))
    make_read_only(repo, generation)
    record_publication(repo, generation, str(verdict))
    try:
        serve_published(repo, serving, generation, terms)
    except ServerError as error:  # the next round would probably train and publish another such generation
        record_act(repo, "not published", serving, reason=f"not every server moved to generation {generation}: {error}")
        raise
    return generation


def serve_published(repo: Path, serving: int, generation: int, terms: Terms) -> None:
    """Let all users, or a share of them, meet a published generation. Raises ServerError or ConfigError."""
    servers = find_running_servers(RUN_DIR, repo)
    if terms.share < 1:
        challenge(
            servers,
            repo,
            Experiment(name_experiment(generation), serving, generation, terms.share, promotes=True, days=terms.days),
        )
    else:
        unload_former(servers, repo, generation)
        move_servers(repo, generation, RUN_DIR)
        pin(repo, generation)


def find_unfinished(repo: Path) -> str:
    """Return why a round must wait for an experiment, "" for none: publishing would replace what it compares or promotes."""
    experiment = read_experiment(find_experiment_folder(repo))
    if experiment is None:
        return ""
    if experiment.runs:
        return f"experiment {experiment.name} runs, and its verdict comes first"
    if any(awaits_move(state, experiment) for state in find_running_servers(RUN_DIR, repo)):
        return (
            f"experiment {experiment.name} promoted generation {experiment.challenger}, and a server has not moved to it yet. "
            f"Without a supervisor: python -m server activate --generation {experiment.challenger}"
        )
    return ""


def choose_judged(log: pd.DataFrame, folder: Path, first: int, filter_seen: bool) -> np.ndarray:
    """Return the rows from `first` on by which two generations are judged, int64 [Q]. folder: of the live store

    An event that followed a served list favours the generation that made the list. Such events are left out, unless too
    few others remain to judge by.
    """
    span = first, len(log), MOST_QUESTIONS
    unprompted = choose_questions(log, *span, find_prompted(log, folder), filter_seen)
    return unprompted if len(unprompted) >= LEAST_QUESTIONS else choose_questions(log, *span, filter_seen=filter_seen)


def challenge(servers: list[ServerState], repo: Path, experiment: Experiment) -> None:
    """Begin an experiment, and unload the challenger of an earlier one first. Raises ServerError or ConfigError."""
    unload_former(servers, repo, experiment.challenger)
    begin_experiment(servers, repo, experiment)


def unload_former(servers: list[ServerState], repo: Path, generation: int) -> None:
    """Unload the challenger of an experiment that is over, a rollback for instance: no server moves while one is loaded.

    Raises ConfigError if an experiment runs, ServerError. generation: the one that is published meanwhile, for the message
    """
    if running := find_running(repo):
        raise ConfigError(
            f"Experiment {running.name!r} was started meanwhile; generation {generation} is published and unused."
        )
    for state in servers:
        unload_challenger(state.grpc_url, state.repo)
