"""Prune whole hidden units of a student, so that its layers, and the served network, become narrower.

The importance of a unit is how much the loss changes without it, to first order (Molchanov et al., "Importance Estimation for
Neural Network Pruning", 2019). The pruned network learns the teacher's scores again.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from training.models.rankers.dlrm import DLRM
from training.models.rankers.train_ranker import Ranker, RankerSettings, Report, compute_loss, draw_batches
from training.models.student.distill import Lesson, make_student

SHARE = 0.5  # of the units of each hidden layer that stay
EPOCHS, LEARNING_RATE = 10, 2e-3

Importance = tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]
"""The importance of the units of each hidden layer, of the bottom and of the top MLP, float32 [units]."""


def prune(lesson: Lesson, student: Ranker, settings: RankerSettings, seed: int = 0, report: Report = print) -> Ranker:
    """Return the student with half of its hidden units. settings: the student's"""
    importance = measure_importance(lesson, student.model, settings, np.random.default_rng(seed))
    model = keep_units(student.model, importance, SHARE)
    taught = replace(settings, epochs=EPOCHS, learning_rate=LEARNING_RATE)
    lesson.teach(model, taught, seed, lambda text: report(f"pruned {text}"))
    return lesson.judge(model, "pruned", settings.blends)


def measure_importance(lesson: Lesson, model: DLRM, settings: RankerSettings, rng: np.random.Generator) -> Importance:
    """Return the squared change of the loss without each unit, to first order, summed over the batches of one epoch.

    Removing a unit sets its weights and bias to 0, so to first order it changes the loss by their product with their gradients.
    """
    sides = tuple(tuple(layers[:-1]) for layers in (model.network.bottom, model.network.top))
    bottom, top = (tuple(torch.zeros(layer.out_features) for layer in layers) for layers in sides)
    for batch in draw_batches(lesson.imitated, settings, rng):
        model.zero_grad()
        compute_loss(model, batch).backward()
        for layers, totals in zip(sides, (bottom, top), strict=True):
            for layer, total in zip(layers, totals, strict=True):
                total += (_multiply_by_gradient(layer.weight).sum(dim=1) + _multiply_by_gradient(layer.bias)) ** 2
    return bottom, top


def _multiply_by_gradient(parameter: torch.Tensor) -> torch.Tensor:
    """Return a parameter times its gradient, element by element."""
    assert parameter.grad is not None  # `backward` has been called
    return parameter.detach() * parameter.grad


@torch.no_grad()
def keep_units(model: DLRM, importance: Importance, share: float) -> DLRM:
    """Return a copy with that share of the units of each hidden layer, the most important ones; at least one of each."""
    kept_units = tuple(tuple(choose_important(values, share) for values in layers) for layers in importance)
    bottom, top = (tuple(map(len, layers)) for layers in kept_units)
    pruned = make_student(model, RankerSettings(width=model.shape.width, bottom=bottom, top=top))
    for table, wider_table in zip(pruned.tables, model.tables, strict=True):
        table.load_state_dict(wider_table.state_dict())
    sides = ((pruned.network.bottom, model.network.bottom), (pruned.network.top, model.network.top))
    for (layers, wider), units in zip(sides, kept_units, strict=True):
        read_units = torch.arange(layers[0].in_features)
        for layer, wide, written_units in zip(layers, wider, (*units, torch.arange(layers[-1].out_features)), strict=True):
            layer.weight.copy_(wide.weight[written_units][:, read_units])
            layer.bias.copy_(wide.bias[written_units])
            read_units = written_units
    return pruned


def choose_important(values: torch.Tensor, share: float) -> torch.Tensor:
    """Return the units to keep, int64, in their order. values: float32 [units]"""
    return values.topk(max(round(len(values) * share), 1)).indices.sort().values
