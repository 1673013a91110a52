"""Validation chooses the sources: the sequence model is served where it finds more, and left out where it does not."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest

from tests.unit.small_shops import shop
from training.features.build import build_features
from training.features.schema import FeatureSettings
from training.models.candidates.graph import GraphSettings
from training.models.candidates.sequence import SequenceShape
from training.models.candidates.train_sequence import SequenceSettings
from training.models.validation import split_training_log
from training.retrieval.choose import GRAPH_WEIGHTS, NOT_SERVED, Choice, NotTried, choose_sources, make_questions
from training.retrieval.fit import RetrievalSettings

LENGTH = 8
SEED = 1  # another than that of `shop`, so that items do not depend on users
SEQUENCE = SequenceSettings(SequenceShape(width=16, length=LENGTH, dropout=0.0), batch_events=256, learning_rate=1e-2)
SETTINGS = RetrievalSettings(candidates=20, sequence=SEQUENCE, graph=GraphSettings(width=8))
BOTH_TRIED = NotTried()


def choose(dataset, settings=SETTINGS, not_tried=BOTH_TRIED):
    features = build_features(dataset, dataset.interactions, FeatureSettings(history_length=LENGTH))
    return choose_sources(dataset, features, settings, lambda _: None, not_tried)


@pytest.fixture(scope="module")
def cyclic(tmp_path_factory):
    """A log in which each user goes round the catalogue in one order: everything comes with everything, only order tells."""
    dataset = shop(tmp_path_factory.mktemp("cyclic") / "data", users=60, items=30, events=1500)
    events, rng = dataset.interactions, np.random.default_rng(SEED)
    places = events.groupby("user_id").cumcount().to_numpy()
    users = np.unique(events["user_id"], return_inverse=True)[1]
    order = dataset.items["item_id"].to_numpy()[rng.permutation(30)]
    items = order[(rng.integers(0, 30, users.max() + 1)[users] + places) % 30]
    return replace(dataset, interactions=events.assign(item_id=items, positive=True))


def test_a_log_in_which_order_counts_is_served_with_the_sequence_model(cyclic):
    choices, settings, past = choose(cyclic, replace(SETTINGS, filter_seen=False))
    choice = choices.sequence
    assert choice.chosen > 0
    assert choice.qualities[choice.chosen] == max(choice.qualities.values()) > 1.01 * choice.qualities[0.0]
    assert settings.sequence_weight == choice.chosen
    earlier, _ = split_training_log(cyclic.interactions)
    assert past(earlier) is past.retriever
    assert past.retriever.retriever.sequence_weight == choice.chosen


def test_a_log_without_order_is_served_without_it(cyclic):
    events, rng = cyclic.interactions, np.random.default_rng(SEED)
    shuffled = rng.choice(cyclic.items["item_id"].to_numpy(), len(events))
    choices, settings, past = choose(replace(cyclic, interactions=events.assign(item_id=shuffled)))
    assert choices.sequence.not_tried == choices.graph.not_tried == ""
    assert choices.sequence.chosen == choices.graph.chosen == 0.0
    assert settings.sequence is settings.graph is None
    retriever = past.retriever.retriever
    assert retriever.graph is None
    assert retriever.sequence is None
    assert retriever.item_vectors.shape[1] == retriever.settings.towers.width


def test_a_log_in_which_nobody_returns_has_nothing_to_choose_by(tmp_path):
    dataset = shop(tmp_path / "data", users=30, items=20, events=200)
    dataset = replace(dataset, interactions=dataset.interactions.drop_duplicates("user_id", ignore_index=True))
    choices, settings, _ = choose(dataset)
    assert choices.sequence.chosen == choices.graph.chosen == 0.0
    assert settings.sequence is settings.graph is None


def test_a_log_with_few_questions_tries_nothing_and_says_so(tmp_path):
    dataset = shop(tmp_path / "data", users=30, items=20, events=200)
    choices, settings, past = choose(dataset, not_tried=NotTried(sequence="it is switched off"))
    assert settings.sequence is settings.graph is past.retriever.retriever.graph is None
    sequence, graph = choices.report()["sequence"], choices.report()["graph"]
    assert sequence == {"weight": 0.0, "validation": {}, "not_tried": "it is switched off"}
    assert graph["validation"] == {}
    assert re.fullmatch(r"the log leaves \d+ validation questions; expected 200 at least", graph["not_tried"])


def test_a_weight_serves_only_where_the_differences_per_question_show_more_than_chance():
    rng, user_ids = np.random.default_rng(0), np.arange(300)
    without, noise = rng.random(300), rng.normal(size=300)
    noise -= noise.mean()
    by_chance, better = ({0.0: [without], 3.0: [without + 0.02 + spread * noise]} for spread in (0.3, 0.02))
    for qualities, chosen in ((by_chance, 0.0), (better, 3.0)):
        choice = Choice.of(qualities, [user_ids])
        assert choice.qualities[3.0] > 1.01 * choice.qualities[0.0]
        assert choice.chosen == chosen
    assert Choice.of(better, [np.zeros(300, np.int64)]).chosen == 0.0  # one user's questions prove nothing of others
    assert Choice.of({weight: [*kinds, without] for weight, kinds in better.items()}, [user_ids] * 2).chosen == 3.0


def test_a_log_that_its_graph_explains_is_served_with_the_graph(tmp_path):
    """Users buy around a place on a ring of items, too few times for all neighbours to be seen together."""
    dataset, rng = shop(tmp_path / "data", users=1000, items=400, events=4000), np.random.default_rng(SEED)
    users = np.unique(dataset.interactions["user_id"], return_inverse=True)[1]
    ring = rng.permutation(dataset.items["item_id"].to_numpy())
    bought = ring[(rng.integers(0, 400, 1000)[users] + rng.integers(-12, 13, len(users))) % 400]
    log = dataset.interactions.assign(item_id=bought, positive=True)
    choices, settings, past = choose(replace(dataset, interactions=log), replace(SETTINGS, sequence=None))
    choice = choices.graph
    assert choice.qualities[choice.chosen] == max(choice.qualities.values()) > 1.01 * choice.qualities[0.0]
    assert settings.graph_weight == past.retriever.retriever.graph_weight == choice.chosen > 0
    report = choices.report()["graph"]
    assert report["validation"].keys() == {str(weight) for weight in GRAPH_WEIGHTS}
    assert report.keys() == {"weight", "validation"}


def test_where_users_take_the_same_items_again_repeats_are_served_if_they_may_be(cyclic):
    """Each user has five items of their own, and takes one of them at a time."""
    rng, ids = np.random.default_rng(SEED), cyclic.items["item_id"].to_numpy()
    users = np.unique(cyclic.interactions["user_id"], return_inverse=True)[1]
    own = np.stack([rng.permutation(len(ids))[:5] for _ in range(users.max() + 1)])
    log = cyclic.interactions.assign(item_id=ids[own[users, rng.integers(0, 5, len(users))]])
    again = replace(cyclic, interactions=log)
    choices, settings, past = choose(again, replace(SETTINGS, sequence=None, graph=None, filter_seen=False))
    choice = choices.repeats
    assert choice.qualities[choice.chosen] == max(choice.qualities.values()) > 1.2 * choice.qualities[0.0]
    assert settings.repeat_weight == past.retriever.retriever.repeat_weight == choice.chosen > 0
    choices, settings, _ = choose(again, replace(SETTINGS, sequence=None, graph=None))
    assert settings.repeat_weight == 0
    assert choices.report()["repeats"] == {"weight": 0.0, "validation": {}, "not_tried": NOT_SERVED}


def test_questions_ask_for_items_that_the_user_never_had(cyclic):
    log, rng = cyclic.interactions, np.random.default_rng(SEED)
    log = log.assign(item_id=rng.choice(cyclic.items["item_id"].to_numpy(), len(log)))
    features = build_features(cyclic, log, FeatureSettings(history_length=LENGTH))
    _, later = split_training_log(log)
    events, firsts = make_questions(features, log, later, SETTINGS)
    assert (np.diff(events.relevant.indptr) == 1).all()
    came = set(zip(later["user_id"], later["item_id"], strict=True))
    ids = features.items.ids
    for questions in (events, firsts):
        for row, user in enumerate(questions.user_ids):
            items = set(ids[questions.relevant[row].indices].tolist())
            history = set(features.items.take_ids(questions.users.history_positions[row]).tolist())
            assert items
            assert not items & history
            assert {(user, item) for item in items} <= came
