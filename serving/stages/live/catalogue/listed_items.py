"""Keep the arrays of the re-ranker and the rules up to date with new and changed items, and explore new ones."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from serving.contract.artifacts import view_writable
from serving.contract.tensors import PAD_ID
from serving.loops.compiled import compiled
from serving.stages.features.ids import ItemIndex
from serving.stages.live.content import GROUPS, Content, get_text
from serving.stages.rules.config import ABOVE_PRICE_CAP, BLOCKED, ITEM_RULES, NEVER, NO_CAP, OVER_CAP, PROVIDER
from serving.stages.rules.passes import ROUNDING, draw_uniform
from serving.stages.rules.propensities import UNKNOWN
from serving.stages.rules.rules import Rules

NO_PRICE, LARGEST_PRICE = -np.inf, float(np.finfo(np.float64).max)
EXPLORE_DRAW = 0  # argument in place of an item position, for the draw that decides whether a list explores


@dataclass
class ListedItems:
    """The re-ranker's arrays with one row per item.

    item_vectors: float32 [n_items + 1, D]
    group_codes: those of the exported categories and of the exported providers, by name, the same in all versions of the rules
    groups: int32 [n_items + 1, roles], codes that `upsert` set, where is_regrouped, bool of that shape; other rules keep them
    prices: float64 [n_items + 1] that it set, NaN where it set none
    """

    content: Content
    item_vectors: np.ndarray
    rules: Rules
    items: ItemIndex
    group_codes: tuple[Mapping[str | None, int], ...] = field(init=False)
    groups: np.ndarray = field(init=False)
    is_regrouped: np.ndarray = field(init=False)
    prices: np.ndarray = field(init=False)
    _caps: list[np.ndarray] = field(init=False)  # int16 by code of each role, the last one for names that the export lacks
    _in_floor: np.ndarray = field(init=False)  # bool, likewise for providers

    def __post_init__(self) -> None:
        groups = self.rules.items["group"]
        codes = (self.content.map_groups(role, groups[:, role]) for role in range(len(GROUPS)))
        # rules that were compiled without groups have a negative code for each item alone
        self.group_codes = tuple({name: code for name, code in codes_by_name.items() if code >= 0} for codes_by_name in codes)
        self.groups, self.is_regrouped = np.zeros(groups.shape, np.int32), np.zeros(groups.shape, bool)
        self.prices = np.full(len(groups), np.nan)
        self._list_limits()

    def add_item(self, position: int) -> None:
        """Write the rules' record of a new item."""
        self._begin_records(np.array([position]))

    def resemble(self, position: int, templates: np.ndarray) -> None:
        """Write the vector of a new item. templates: int64 [T] positions of the items most like it"""
        view_writable(self.item_vectors)[position] = self.item_vectors[templates].mean(axis=0)

    def use_rules(self, rules: Rules) -> None:
        """Use other rules, also for what `upsert` has changed."""
        self.rules.replace_by(rules)
        self._list_limits()
        self._begin_records(self.items.find_positions(self.items.newcomers[self.items.newcomers != PAD_ID]))
        self._write_changes(np.flatnonzero(self.is_regrouped.any(axis=1) | ~np.isnan(self.prices)))

    def change_item(self, position: int, columns: Mapping[str, object]) -> None:
        """Write what changed columns of an item mean for the rules: its category, provider and price."""
        record, cap = view_writable(self.rules.items)[position : position + 1], self.rules.config.price_cap
        for role, key in enumerate(GROUPS):
            if key not in columns:
                continue
            code = self.group_codes[role].get(get_text(columns[key]), -1 - position)
            self.groups[position, role], self.is_regrouped[position, role] = code, True
            record["group"][:, role], record["cap"][:, role] = code, self._caps[role][max(code, -1)]
            if role == PROVIDER and not record["blocked"][0]:
                record["in_floor_group"] = self._in_floor[max(code, -1)]
        if "price" in columns:
            price = columns["price"]
            self.prices[position] = min(price, LARGEST_PRICE) if isinstance(price, int | float) else NO_PRICE
            if cap is not None and not record["blocked"][0]:
                record["behind"] = ABOVE_PRICE_CAP if self.prices[position] > cap else OVER_CAP

    def _list_limits(self) -> None:
        """List what the rules in use say of each category and provider."""
        config, floor = self.rules.config, self.rules.config.provider_floor
        self._caps, self._in_floor = [], np.zeros(max(self.group_codes[PROVIDER].values(), default=-1) + 2, bool)
        for role, codes in enumerate(self.group_codes):
            self._caps.append(np.full(max(codes.values(), default=-1) + 2, NO_CAP, np.int16))
            for name, code in codes.items():
                self._caps[role][code] = config.find_cap(role, name)
        for name in floor.providers if floor else ():
            self._in_floor[self.group_codes[PROVIDER].get(name, -1)] = name in self.group_codes[PROVIDER]

    def _begin_records(self, positions: np.ndarray) -> None:
        """Write the rules' records of new items, int64 [N], whose columns are not known yet."""
        config, item_ids = self.rules.config, self.items.padded_ids[positions].tolist()
        records, blank = view_writable(self.rules.items), np.zeros(len(positions), ITEM_RULES)
        is_blocked = np.array([item_id in config.blocked_ids for item_id in item_ids], bool)
        slots = np.array([config.slots.get(item_id, BLOCKED) for item_id in item_ids], np.int32)
        blank["group"], blank["cap"], blank["draw_rate"] = (-1 - positions)[:, None], NO_CAP, 1.0
        blank["zone"], blank["blocked"] = np.where(is_blocked, BLOCKED, slots - BLOCKED), is_blocked
        blank["behind"] = np.where(is_blocked, NEVER, OVER_CAP)
        records[positions] = blank

    def _write_changes(self, positions: np.ndarray) -> None:
        """Write to the records of items, int64 [N], what `change_item` has learned of them: all at once, in milliseconds."""
        records, cap = view_writable(self.rules.items), self.rules.config.price_cap
        for role in range(len(GROUPS)):
            changed = positions[self.is_regrouped[positions, role]]
            codes = self.groups[changed, role]
            records["group"][changed, role], records["cap"][changed, role] = codes, self._caps[role][np.maximum(codes, -1)]
            if role == PROVIDER:
                records["in_floor_group"][changed] = self._in_floor[np.maximum(codes, -1)] & ~records["blocked"][changed]
        if cap is not None:
            priced = positions[~np.isnan(self.prices[positions]) & ~records["blocked"][positions]]
            records["behind"][priced] = np.where(self.prices[priced] > cap, ABOVE_PRICE_CAP, OVER_CAP)


