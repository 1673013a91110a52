"""How each business rule moves an item: the rules are applied again, one more at a time, in the order of their passes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from serving.stages.rules.config import RulesConfig
from serving.stages.rules.rules import Rules

NOTHING = RulesConfig()


class RuleMove(NamedTuple):
    """rank_before, rank_after: from 1, None where the item is out of the list."""

    rule: str
    rank_before: int | None
    rank_after: int | None


def trace_rules(
    rules: Rules,
    generation: int,
    positions: np.ndarray,
    scores: np.ndarray,
    user_ids: np.ndarray,
    items_returned: int,
) -> Callable[[int], list[RuleMove]]:
    """positions: int64 [1, M]; scores: float32 [1, M] -> column of an item -> how each rule that is set moved it.

    A list is followed to its end, M, except that passes look at the first
    `items_returned` places, as they do when they answer.
    """
    order = [("score", np.argsort(-scores[0], kind="stable")[None])]
    stored = np.array(rules.items)
    for name, config, items in growing(rules.config, stored):
        columns = Rules(config, items, generation).apply(positions, scores, user_ids, items_returned)
        order.append((name, np.concatenate([columns[0], rest_of(columns[0], order[-1][1][0], items, positions[0])])[None]))

    def moves(column: int) -> list[RuleMove]:
        ranks = [(name, rank_of(columns[0], column)) for name, columns in order]
        return [RuleMove(name, before, after) for (_, before), (name, after) in pairwise(ranks)]

    return moves


def growing(config: RulesConfig, items: np.ndarray) -> Iterator[tuple[str, RulesConfig, np.ndarray]]:
    """Yield the rules that are set, each with those of the passes before it. items: ITEM_RULES [n_items + 1]"""
    plain = items.copy()
    plain["zone"][:-1], plain["blocked"][:-1] = 0, False
    kept = NOTHING
    if config.blocked_items:
        plain["blocked"] = items["blocked"]
        yield "blocked_items", kept, plain.copy()
    caps = ("max_per_category", "category_caps", "max_per_provider", "price_cap")
    for name, fields in (
        ("diversity", ("diversity",)),
        ("exploration", ("exploration",)),
        ("caps", caps),
        ("provider_floor", ("provider_floor",)),
    ):
        chosen = {field: getattr(config, field) for field in fields}
        if any(chosen.values()):
            kept = replace(kept, **chosen)
            yield name, kept, plain.copy()
    if config.pinned:
        yield "pinned", config, items


def rest_of(served: np.ndarray, before: np.ndarray, items: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Return the columns that are not served, in the order they had, without those that a rule drops."""
    left = before[(before >= 0) & ~np.isin(before, served)]
    return left[~items["blocked"][positions[left]]]


def rank_of(columns: np.ndarray, column: int) -> int | None:
    found = np.flatnonzero(columns[columns >= 0] == column)
    return int(found[0]) + 1 if len(found) else None
