"""Quantise a student to int8: after training where that keeps its quality, and with training where it does not."""

from __future__ import annotations

import copy
import itertools
from dataclasses import replace

import numpy as np
import torch

from training.models.rankers.quantised_network import QuantisedNetwork
from training.models.rankers.train_ranker import Ranker, RankerSettings, Report, compute_logits, draw_batches
from training.models.student.distill import Lesson

RANGE_BATCHES = 64  # batches that give the ranges of values
MOST_LOST = 0.01  # share of the student's NDCG@10 on validation requests; with more, it is trained in int8
EPOCHS, LEARNING_RATE = 6, 1e-3


def quantise(
    lesson: Lesson,
    student: Ranker,
    settings: RankerSettings,
    seed: int = 0,
    report: Report = print,
) -> Ranker:
    """Return the student with its products in int8. settings: the student's"""
    ranker = quantise_after_training(lesson, student, settings, seed)
    lost_share = 1 - ranker.quality["ndcg_at_10"] / max(student.quality["ndcg_at_10"], 1e-9)
    report(f"int8 ranker: quantised after training, it loses {lost_share:.2%} of the student's NDCG@10 on validation requests")
    if lost_share <= MOST_LOST:
        return ranker
    return max(ranker, train_in_int8(lesson, ranker, settings, seed, report), key=lambda tried: tried.validated)


def quantise_after_training(lesson: Lesson, student: Ranker, settings: RankerSettings, seed: int = 0) -> Ranker:
    """Return the student with its products in int8. The ranges of its values are measured on requests that it learned from."""
    model = copy.deepcopy(student.model)
    model.network = QuantisedNetwork(model.network)
    some = draw_batches(lesson.imitated, settings, np.random.default_rng(seed))
    with torch.no_grad(), model.network.measuring_ranges():
        for batch in itertools.islice(some, RANGE_BATCHES):
            compute_logits(model, batch)
    return lesson.judge(model, "int8", settings.blends)


def train_in_int8(lesson: Lesson, quantised: Ranker, settings: RankerSettings, seed: int = 0, report: Report = print) -> Ranker:
    """Train a quantised ranker to give the teacher's shares, with its products in int8. The ranges of its values stay."""
    model = copy.deepcopy(quantised.model)
    taught = replace(settings, epochs=EPOCHS, learning_rate=LEARNING_RATE)
    lesson.teach(model, taught, seed, lambda text: report(f"int8 {text}"))
    return lesson.judge(model, "int8", settings.blends)
