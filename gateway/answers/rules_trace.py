"""Find out how each business rule moves an item: apply the rules again, one more at a time, in the order of their passes.

The draw that shows a new item by chance comes last. It is no rule of the shop, but it moves items as rules do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from serving.stages.rules.config import RulesConfig
from serving.stages.rules.rules import Rules

NOTHING = RulesConfig()
NEW_ITEMS = "new_items"  # name of the draw


class RuleMove(NamedTuple):
    """The effect of one rule on an item. rank_before, rank_after: counted from 1, None where the item is not in the list."""

    rule: str
    rank_before: int | None
    rank_after: int | None


def trace_rules(
    rules: Rules,
    generation: int,
    positions: np.ndarray,
    scores: np.ndarray,
    user_ids: np.ndarray,
    shown: np.ndarray,
) -> Callable[[int], list[RuleMove]]:
    """Return a function from an item's column, 0 … M - 1, to the moves of that item by each rule that is set.

    positions: int64 [1, M] item positions; scores: float32 [1, M]; user_ids: int64 [1]
    shown: int64 [K] columns of the items of the answer, -1 after the last
    The whole list of M items is ranked, but the passes consider the first K places, as in an answer.
    """

    def apply(config: RulesConfig, items: np.ndarray) -> np.ndarray:
        return Rules(config, items, generation).apply(positions, scores, user_ids, len(shown))[0]

    order = [("score", np.argsort(-scores[0], kind="stable"))]
    stored = np.array(rules.items)
    for name, config, items in add_rules(rules.config, stored):
        columns = apply(config, items)
        unserved = list_unserved(columns, order[-1][1], items, positions[0])
        order.append((name, np.concatenate([columns, unserved])))
    if not np.array_equal(apply(rules.config, stored), shown):
        order.append((NEW_ITEMS, np.concatenate([shown, list_unserved(shown, order[-1][1], stored, positions[0])])))

    def list_moves(column: int) -> list[RuleMove]:
        ranks = [(name, find_rank(columns, column)) for name, columns in order]
        return [RuleMove(name, before, after) for (_, before), (name, after) in pairwise(ranks)]

    return list_moves


def add_rules(config: RulesConfig, items: np.ndarray) -> Iterator[tuple[str, RulesConfig, np.ndarray]]:
    """Yield (name, config, items) for each rule that is set; config and items hold this rule and those of the passes before it.

    items: ITEM_RULES [n_items + 1], of all rules
    """
    plain = items.copy()
    plain["zone"][:-1], plain["blocked"][:-1] = 0, False
    rules = NOTHING
    if config.blocked_items:
        plain["blocked"] = items["blocked"]
        yield "blocked_items", rules, plain.copy()
    caps = ("max_per_category", "category_caps", "max_per_provider", "price_cap")
    for name, fields in (
        ("diversity", ("diversity",)),
        ("exploration", ("exploration",)),
        ("caps", caps),
        ("provider_floor", ("provider_floor",)),
    ):
        chosen = {field: getattr(config, field) for field in fields}
        if any(chosen.values()):
            rules = replace(rules, **chosen)
            yield name, rules, plain.copy()
    if config.pinned:
        yield "pinned", config, items


def list_unserved(served_columns: np.ndarray, before: np.ndarray, items: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Return the columns, int [N], that are neither served nor blocked, in the order they had before.

    served_columns: int [K] columns, before: int [M] columns, -1 = none in both; items: ITEM_RULES; positions: int64 [M]
    """
    unserved = before[(before >= 0) & ~np.isin(before, served_columns)]
    return unserved[~items["blocked"][positions[unserved]]]


def find_rank(columns: np.ndarray, column: int) -> int | None:
    """Return the rank of a column, counted from 1; None if the list does not have it. columns: int [M], -1 = none"""
    places = np.flatnonzero(columns[columns >= 0] == column)
    return int(places[0]) + 1 if len(places) else None
