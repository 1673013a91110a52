"""The lines in which an export says what it learned."""

from dataclasses import replace

import pytest
import torch

from export.steps.describe import describe_ranker, describe_sources
from training.models.rankers.dlrm import DLRM, Shape
from training.models.rankers.train_ranker import Ranker
from training.models.ranking import RankingSettings
from training.retrieval.choose import Choice, Choices


def test_sources_that_were_not_tried_have_a_reason_and_those_that_lost_none():
    why = "396,374 positive events need [training] minutes = 12"
    lost, won = Choice({0.0: 1.0, 0.1: 0.9}), Choice({0.0: 1.0, 0.3: 1.2}, 0.3)
    assert describe_sources(Choices(lost, won, lost)) == "item-item, two towers, graph with weight 0.3"
    not_tried = Choices(Choice(not_tried=why), lost, Choice(not_tried="they are not served"))
    assert describe_sources(not_tried) == f"item-item, two towers; sequence model not tried: {why}"
    assert describe_sources(Choices(lost, lost, won)) == "item-item, two towers, repeats with weight 0.3"


@pytest.mark.parametrize(("chosen", "served"), [("distilled", "distilled"), ("pruned", "keeps too little")])
def test_a_ranker_is_described_by_the_order_of_retrieved_items_and_by_why_it_has_no_more_teachers(chosen, served):
    torch.manual_seed(0)
    quality = {"ndcg_at_10": 0.25, "recall_at_20": 0.75}
    ranker = Ranker(DLRM(Shape({"u": 4}, {"i": 4}, 1, 2, 4, (4,), (4,))), 1.0, quality, "distilled")
    described = describe_ranker(ranker, RankingSettings(compression=chosen))
    assert described.startswith("NDCG@10 0.2500, Recall@20 0.7500 among the retrieved items of validation requests")
    assert served in described
    assert "teachers" not in described
    described = describe_ranker(replace(ranker, no_teachers="too few"), RankingSettings(compression=chosen))
    assert described.endswith("; more teachers not tried: too few")


def test_a_ranker_that_learned_nothing_says_why_although_there_were_requests():
    untrained = Ranker(DLRM(Shape({"u": 4}, {"i": 4}, 1, 2, 4, (4,), (4,))), 1.0, {"requests": 0})
    described = describe_ranker(untrained, RankingSettings())
    assert described.startswith("learned nothing, because none of the requests")
    assert "retrieved an item that its user took" in described
