"""Compile the shop's rules against its catalogue: names and ids become per-item arrays, which the rerank stage reads."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np

from serving.contract.errors import ConfigError
from serving.contract.tensors import PAD_ID
from serving.stages.rules.config import (
    ABOVE_PRICE_CAP,
    BLOCKED,
    CATEGORY,
    CONFIG_FILE,
    ITEM_RULES,
    ITEMS_FILE,
    NEVER,
    NO_CAP,
    OVER_CAP,
    PROVIDER,
    RulesConfig,
)


def compile_rules(
    folder: Path,
    config: RulesConfig,
    *,
    item_ids: np.ndarray,
    category: Sequence[str | None],
    provider: Sequence[str | None],
    price: np.ndarray | None,
    popularity: np.ndarray,
    items_returned: int,
    item_names: Mapping[str, int] | None = None,
) -> None:
    """Resolve `config` against the catalogue and write rules.json and rules_items.npy into `folder`.

    item_ids: int64 [n_items] ascending; category, provider: n_items names, None where unknown
    price: float32 [n_items], NaN where unknown (never above the price cap); None when the data has no prices
    popularity: [n_items], larger is more popular; items_returned: K
    item_names: name -> id, where the shop's item ids are text; None where they are numbers
    Raises ConfigError when the config names something that this catalogue does not have.
    """
    misfits = find_misfits(
        config, category=category, provider=provider, price=price, items_returned=items_returned, item_names=item_names
    )
    for message in misfits:
        raise ConfigError(message)
    n_items = len(item_ids)
    records = np.zeros(n_items + 1, ITEM_RULES)
    records["cap"] = NO_CAP
    records["draw_rate"] = 1.0
    items = records[:n_items]
    items["group"][:, CATEGORY] = _encode_names(category)
    items["group"][:, PROVIDER] = _encode_names(provider)
    items["cap"][:, CATEGORY] = [config.find_cap(CATEGORY, name) for name in category]
    items["cap"][:, PROVIDER] = [config.find_cap(PROVIDER, name) for name in provider]
    if config.exploration:
        items["draw_rate"] = np.exp(_compute_novelty(popularity) * config.exploration.novelty)
    items["blocked"] = np.isin(item_ids, [_find_wire_id(item_id, item_names) for item_id in config.blocked_items])
    items["behind"] = (
        OVER_CAP if config.price_cap is None or price is None else np.where(price > config.price_cap, ABOVE_PRICE_CAP, OVER_CAP)
    )
    if config.provider_floor:
        floor_providers = set(config.provider_floor.providers)
        items["in_floor_group"] = [name in floor_providers for name in provider] & ~items["blocked"]
    for pin in config.pinned:
        items["zone"][item_ids == _find_wire_id(pin.item_id, item_names)] = pin.slot - BLOCKED
    records["blocked"][n_items] = True  # padding is never served
    records["zone"][records["blocked"]] = BLOCKED  # a blocked item is not served even when it is pinned
    records["behind"][records["blocked"]] = NEVER

    folder.mkdir(parents=True, exist_ok=True)
    np.save(folder / ITEMS_FILE, records, allow_pickle=False)
    text = json.dumps(asdict(config), indent=2, ensure_ascii=False)
    (folder / CONFIG_FILE).write_text(text + "\n", encoding="utf-8")


def find_misfits(
    config: RulesConfig,
    *,
    category: Sequence[str | None],
    provider: Sequence[str | None],
    price: np.ndarray | None,
    items_returned: int,
    item_names: Mapping[str, int] | None = None,
    **_: object,
) -> Iterator[str]:
    """Yield a message for everything that this catalogue or this list length does not have. Arguments as in `compile_rules`."""
    for pin in config.pinned:
        if pin.slot >= items_returned:
            yield (
                f"rules: item {pin.item_id} is pinned to slot {pin.slot}; lists have slots 0 to {items_returned - 1}. "
                "Choose a slot in that range, or export with a larger [pipeline] items_returned."
            )
    if config.exploration and config.exploration.slots > items_returned:
        yield f"rules: exploration.slots is {config.exploration.slots}, but a list has {items_returned} slots. Give it fewer."
    if config.price_cap is not None and price is None:
        yield (
            "rules: price_cap is set, but the items have no price. "
            'Name its column in dataset.toml ([items] price = "…"), or leave price_cap out.'
        )
    without_category = all(name is None for name in category)
    without_provider = all(name is None for name in provider)
    for key, role, is_void in (
        ("max_per_category", "category", without_category),
        ("diversity", "category", without_category),
        ("max_per_provider", "provider", without_provider),
    ):
        if is_void and getattr(config, key):
            yield (
                f"rules: {key} is set, but no item has a {role}. "
                f'Name its column in dataset.toml ([items] {role} = "…"), or leave {key} out.'
            )
    named_items = [("blocked_items", item_id) for item_id in config.blocked_items]
    for key, item_id in (*named_items, *(("pinned", pin.item_id) for pin in config.pinned)):
        if item_names is None and isinstance(item_id, str):
            yield f"rules: {key} names item {item_id!r}, but the ids of this shop's items are numbers. Give the number."
    yield from _find_unknown("category_caps", config.category_caps, category)
    providers = config.provider_floor.providers if config.provider_floor else ()
    yield from _find_unknown("provider_floor.providers", providers, provider)


def _find_wire_id(item_id: int | str, item_names: Mapping[str, int] | None) -> int:
    """Return the int64 id of an item that `find_misfits` accepted; PAD_ID, which no item has, for an unknown name.

    Where the shop's ids are text, a number is looked up as a name first, because people write 22423 for "22423". A number that
    is not a name is the int64 id itself, as in the client's catalogue.
    """
    if item_names is not None:
        return item_names.get(str(item_id), PAD_ID if isinstance(item_id, str) else int(item_id))
    return int(item_id)


def _encode_names(names: Sequence[str | None]) -> np.ndarray:
    """Return a code per item, int32 [n]: the rank of its name in sorted order, or -1 - its position if it has no name."""
    codes = {name: code for code, name in enumerate(sorted({name for name in names if name is not None}))}
    return np.array([codes[name] if name is not None else -1 - item for item, name in enumerate(names)], np.int32)


def _compute_novelty(popularity: np.ndarray) -> np.ndarray:
    """Return the share of items that are strictly more popular, float64 [n] in 0 … 1."""
    by_popularity = np.sort(np.asarray(popularity, np.float64))
    more_popular = len(by_popularity) - np.searchsorted(by_popularity, popularity, side="right")
    return more_popular / max(len(by_popularity) - 1, 1)


def _find_unknown(key: str, wanted_names: Iterable[str], present: Sequence[str | None]) -> Iterator[str]:
    known_names = {name for name in present if name is not None}
    for name in wanted_names:
        if name not in known_names:
            close = difflib.get_close_matches(name, known_names, n=3)
            hint = f"Did you mean {', '.join(map(repr, close))}?" if close else f"The catalogue has {len(known_names)} others."
            yield f"rules: {key} names {name!r}, which no item has. {hint}"


def insert_rows(path: Path, count: int) -> None:
    """Append `count` copies of its last row to the array in a .npy file."""
    array = np.load(path)
    longer = np.zeros((len(array) + count, *array.shape[1:]), array.dtype)  # so that the gaps of records are 0 in every export
    longer[: len(array)], longer[len(array) :] = array, array[-1]
    np.save(path, longer)
