"""The rules as one would write them down first: one request, plain Python, a greedy walk over the list.

Slow and obvious on purpose; `test_rules.py` holds `serving/stages/rules/rules.py` against it. Reads names and ids, not codes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from serving.stages.rules.config import RulesConfig

U64 = (1 << 64) - 1


@dataclass
class Item:
    column: int
    position: int
    item_id: int
    score: float
    category: str | None
    provider: str | None
    price: float
    novelty: float


def serve(items: list[Item], config: RulesConfig, user_id: int, k: int, generation: int) -> list[int]:
    """Columns to serve, best first; shorter than k only when items run out."""
    items = [item for item in items if item.item_id not in config.blocked_items]
    slots = {pin.item_id: pin.slot for pin in config.pinned}
    pinned = sorted((item for item in items if item.item_id in slots), key=lambda item: slots[item.item_id])
    free = sorted((item for item in items if item.item_id not in slots), key=lambda item: (-item.score, item.position))

    if config.diversity:
        free = diversify(pinned, free, config.diversity, k)
    if config.exploration:
        free = explore(free, config.exploration, user_id, k - len(pinned), generation)
    kept, turned_down = cap(pinned, free, config, k - sum(slots[item.item_id] < k for item in pinned))
    if config.provider_floor:
        kept = raise_floor(kept, config.provider_floor.providers, config.provider_floor.share)
    answer = kept + turned_down
    for item in pinned:  # by rising slot, so that a later pin does not move an earlier one
        answer.insert(slots[item.item_id], item)
    return [item.column for item in answer[:k]]


def diversify(pinned: list[Item], free: list[Item], weight: float, k: int) -> list[Item]:
    place = {item.position: place for place, item in enumerate(pinned + free)}
    answer: list[Item] = []
    waiting = list(free)

    def compute_cost(item: Item) -> float:
        """Return an item's value, negated and without constants, computed like that of `diversify` (passes.py): ties stay."""
        alike = sum(item.category is not None and other.category == item.category for other in pinned + answer)
        return place[item.position] * ((1.0 - weight) / k) - weight * 0.5**alike

    while waiting:
        best = min(waiting, key=compute_cost)  # the first of equals
        waiting.remove(best)
        answer.append(best)
    return answer


def explore(free: list[Item], rule, user_id: int, slots_left: int, generation: int) -> list[Item]:
    """Draw `rule.slots` items one after another, each in proportion to exp(novelty), by the exponential race."""
    start = max(slots_left - rule.slots, 0)
    end = slots_left - rule.slots + rule.pool
    n_drawn = rule.slots - max(rule.slots - slots_left, 0)
    if end <= start or n_drawn <= 0:
        return free
    pool = free[start:end]

    def arrival(item: Item) -> float:
        rate = math.exp(rule.novelty * item.novelty)
        return -math.log(uniform(rule.seed, generation, user_id, item.position)) / rate

    drawn = sorted(pool, key=arrival)[:n_drawn]
    return free[:start] + [i for i in pool if i in drawn] + [i for i in pool if i not in drawn] + free[end:]


def uniform(seed: int, generation: int, user_id: int, position: int) -> float:
    state = 0
    for part in (seed, generation, user_id, position):
        x = ((state ^ (part & U64)) + 0x9E3779B97F4A7C15) & U64
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & U64
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & U64
        state = x ^ (x >> 31)
    return ((state >> 12) + 0.5) / 2**52


def cap(pinned: list[Item], free: list[Item], config: RulesConfig, n_free: int) -> tuple[list[Item], list[Item]]:
    """Walks down the list and takes what has room. -> (kept, turned down: over a cap, then too dear).

    Below the n_free places only what the floor may lift is taken: another item is not shown, and must use up no quota.
    """
    kept: list[Item] = []
    over: list[Item] = []
    dear: list[Item] = []
    for item in free:
        shown = pinned + kept
        alike = sum(item.category is not None and other.category == item.category for other in shown)
        same_provider = sum(item.provider is not None and other.provider == item.provider for other in shown)
        quota = None if item.category is None else config.category_caps.get(item.category, config.max_per_category)
        favoured = config.provider_floor is not None and item.provider in config.provider_floor.providers
        is_hidden = len(kept) >= n_free and not favoured
        is_over_cap = quota is not None and alike >= quota
        is_over_provider_cap = config.max_per_provider is not None and same_provider >= config.max_per_provider
        if config.price_cap is not None and item.price > config.price_cap:
            dear.append(item)
        elif is_hidden or is_over_cap or is_over_provider_cap:
            over.append(item)
        else:
            kept.append(item)
    return kept, over + dear


def raise_floor(kept: list[Item], providers: tuple[str, ...], share: float) -> list[Item]:
    answer: list[Item] = []
    waiting = list(kept)
    while waiting:
        shown = sum(item.provider in providers for item in answer)
        due = shown < math.floor(share * (len(answer) + 1) + 1e-9)
        favoured = [item for item in waiting if item.provider in providers]
        chosen = favoured[0] if due and favoured else waiting[0]
        waiting.remove(chosen)
        answer.append(chosen)
    return answer
