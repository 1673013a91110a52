"""Choose by validation whether the sequence model, the graph model and repeats retrieve, and with what weights.

    log ──split by time──▶ earlier ─▶ every source fitted on it
                           later   ─▶ quality of each weight: the next item of a visit, and all items of the later part

A source that adds nothing is left out, so that it costs nothing to serve. The retriever of the earlier part also makes the
candidates that teach the ranker, so choosing costs no second training.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pandas as pd
import scipy.sparse as sp

from training.dataset import Dataset
from training.dataset.repeats import find_repeats
from training.evaluation.metrics import ndcg_at, recall_at
from training.features.build import Examples, Features, take_context
from training.gain import average, is_gain
from training.models.rankers.ranking_data import has_past
from training.models.validation import split_training_log
from training.models.warm_start import EARLIER
from training.retrieval.fit import FittedRetriever, RetrievalSettings, fit_training_retriever

Say = Callable[[str], None]

SEQUENCE_WEIGHTS = (0.0, 0.25, 0.5, 1.0, 2.0)
GRAPH_WEIGHTS = (0.0, 0.1, 0.3, 1.0, 3.0, 10.0)  # times the root mean square of item-item scores
REPEAT_WEIGHTS = (0.0, 0.3, 1.0, 3.0)  # item-item weight of an item with itself, where all its takers took it again
MOST_QUESTIONS = 2_048  # of each kind
FEWEST_QUESTIONS = 200  # of both kinds; from fewer, validation learns too little for a trial
NOT_SERVED = "[pipeline] filter_seen = true, so nothing is served that a user took before"
LEAST_GAIN = 1.01  # factor by which a model must raise the quality to be worth its time


@dataclass(frozen=True)
class Questions:
    """N validation users just before events of the later part. relevant: CSR [N, n_items], what they took then."""

    users: Examples
    user_ids: np.ndarray
    relevant: sp.csr_matrix


@dataclass(frozen=True)
class Choice:
    """The weight of a model.

    qualities: weight -> NDCG@10 + Recall@20, mean over the kinds of questions
    chosen: the weight that is served
    not_tried: why `qualities` is empty, otherwise ""
    """

    qualities: dict[float, float] = field(default_factory=dict)
    chosen: float = 0.0
    not_tried: str = ""

    @classmethod
    def of(cls, qualities: dict[float, list[np.ndarray]], user_ids: Sequence[np.ndarray]) -> Choice:
        """Choose the best of the weights that are better than 0 by LEAST_GAIN and beyond chance; 0 without any.

        qualities: by weight, for each kind of questions, the quality of each answer, float64 [N]
        user_ids: for each kind, the user of each question, int64 [N]
        """
        means = {weight: average(kinds) for weight, kinds in qualities.items()}
        better = [weight for weight, kinds in qualities.items() if is_gain(kinds, qualities[0.0], user_ids, LEAST_GAIN)]
        return cls(means, max(better, key=lambda weight: means[weight], default=0.0))

    def report(self) -> dict[str, object]:
        """Return the entry of the manifest."""
        validation = {str(weight): value for weight, value in self.qualities.items()}
        return {"weight": self.chosen, "validation": validation} | ({"not_tried": self.not_tried} if self.not_tried else {})


@dataclass(frozen=True)
class Choices:
    sequence: Choice
    graph: Choice
    repeats: Choice

    def report(self) -> dict[str, object]:
        """Return the table for the manifest."""
        return {name: choice.report() for name, choice in vars(self).items()}


@dataclass(frozen=True)
class NotTried:
    """Reason why a source is not tried; "" if it is."""

    sequence: str = ""
    graph: str = ""
    repeats: str = ""


@dataclass(frozen=True)
class PastRetrievers:
    """Fits retrievers on parts of the log. The one that the choice was made with is not fitted again.

    earlier_rows: int64 [N], row numbers in the log of the events that `retriever` was fitted on
    """

    dataset: Dataset
    features: Features
    settings: RetrievalSettings
    say: Say
    earlier_rows: np.ndarray
    retriever: FittedRetriever

    def __call__(self, earlier: pd.DataFrame) -> FittedRetriever:
        if np.array_equal(earlier["row"].to_numpy(), self.earlier_rows):
            return self.retriever
        return fit_training_retriever(self.dataset, self.features, self.settings, self.say, earlier)


def choose_sources(
    dataset: Dataset, features: Features, settings: RetrievalSettings, say: Say, not_tried: NotTried
) -> tuple[Choices, RetrievalSettings, PastRetrievers]:
    """Return the choices, the settings of the served retriever, and the retrievers for training the ranker.

    settings: with the models to try; not_tried: reasons for those that it leaves out
    """
    if settings.filter_seen:
        not_tried = replace(not_tried, repeats=NOT_SERVED)
    log = dataset.interactions
    earlier, later = split_training_log(log)
    kinds = make_questions(features, log, later, settings)
    if (count := sum(len(questions.user_ids) for questions in kinds)) < FEWEST_QUESTIONS:
        few = f"the log leaves {count} validation questions; expected {FEWEST_QUESTIONS} at least"
        settings, not_tried = (
            replace(settings, sequence=None, graph=None),
            NotTried(*(reason or few for reason in vars(not_tried).values())),
        )
    earlier_rows = earlier["row"].to_numpy(copy=True)
    tried_retriever = fit_training_retriever(dataset, features, settings, say, earlier, EARLIER)
    del earlier
    choices = choose_weights(tried_retriever, kinds, say, not_tried)
    weights = {name: choice.chosen for name, choice in vars(choices).items()}
    chosen = replace(
        settings,
        sequence=settings.sequence if weights["sequence"] else None,
        sequence_weight=weights["sequence"],
        graph=settings.graph if weights["graph"] else None,
        graph_weight=weights["graph"],
        repeat_weight=weights["repeats"],
    )
    weighed = replace(tried_retriever, retriever=tried_retriever.retriever.weigh(**weights))
    return choices, chosen, PastRetrievers(dataset, features, chosen, say, earlier_rows, weighed)


def choose_weights(fitted: FittedRetriever, kinds: list[Questions], say: Say, not_tried: NotTried) -> Choices:
    """Choose the weight of repeats first, then that of the sequence model given it, then that of the graph given both."""
    user_ids = [questions.user_ids for questions in kinds]

    def measure(sequence: float, graph: float, repeats: float) -> list[np.ndarray]:
        retriever = replace(fitted, retriever=fitted.retriever.weigh(sequence=sequence, graph=graph, repeats=repeats))
        qualities = [measure_quality(retriever, questions) for questions in kinds]
        weights = f"repeats {repeats:g}, sequence model {sequence:g}, graph {graph:g}"
        say(f"  weights: {weights}: NDCG@10 + Recall@20 {average(qualities):.4f}")
        return qualities

    sequence = Choice(not_tried=not_tried.sequence or "no user has two positive events to learn an order from")
    graph, repeats = Choice(not_tried=not_tried.graph), Choice(not_tried=not_tried.repeats)
    if not not_tried.repeats:
        repeats = Choice.of({weight: measure(0.0, 0.0, weight) for weight in REPEAT_WEIGHTS}, user_ids)
    if fitted.retriever.sequence is not None:
        sequence = Choice.of({weight: measure(weight, 0.0, repeats.chosen) for weight in SEQUENCE_WEIGHTS}, user_ids)
    if fitted.retriever.graph is not None:
        graph = Choice.of({weight: measure(sequence.chosen, weight, repeats.chosen) for weight in GRAPH_WEIGHTS}, user_ids)
    return Choices(sequence, graph, repeats)


def measure_quality(fitted: FittedRetriever, questions: Questions) -> np.ndarray:
    """Return NDCG@10 + Recall@20 of each question, float64 [N]."""
    positions, _ = fitted(questions.users, questions.user_ids)
    return ndcg_at(positions, questions.relevant, 10) + recall_at(positions, questions.relevant, 20)


def make_questions(features: Features, log: pd.DataFrame, later: pd.DataFrame, settings: RetrievalSettings) -> list[Questions]:
    """Return two kinds of questions about users with a past: the item of one event, and all items of a user's later part.

    Items that users already took are left out where they are not served.
    """
    rng = np.random.default_rng(settings.seed)
    new = later[later["positive"].to_numpy() & has_past(log)[later["row"].to_numpy()]]
    if settings.filter_seen:
        new = new[~find_repeats(log)[new["row"].to_numpy()]]
    events, firsts = sample(new, rng), sample(new.drop_duplicates("user_id"), rng)
    user_ids = firsts["user_id"].to_numpy()
    place = pd.Index(user_ids).get_indexer(new["user_id"])
    items = features.items.find_positions(new["item_id"].to_numpy())[place >= 0]
    all_later = make_matrix(place[place >= 0], items, len(firsts), features.items.n_items)
    one = make_matrix(
        np.arange(len(events)), features.items.find_positions(events["item_id"].to_numpy()), len(events), all_later.shape[1]
    )
    return [
        Questions(encode_users_before(features, log, events), events["user_id"].to_numpy(), relevant)
        for events, relevant in ((events, one), (firsts, all_later))
        if len(events)
    ]


def encode_users_before(features: Features, log: pd.DataFrame, events: pd.DataFrame) -> Examples:
    """Encode the users of events as they were just before them."""
    moments = features.log.find_moments_before_rows(log, events["row"].to_numpy())
    return features.encode_moments(moments, events["timestamp"].to_numpy(), take_context(events, features.context))


def sample(events: pd.DataFrame, rng: np.random.Generator) -> pd.DataFrame:
    """Return at most MOST_QUESTIONS of the events, drawn at random, in their order."""
    if len(events) <= MOST_QUESTIONS:
        return events
    return events.iloc[np.sort(rng.choice(len(events), MOST_QUESTIONS, replace=False))]


def make_matrix(rows: np.ndarray, items: np.ndarray, n_rows: int, n_items: int) -> sp.csr_matrix:
    """Return CSR float32 [n_rows, n_items] with one stored entry per distinct (row, item)."""
    return sp.csr_matrix((np.ones(len(rows), np.float32), (rows, items)), shape=(n_rows, n_items))
