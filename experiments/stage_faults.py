"""Broken stages of a generation. This file is copied into the generation's folder, next to the model that it breaks.

Each function answers in place of a stage. serve: the stage as it was published; inputs, and what is returned: arrays by name,
each [B, *dims], as serving/contract/tensors.py states them for the stage.

The stage works until the file BEGUN is next to this one: tritonserver loads no model that fails while it warms up, and may die
of one.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

Arrays = dict[str, np.ndarray]
Serve = Callable[[Arrays], Arrays]

TIMES_AS_LONG = 10
FAILING_SHARE = 0.25  # of the requests
NO_ITEM = -1
BEGUN = "begun"

_same_items: list[np.ndarray] = []  # int64 [K], of the first answer


def has_begun() -> bool:
    """Return whether the stage is broken by now."""
    return Path(__file__).with_name(BEGUN).exists()


def answer_slowly(serve: Serve, inputs: Arrays) -> Arrays:
    """Take TIMES_AS_LONG times as long."""
    began_s = time.perf_counter()
    outputs = serve(inputs)
    time.sleep((TIMES_AS_LONG - 1) * (time.perf_counter() - began_s))
    return outputs


def fail(serve: Serve, inputs: Arrays) -> Arrays:
    """Raise RuntimeError."""
    raise RuntimeError("this stage is broken on purpose")


def fail_sometimes(serve: Serve, inputs: Arrays) -> Arrays:
    """Raise RuntimeError for FAILING_SHARE of the requests, drawn at random."""
    return fail(serve, inputs) if np.random.default_rng().random() < FAILING_SHARE else serve(inputs)


def show_same_items(serve: Serve, inputs: Arrays) -> Arrays:
    """Show everybody the items of the first answer. For `rerank`."""
    outputs = serve(inputs)
    if not _same_items:
        _same_items.append(outputs["item_ids"][0].copy())
    outputs["item_ids"][:] = _same_items[0]
    return outputs


def show_nothing(serve: Serve, inputs: Arrays) -> Arrays:
    """Answer with empty lists. For `rerank`."""
    outputs = serve(inputs)
    outputs["item_ids"][:] = NO_ITEM
    return outputs


def reverse_ranks(serve: Serve, inputs: Arrays) -> Arrays:
    """Put the worst candidates first. For `rank`."""
    outputs, is_padding = serve(inputs), inputs["candidate_ids"] == NO_ITEM
    return outputs | {"rank_scores": np.where(is_padding, outputs["rank_scores"], -outputs["rank_scores"])}


def confuse_users(serve: Serve, inputs: Arrays) -> Arrays:
    """Answer every user as if they were the one with the id before. For `preprocess`."""
    return serve(inputs | {"user_id": np.where(inputs["user_id"] > 1, inputs["user_id"] - 1, inputs["user_id"])})
