"""Lower the ranker's and the re-ranker's networks to one precision, as far as the answers to recorded requests allow.

Per network: first lower each matrix product alone and measure how far the output moves. Then add products, the smallest error
per multiplication first, while the answers keep half of the precision's tolerance (`agreement.py`). The rest stays fp32. A
network in which no product tolerates int8 is lowered to fp16 instead, and the report says so.

networks = lower_networks(find_stage_folders(repository), "fp16")
networks["rank"].model, networks["rank"].share
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from export.nvidia.precision.agreement import HALF, MOST_MOVED, find_beyond, measure_moved_share
from export.nvidia.precision.calibration import NETWORKS, Arrays
from export.nvidia.precision.faithful import open_faithful_session
from export.nvidia.precision.graphs import count_multiply_adds, tidy
from export.nvidia.precision.half import convert_to_half
from export.nvidia.precision.int8 import find_weighted_products, quantize
from export.nvidia.precision.trial import LOWERED_STAGES, Trial
from serving.contract.errors import ConfigError

PRECISIONS = ("fp32", "fp16", "int8")
NEXT = {"int8": "fp16", "fp16": "fp32"}  # the next precision for a network that does not tolerate one
RANGE_BATCHES, ALONE_BATCHES = 16, 8  # batches for the ranges, and for the error of single products
LEAST_WORK = 0.01  # of a network's: casts around a smaller product cost more than it


@dataclass(frozen=True)
class Lowered:
    """A network's graph. fp32_nodes: nodes that TensorRT 8 must not lower; share: of the multiply-adds, those below fp32."""

    model: onnx.ModelProto
    precision: str
    fp32_nodes: tuple[str, ...] = ()
    share: float = 0.0


def lower_networks(folders: Mapping[str, Path], precision: str, report: Callable[[str], None] = print) -> dict[str, Lowered]:
    """Return each stage's network. folders: as `find_stage_folders` gives them. Raises ConfigError for an unknown precision."""
    if precision not in PRECISIONS:
        raise ConfigError(f"There is no precision {precision!r}. Expected one of {', '.join(PRECISIONS)}.")
    source = {stage: onnx.load(str(folders[stage] / f"{NETWORKS[stage]}.onnx")) for stage in LOWERED_STAGES}
    if precision == "fp32":
        return {stage: Lowered(model, precision) for stage, model in source.items()}
    trial = Trial(folders)
    lowered: dict[str, Lowered] = {}
    sessions: dict[str, Any] = {}
    for stage, model in source.items():
        lowered[stage] = lower_network(tidy(model), stage, precision, trial, sessions)
        sessions[stage] = open_faithful_session(lowered[stage].model)
        report(describe_outcome(stage, precision, lowered[stage]))
    return lowered


def describe_outcome(stage: str, wanted_precision: str, lowered: Lowered) -> str:
    """Return a line on the precision that a network got."""
    if lowered.precision == wanted_precision:
        return f"{stage}: {lowered.share:.0%} of the multiply-adds in {wanted_precision}"
    rest = f"; {lowered.share:.0%} of its multiply-adds are {lowered.precision} instead" if lowered.share else ""
    bound = {"int8": f"{MOST_MOVED:.1%} of the first places", "fp16": f"a score by {HALF / 2}"}[wanted_precision]
    return f"{stage}: no product bears {wanted_precision} without moving more than {bound}; it stays {lowered.precision}{rest}"


def lower_network(model: onnx.ModelProto, stage: str, precision: str, trial: Trial, sessions: Mapping[str, Any]) -> Lowered:
    """Lower one network. model: tidy; sessions: the networks that were lowered before, by stage."""
    feeds = trial.feeds[stage]
    work = count_multiply_adds(model, feeds[0])

    def lower(products: set[str]) -> Lowered:
        share = sum(work[name] for name in products) / sum(work.values())
        if precision == "fp16":
            graph, kept_nodes = convert_to_half(model, products)
            return Lowered(graph, precision, kept_nodes, share)
        return Lowered(quantize(model, sample_batches(feeds, RANGE_BATCHES), products), precision, (), share)

    chosen: set[str] = set()
    for name in order_products(model, feeds, work, precision, lower):
        answers = trial.answer_with({**sessions, stage: open_faithful_session(lower({*chosen, name}).model)})
        if keeps_precision(precision, answers, trial.exact):
            chosen.add(name)
    if chosen:
        return lower(chosen)
    if NEXT[precision] == "fp32":
        return Lowered(model, "fp32")
    return lower_network(model, stage, NEXT[precision], trial, sessions)


def order_products(
    model: onnx.ModelProto, feeds: list[Arrays], work: Mapping[str, int], precision: str, lower: Callable[[set[str]], Lowered]
) -> list[str]:
    """Return products by how far each alone moves the output, per multiply-add.

    Products with next to no work are left out, and those with non-finite output.
    """
    sample, least = sample_batches(feeds, ALONE_BATCHES), LEAST_WORK * sum(work.values())
    exact = compute_outputs(model, sample)
    can_be_lowered = find_weighted_products(model) if precision == "int8" else work.keys()
    names = [name for name in can_be_lowered if work[name] >= least]
    errors = {name: float(np.sqrt(np.mean((compute_outputs(lower({name}).model, sample) - exact) ** 2))) for name in names}
    return sorted((name for name in names if np.isfinite(errors[name])), key=lambda name: errors[name] / work[name])


def keeps_precision(precision: str, answers: Arrays, exact: Arrays) -> bool:
    """Return whether answers keep half of the precision's tolerance."""
    if not np.isfinite(answers["scores"]).all():
        return False
    if precision == "fp16":
        return not find_beyond(answers, exact, HALF / 2).any()
    return measure_moved_share(answers, exact, HALF / 2) <= MOST_MOVED


def compute_outputs(model: onnx.ModelProto, feeds: list[Arrays]) -> np.ndarray:
    """Return the one output of all batches, joined, computed in the graph's types."""
    session = open_faithful_session(model)
    return np.concatenate([session.run(None, feed)[0] for feed in feeds])


def sample_batches(feeds: list[Arrays], count: int) -> list[Arrays]:
    """Return about `count` batches from all over the recorded requests."""
    return feeds[:: max(1, len(feeds) // count)]
