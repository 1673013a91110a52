"""Business rules: the typed configuration that people write, and the layout of the compiled files.

`RulesConfig` comes from TOML, JSON or keyword arguments. Every rule is off by default: without rules a repository serves
exactly the re-ranker's list. `compile_rules` (`repository/rules.py`) resolves names and ids against the catalogue and writes
two files into the rerank folder:

    rules.json       the config, for people and for the stage's settings
    rules_items.npy  [n_items + 1] of ITEM_RULES, one record per item position; the last one is the padding row

`serving/stages/rules/rules.py` opens both and needs no names.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from serving.contract.errors import ConfigError
from serving.contract.ids import stable_id

CONFIG_FILE = "rules.json"
ITEMS_FILE = "rules_items.npy"

NO_CAP = np.iinfo(np.int16).max
MOST_POOL = np.iinfo(np.int32).max  # compiled loops add it to a place in the list, as int64
BLOCKED = 1 << 20
KEPT, OVER_CAP, ABOVE_PRICE_CAP, NEVER = range(4)  # the sort order of a list after the caps
CATEGORY, PROVIDER = 0, 1  # the groups of an item, in ITEM_RULES

ITEM_RULES = np.dtype(
    [
        ("group", np.int32, (2,)),  # CATEGORY and PROVIDER; an item without one has a unique negative code
        ("cap", np.int16, (2,)),  # quota of its category and of its provider in one list
        ("draw_rate", np.float32),  # weight in the exploration draw
        ("zone", np.int32),  # sort key: pinned items (slot - BLOCKED) first, others 0, BLOCKED last
        ("blocked", np.bool_),
        ("behind", np.int8),  # its sort order when a cap drops it: OVER_CAP, ABOVE_PRICE_CAP or NEVER
        ("in_floor_group", np.bool_),
    ],
    align=True,
)


@dataclass(frozen=True)
class Pin:
    """Show this item at this slot (0 is the top)."""

    item_id: int | str
    slot: int

    def __post_init__(self) -> None:
        _check_item_id("pinned.item_id", self.item_id)
        _check_whole("pinned.slot", self.slot, at_least=0)


@dataclass(frozen=True)
class ProviderFloor:
    """Among the first p free slots, for every p, at least floor(share * p) show an item of these providers."""

    providers: tuple[str, ...]
    share: float

    def __post_init__(self) -> None:
        _check_names("provider_floor.providers", self.providers)
        object.__setattr__(self, "providers", tuple(self.providers))
        _check_number("provider_floor.share", self.share, above=0.0, at_most=1.0)


@dataclass(frozen=True)
class Exploration:
    """Draw the last `slots` of the K slots from the next `pool` items of the list instead of taking them in order.

    An item's weight in the draw is exp(novelty * unpopularity in 0…1). novelty: -10 to 10; 0 draws uniformly.
    The draw depends only on seed, generation, user and item, so a request replays exactly.
    """

    slots: int
    pool: int = 20
    novelty: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        _check_whole("exploration.slots", self.slots, at_least=1)
        _check_whole("exploration.pool", self.pool, at_least=self.slots, at_most=MOST_POOL)
        _check_number("exploration.novelty", self.novelty, at_least=-10.0, at_most=10.0)
        _check_whole("exploration.seed", self.seed, at_least=0, at_most=np.iinfo(np.int64).max)


@dataclass(frozen=True)
class RulesConfig:
    """All rules of one generation; the default changes nothing.

    Written as JSON or TOML, with pins as {item_id, slot}, and read by `from_dict`:

        diversity = 0.2
        max_per_category = 4
        pinned = [{ item_id = 22423, slot = 0 }]
        exploration = { slots = 2, pool = 20, novelty = 1.0 }

    Items are named by the shop's ids, numbers or text; where the shop's are text, 22423 is "22423". An item that
    is not in the catalogue yet follows its rule as soon as an upsert adds it.

    Where rules disagree, the earlier one wins: blocked_items, pinned, price_cap, caps (category and provider),
    provider_floor, diversity, exploration. Only blocked_items may leave a list short, where nothing else is left to
    show: every other rule relaxes when the candidates run out, caps first and price_cap last. provider_floor lifts
    only items that the caps keep, so it is not reached where better items use up the quotas.

    A pinned item is in every list while it is available, except in lists of users who have seen it, where
    filter_seen is set, and of requests that exclude it, or that name another category or other items.
    """

    blocked_items: tuple[int | str, ...] = ()  # never served
    pinned: tuple[Pin, ...] = ()  # shown at their slot, 0 at the top
    price_cap: float | None = None  # items above it come after all other candidates
    max_per_category: int | None = None  # quota of every category in one list
    category_caps: Mapping[str, int] = field(default_factory=dict)  # quota of named categories, instead of the general one
    max_per_provider: int | None = None  # quota of every provider in one list
    provider_floor: ProviderFloor | None = None  # share of the slots that show items of some providers
    diversity: float = 0.0  # weight of variety over categories, 0…1; at 0.2 the second item of a category falls by K/8 places
    exploration: Exploration | None = None  # fills the last slots at random from the next items of the list

    def __post_init__(self) -> None:
        for name in ("blocked_items", "pinned"):
            value = getattr(self, name)
            if isinstance(value, str) or not isinstance(value, Sequence):
                raise ConfigError(f"rules: {name} is {value!r}; expected a list. Write [] for none.")
            object.__setattr__(self, name, tuple(value))
        for item_id in self.blocked_items:
            _check_item_id("blocked_items", item_id)
        _check_pins(self.pinned)
        if self.price_cap is not None:
            _check_number("price_cap", self.price_cap, above=0.0)
        for name in ("max_per_category", "max_per_provider"):
            if getattr(self, name) is not None:
                _check_whole(name, getattr(self, name), at_least=1, at_most=NO_CAP - 1)
        if not isinstance(self.category_caps, Mapping):
            raise ConfigError(f'rules: category_caps is {self.category_caps!r}; expected names with caps, {{"Bags": 2}}.')
        for name, cap in self.category_caps.items():
            _check_whole(f"category_caps[{name!r}]", cap, at_least=0, at_most=NO_CAP - 1)
        _check_number("diversity", self.diversity, at_least=0.0, at_most=1.0)

    @classmethod
    def from_dict(cls, values: Mapping) -> RulesConfig:
        """Build the rules from parsed JSON or TOML. Raises ConfigError on an unknown key or a bad value."""
        _check_keys(cls, values, "rules")
        values = dict(values)
        if isinstance(values.get("pinned"), Sequence) and not isinstance(values["pinned"], str):
            values["pinned"] = tuple(_build_part(Pin, pin, "pinned") for pin in values["pinned"])
        for name, kind in (("provider_floor", ProviderFloor), ("exploration", Exploration)):
            if values.get(name) is not None:
                values[name] = _build_part(kind, values[name], name)
        return cls(**values)

    def find_cap(self, role: int, name: str | None) -> int:
        """Return the quota of a category (role CATEGORY) or provider (PROVIDER) in one list; NO_CAP for none."""
        caps, general = ((self.category_caps, self.max_per_category), ({}, self.max_per_provider))[role]
        return NO_CAP if name is None else caps.get(name, NO_CAP if general is None else general)

    @cached_property
    def blocked_ids(self) -> frozenset[int]:
        """Int64 ids of the blocked items, whether the export knew them or not.

        A number yields two ids, because it may also be a name: itself, and the id of its text.
        """
        return frozenset(wire_id for item_id in self.blocked_items for wire_id in list_wire_ids(item_id))

    @cached_property
    def slots(self) -> dict[int, int]:
        """Slots of the pinned items by int64 id, as `blocked_ids`."""
        return {wire_id: pin.slot for pin in self.pinned for wire_id in list_wire_ids(pin.item_id)}

    @classmethod
    def load(cls, path: Path) -> RulesConfig:
        """Read a JSON file. Raises ConfigError."""
        try:
            values = json.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"rules: {path} cannot be read as JSON: {error}. Correct the file, or leave the rules out."
            ) from error
        return cls.from_dict(values)


def list_wire_ids(item_id: int | str) -> list[int]:
    """Return the int64 ids that an item of a rule may have: a number may also be a name."""
    return ([] if isinstance(item_id, str) else [item_id]) + [stable_id(str(item_id))]


def _check_pins(pins: tuple[Pin, ...]) -> None:
    for name in ("item_id", "slot"):
        values = [str(getattr(pin, name)) for pin in pins]  # as text: 5 and "5" may be one item
        twice = sorted({value for value in values if values.count(value) > 1})
        if twice:
            raise ConfigError(
                f"rules: pinned has {name} {twice[0]} more than once; each item and each slot can be pinned once."
            )


def _build_part(kind: type, values: Any, key: str) -> Any:
    _check_keys(kind, values, f"rules: {key}")
    try:
        return kind(**values)
    except TypeError as error:
        raise ConfigError(f"rules: {key} is {values!r}: {error}. Expected {_list_keys(kind)}.") from error


def _check_keys(kind: type, values: object, place: str) -> None:
    if not isinstance(values, Mapping):
        raise ConfigError(f"{place} is {values!r}; expected an object with {_list_keys(kind)}.")
    for name in values:
        if name not in {f.name for f in fields(kind)}:
            raise ConfigError(f"{place} has no setting {name!r}; expected one of {_list_keys(kind)}. Correct or remove it.")


def _list_keys(kind: type) -> str:
    return ", ".join(f.name for f in fields(kind))


def _check_names(key: str, names: Any) -> None:
    listed = isinstance(names, Sequence) and not isinstance(names, str)
    if not listed or not names or not all(isinstance(name, str) for name in names):
        raise ConfigError(f'rules: {key} is {names!r}; expected a list of names such as ["brand"].')


def _check_item_id(key: str, value: object) -> None:
    if not isinstance(value, str):
        _check_whole(key, value, at_least=0, at_most=np.iinfo(np.int64).max)


def _check_whole(key: str, value: Any, *, at_least: int, at_most: int | None = None) -> None:
    whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
    if not whole or value < at_least or (at_most is not None and value > at_most):
        limits = f"of at least {at_least}" + (f" and at most {at_most}" if at_most is not None else "")
        raise ConfigError(f"rules: {key} is {value!r}; expected a whole number {limits}. Correct it, or leave the rule out.")


def _check_number(
    key: str, value: Any, *, at_least: float | None = None, above: float | None = None, at_most: float | None = None
) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= np.finfo(np.float64).max
    fits = number and (
        (at_least is None or value >= at_least) and (above is None or value > above) and (at_most is None or value <= at_most)
    )
    if not fits:
        bounds = ((at_least, "at least"), (above, "above"), (at_most, "at most"))
        limits = " and ".join(f"{word} {bound}" for bound, word in bounds if bound is not None)
        raise ConfigError(f"rules: {key} is {value!r}; expected a number {limits}. Correct it, or leave the rule out.")
