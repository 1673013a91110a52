"""Keep the arrays of the re-ranker and the rules up to date with new and changed items, and explore new ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from serving.contract.artifacts import view_writable
from serving.contract.tensors import PAD_ID
from serving.loops.compiled import compiled
from serving.stages.features.ids import ItemIndex
from serving.stages.live.content import GROUPS, Content, get_text
from serving.stages.rules.config import ABOVE_PRICE_CAP, BLOCKED, NEVER, NO_CAP, OVER_CAP, PROVIDER
from serving.stages.rules.passes import draw_uniform
from serving.stages.rules.propensities import UNKNOWN
from serving.stages.rules.rules import Rules

EXPLORE_DRAW = 0  # argument in place of an item position, for the draw that decides whether a list explores


@dataclass
class ListedItems:
    """The re-ranker's arrays with one row per item.

    item_vectors: float32 [n_items + 1, D]
    group_codes: those of the exported categories and of the exported providers, by name, the same in all versions of the rules
    """

    content: Content
    item_vectors: np.ndarray
    rules: Rules
    items: ItemIndex
    group_codes: tuple[Mapping[str | None, int], ...] = field(init=False)

    def __post_init__(self) -> None:
        groups = self.rules.items["group"]
        self.group_codes = tuple(self.content.map_groups(role, groups[:, role]) for role in range(len(GROUPS)))

    def add_item(self, position: int) -> None:
        """Write the rules' record of a new item."""
        self._begin_record(position)

    def resemble(self, position: int, templates: np.ndarray) -> None:
        """Write the vector of a new item. templates: int64 [T] positions of the items most like it"""
        view_writable(self.item_vectors)[position] = self.item_vectors[templates].mean(axis=0)

    def use_rules(self, rules: Rules) -> None:
        """Use other rules. The caller must apply all changes by `upsert` again."""
        self.rules.replace_by(rules)
        for position in self.items.find_positions(self.items.newcomers[self.items.newcomers != PAD_ID]):
            self._begin_record(position)

    def _begin_record(self, position: int) -> None:
        """Write the rules' record of a new item whose columns are not known yet."""
        item_id, config = int(self.items.padded_ids[position]), self.rules.config
        record = view_writable(self.rules.items)[position : position + 1]
        record["group"], record["cap"], record["draw_rate"] = -1 - position, NO_CAP, 1.0
        is_blocked, slot = item_id in config.blocked_ids, config.slots.get(item_id, BLOCKED)
        record["zone"] = BLOCKED if is_blocked else slot - BLOCKED
        record["blocked"], record["behind"], record["in_floor_group"] = is_blocked, NEVER if is_blocked else OVER_CAP, False

    def change_item(self, position: int, columns: Mapping[str, object]) -> None:
        """Write what changed columns of an item mean for the rules: its category, provider and price."""
        config = self.rules.config
        record = view_writable(self.rules.items)[position : position + 1]
        for role, key in enumerate(GROUPS):
            if key not in columns:
                continue
            name = get_text(columns[key])
            is_known = name in self.group_codes[role]
            record["group"][:, role] = self.group_codes[role].get(name, -1 - position)
            record["cap"][:, role] = config.find_cap(role, name) if is_known else NO_CAP
            if role == PROVIDER and not record["blocked"][0]:
                record["in_floor_group"] = config.provider_floor is not None and name in config.provider_floor.providers
        cap, price = config.price_cap, columns.get("price")
        if cap is not None and "price" in columns and not record["blocked"][0]:
            record["behind"] = ABOVE_PRICE_CAP if isinstance(price, int | float) and price > cap else OVER_CAP


@compiled
def keep_newcomers(columns, is_newcomer):
    """Put new items into the last places of each list, so that they are re-ranked too.

    columns: int64 [B, M] columns of the candidates, changed in place; is_newcomer: bool [B, C]
    """
    for row in range(len(columns)):
        last = columns.shape[1] - 1
        for column in range(is_newcomer.shape[1]):
            if not is_newcomer[row, column] or np.any(columns[row] == column):
                continue
            while last >= 0 and is_newcomer[row, columns[row, last]]:
                last -= 1
            if last >= 0:
                columns[row, last] = column
                last -= 1


@compiled
def explore_newcomers(columns, propensities, positions, first, end, blocked, user_ids, seed, share, place):
    """Put a new item at `place` of a `share` of the lists, unless one is there or earlier. A user always gets the same item.

    columns: int64 [B, K] columns of the served items, -1 = none, changed in place; positions: int64 [B, M] item positions
    first, end: new items have the positions first … end - 1; blocked: bool [n_items + 1], by the rules
    propensities: float32 [B, K], by place, as the rules state them, changed in place: at `place`, share / new items
        for a new item, and 1 - share for the item of a list that does not explore. UNKNOWN where both draws decide: from
        `place` on if the rules drew up to there, else in the places that they drew and a new item moved.
    """
    for row in range(len(columns)):
        list_columns, list_propensities, best, least, n_new = columns[row], propensities[row], -1, 2.0, 0
        for column in range(positions.shape[1]):
            position = positions[row, column]
            if first <= position < end and not blocked[position]:
                n_new += 1
                draw = draw_uniform(seed, user_ids[row], position)
                if draw < least:
                    best, least = column, draw
        if best < 0:
            continue
        stays, is_drawn = False, False
        for earlier in range(place + 1):  # a list that ends here already shows all its candidates
            stays |= list_columns[earlier] < 0 or first <= positions[row, list_columns[earlier]] < end
            is_drawn |= list_propensities[earlier] != 1.0
        if is_drawn:
            list_propensities[place:] = UNKNOWN
        if stays:
            continue
        if draw_uniform(seed, user_ids[row], EXPLORE_DRAW) >= share:
            list_propensities[place] *= 1.0 - share
            continue
        target = place
        while target < len(list_columns) - 1 and list_columns[target] != best and list_columns[target] >= 0:
            target += 1
        for later in range(target, place, -1):
            list_columns[later], list_propensities[later] = list_columns[later - 1], list_propensities[later - 1]
        list_columns[place] = best
        list_propensities[place] *= share / n_new
        is_drawn = False
        for later in range(place + 1, len(list_columns)):
            is_drawn |= later <= target and list_propensities[later] != 1.0
            if is_drawn:
                list_propensities[later] = UNKNOWN