@compiled
def keep_candidates(columns, is_kept):
    """Put some candidates into the last places of each list, if it lacks them, so that they are re-ranked too.

    columns: int64 [B, M] columns of the candidates, changed in place; is_kept: bool [B, C]
    """
    for row in range(len(columns)):
        last = columns.shape[1] - 1
        for column in range(is_kept.shape[1]):
            if not is_kept[row, column] or np.any(columns[row] == column):
                continue
            while last >= 0 and is_kept[row, columns[row, last]]:
                last -= 1
            if last >= 0:
                columns[row, last] = column


@compiled
def explore_newcomers(columns, propensities, positions, first, end, items, floor_share, user_ids, seed, share, place):
    """Put a new item at `place` of a `share` of the lists, unless one is there or earlier. A user always gets the same item.

    The rules come first: pinned items stay where they are, and only new items that `may_be_shown` are drawn.

    columns: int64 [B, K] columns of the served items, -1 = none, changed in place; positions: int64 [B, M] item positions
    first, end: new items have the positions first … end - 1; items: ITEM_RULES [n_items + 1]; floor_share: of providers
    propensities: float32 [B, K], by place, as the rules state them, changed in place: at `place`, share / new items
        for a new item, and 1 - share for the item of a list that does not explore. UNKNOWN where both draws decide: from
        `place` on if the rules drew up to there, else in the places that they drew if a new item moved them, or is from there.
    """
    for row in range(len(columns)):
        list_columns, list_propensities, best, least, n_new = columns[row], propensities[row], -1, 2.0, 0
        for column in range(positions.shape[1]):
            position = positions[row, column]
            if first <= position < end and may_be_shown(column, list_columns, positions[row], items, floor_share, place):
                n_new += 1
                draw = draw_uniform(seed, user_ids[row], position)
                if draw < least:
                    best, least = column, draw
        if best < 0:
            continue
        stays = drawn_before = False
        for earlier in range(place + 1):  # a list that ends here already shows all its candidates
            stays |= list_columns[earlier] < 0 or first <= positions[row, list_columns[earlier]] < end
            drawn_before |= list_propensities[earlier] != 1.0
        if drawn_before:
            list_propensities[place:] = UNKNOWN
        if stays:
            continue
        if draw_uniform(seed, user_ids[row], EXPLORE_DRAW) >= share:
            list_propensities[place] *= 1.0 - share
            continue
        later = target = find_target(best, list_columns, positions[row], items, place)
        for moved_place in range(place + 1, target + 1):
            if list_propensities[moved_place] != 1.0:
                list_propensities[moved_place:] = UNKNOWN
                break
        while later > place:
            earlier = later - 1
            while is_pinned(list_columns[earlier], positions[row], items):  # `place` itself is free
                earlier -= 1
            list_columns[later], list_propensities[later] = list_columns[earlier], list_propensities[earlier]
            later = earlier
        list_columns[place] = best
        list_propensities[place] *= share / n_new


@compiled
def is_pinned(column, positions, items):
    """Return whether the rules pin the item of a column, -1 = none. positions: int64 [M]"""
    return column >= 0 and items[positions[column]].zone < 0


@compiled
def find_target(column, list_columns, positions, items, place):
    """Return the place that a new item leaves empty, or fills, when it moves to `place`: its own, or the last free one."""
    target = place
    for later in range(place + 1, len(list_columns)):
        if list_columns[target] == column:  # as in every list with empty places: it shows all candidates
            break
        if not is_pinned(list_columns[later], positions, items):
            target = later
    return target


@compiled
def may_be_shown(column, list_columns, positions, items, floor_share, place):
    """Return whether blocked items, pins, price cap, caps and provider floor let a new item be shown at `place` of a list.

    column: of the new item; list_columns: int64 [K], the list; positions: int64 [M]
    """
    item = items[positions[column]]
    if item.blocked or item.zone != 0 or item.behind == ABOVE_PRICE_CAP:
        return False
    for kind in range(len(item.group)):
        alike = 0
        for other in list_columns:
            alike += other >= 0 and other != column and items[positions[other]].group[kind] == item.group[kind]
        if alike >= item.cap[kind]:
            return False
    if floor_share <= 0.0 or item.in_floor_group:
        return True
    target = find_target(column, list_columns, positions, items, place)
    n_free = n_favoured = 0
    for later in range(target + 1):
        if is_pinned(list_columns[later], positions, items):
            continue
        favoured = items[positions[list_columns[later]]].in_floor_group
        n_free += 1
        if later >= place and favoured and n_favoured < math.floor(floor_share * n_free + ROUNDING):
            return False  # the item moves one place back, and the places up to here would have one too few
        n_favoured += favoured
    return True
