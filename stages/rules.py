"""Business rules over the re-ranked candidates: a handful of passes over an ordered list, whole batch at once.

    order by score ─▶ diversity ─▶ exploration ─▶ caps ─▶ provider floor ─▶ pins to their slots ─▶ first K

Each pass reorders what the one before left, so a later pass has the last word; pinned items wait in front of the list
and blocked ones behind it from the start. No pass walks the list slot by slot: each is the closed form of the greedy
walk that one would write down first, and that `tests/unit/rules_oracle.py` does.

Pinned items are only moved when they are among the candidates: retrieval has already dropped what the caller excluded,
and a pin must not bring it back. Equal scores go to the lower item position, whatever order the candidates came in.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from stages.errors import ArtifactError, ConfigError
from stages.rules_config import CONFIG_FILE, ITEM_RULES, ITEMS_FILE, NOT_PINNED, RulesConfig

_BACK = 1 << 20  # sort keys: pinned items at slot - _BACK, others from 0, blocked items and padding at _BACK
_CAPPED, _DEAR = 1, 2  # how far behind the items that keep the caps
_ROUNDING = 1e-9  # a share times a count may come out this little off a whole number


@dataclass
class _Lists:
    """B lists in their present order: pinned items first, then the rest, then what must not be served."""

    items: np.ndarray  # ITEM_RULES [B, W]
    position: np.ndarray  # i8 [B, W] item position, -1 for padding
    column: np.ndarray  # i8 [B, W] where the candidate stood in the caller's arrays
    score: np.ndarray  # f8 [B, W]
    n_pinned: np.ndarray  # i8 [B, 1]
    n_kept: np.ndarray  # i8 [B, 1] pinned items and those that keep the caps

    def reorder(self, order: np.ndarray) -> None:
        """order: [B, W] which present place comes first, second, …"""
        batch, width = order.shape
        flat = order + np.arange(0, batch * width, width)[:, None]
        for name in ("items", "position", "column", "score"):
            setattr(self, name, getattr(self, name).reshape(-1).take(flat))


class Rules:
    """The rules of one generation. Nothing changes after construction, so threads may share it."""

    def __init__(self, config: RulesConfig, items: np.ndarray, generation: int = 0) -> None:
        """items: ITEM_RULES [n_items + 1], the padding row last; generation: part of the exploration's seed."""
        self.config = config
        self._items = items
        self._min_width = 1 + max((pin.slot for pin in config.pinned), default=-1)
        self._capped = any((config.max_per_category, config.category_caps, config.max_per_provider, config.price_cap))
        self._seed = (config.exploration.seed if config.exploration else 0, generation)

    @classmethod
    def load(cls, folder: Path, generation: int = 0) -> Rules:
        """Opens what `compile_rules` wrote into the rerank folder. Raises ArtifactError."""
        folder = Path(folder)
        try:
            config = RulesConfig.load(folder / CONFIG_FILE)
            items = np.load(folder / ITEMS_FILE, mmap_mode="r", allow_pickle=False)
        except (ConfigError, OSError, ValueError) as error:
            raise ArtifactError(f"the rules in {folder} cannot be loaded: {error} Export the repository again.") from error
        if items.dtype != ITEM_RULES or items.ndim != 1 or len(items) == 0:
            raise ArtifactError(
                f"{folder / ITEMS_FILE} holds {items.dtype} {items.shape}; expected one ITEM_RULES record per item. "
                "It comes from another version of this project: export the repository again."
            )
        return cls(config, items.view(np.ndarray), generation)

    @property
    def n_items(self) -> int:
        """How many items the rules were compiled for: item positions are below."""
        return len(self._items) - 1

    def apply(self, item_position: np.ndarray, scores: np.ndarray, user_id: np.ndarray, k: int) -> np.ndarray:
        """Chooses and orders what is served.

        item_position: i8 [B, M] rows of the per-item arrays, -1 for padding; no item twice in a row
        scores:        f4 [B, M] larger is better; a score that is not finite counts as the worst
        user_id:       i8 [B] part of the exploration's seed
        k:             items to serve
        ->             i8 [B, k] columns of the candidates, best first, -1 after the last
        """
        config = self.config
        lists = self._sorted_lists(item_position, scores, k)
        if config.diversity:
            _diversify(lists, config.diversity, k)
        if config.exploration:
            self._explore(lists, user_id, k)
        if self._capped:
            _cap(lists, config.max_per_provider)
        if config.provider_floor:
            _raise_floor(lists, config.provider_floor.share)
        if config.pinned:
            _place_pins(lists)
        return np.where(lists.items["blocked"], -1, lists.column)[:, :k]

    def _sorted_lists(self, item_position: np.ndarray, scores: np.ndarray, k: int) -> _Lists:
        """Pinned items by slot, then all others by falling score, then blocked ones and padding."""
        batch, n_candidates = item_position.shape
        width = max(n_candidates, k, self._min_width)
        if width > n_candidates:
            item_position = np.pad(item_position, ((0, 0), (0, width - n_candidates)), constant_values=-1)
            scores = np.pad(scores, ((0, 0), (0, width - n_candidates)))
        items = self._items.take(item_position, mode="wrap")  # -1 is the padding row
        score = np.where(np.isfinite(scores), scores, np.finfo(np.float32).min).astype(np.float64)
        slot = items["pinned_slot"].astype(np.int64)
        pinned = (slot != NOT_PINNED) & ~items["blocked"]
        place = np.where(pinned, slot - _BACK, items["blocked"] * _BACK)
        column = np.broadcast_to(np.arange(width), (batch, width))
        n_pinned = pinned.sum(axis=1, keepdims=True)
        lists = _Lists(items, item_position, column, score, n_pinned, np.full((batch, 1), width))
        lists.reorder(np.lexsort((item_position, -score, place)))
        return lists

    def _explore(self, lists: _Lists, user_id: np.ndarray, k: int) -> None:
        """Draws the last slots from the items that stand next, without replacement (Gumbel top-n).

        Adding Gumbel noise to log-weights and taking the largest n is a draw of n in proportion to the weights.
        Drawn items keep their order, and so do those left behind.
        """
        rule = self.config.exploration
        window = slice(k - rule.slots, k - rule.slots + rule.pool)
        position, items = lists.position[:, window], lists.items[:, window]
        noise = -np.log(-np.log(uniform(self._seed, user_id, position)))
        key = items["novelty"] * rule.novelty + noise
        in_front = np.arange(lists.position.shape[1])[window] < lists.n_pinned
        key = np.where(in_front, np.inf, np.where(items["blocked"], -np.inf, key))
        drawn = np.argsort(-key, axis=1, kind="stable")[:, : rule.slots]
        left_behind = np.ones(key.shape, bool)
        np.put_along_axis(left_behind, drawn, False, axis=1)
        order = np.tile(np.arange(lists.position.shape[1]), (len(position), 1))
        order[:, window] = k - rule.slots + np.argsort(left_behind, axis=1, kind="stable")
        lists.reorder(order)


def _diversify(lists: _Lists, weight: float, k: int) -> None:
    """Maximal marginal relevance over categories: each further item of a category is worth less.

    value = (1 - weight) * relevance - weight * (1 - 0.5 ** items of its category before it)

    relevance is 1 for the best and 0 for the worst of the first k, -1 at the lowest, whatever the scale of the scores.
    Within a category values only fall, so always taking the largest next value is the same as sorting by value.
    """
    first_k = np.where(lists.items["blocked"][:, :k], np.nan, lists.score[:, :k])
    best = np.fmax.reduce(first_k, axis=1, keepdims=True)
    span = best - np.fmin.reduce(first_k, axis=1, keepdims=True)
    span = np.where(span > 0, span, 1.0)  # also where nothing may be served and both are NaN
    relevance = np.maximum(1.0 - (best - lists.score) / span, -1.0)
    seen_before = _same_earlier(lists.items["category"]).sum(axis=2)
    value = (1.0 - weight) * relevance - weight * (1.0 - 0.5**seen_before)
    column = np.arange(value.shape[1])
    value = np.where(column < lists.n_pinned, np.inf, np.where(lists.items["blocked"], -np.inf, value))
    lists.reorder(np.argsort(-value, axis=1, kind="stable"))


def _cap(lists: _Lists, max_per_provider: int | None) -> None:
    """Moves items whose category or provider is full behind the rest, and items over the price cap behind those.

    An item is kept when fewer than its quota of kept items of its category and provider stand before it. The rule
    refers to itself, but only backwards: iterating from "all kept" settles one more place at least each time, and
    all of them after two or three.
    """
    items = lists.items
    same_category, same_provider = _same_earlier(items["category"]), _same_earlier(items["provider"])
    category_cap = items["category_cap"]
    provider_cap = np.inf if max_per_provider is None else max_per_provider
    pinned = np.arange(items.shape[1]) < lists.n_pinned
    eligible = ~(items["blocked"] | items["dear"]) | pinned
    kept = eligible
    while True:
        counted = kept[:, :, None].astype(np.float32)
        room = ((same_category @ counted)[:, :, 0] < category_cap) & ((same_provider @ counted)[:, :, 0] < provider_cap)
        settled, kept = kept, (eligible & room) | pinned
        if np.array_equal(kept, settled):
            break
    behind = np.where(items["blocked"], _BACK, np.where(items["dear"], _DEAR, _CAPPED))
    lists.n_kept = kept.sum(axis=1, keepdims=True)
    lists.reorder(np.argsort(np.where(kept, 0, behind), axis=1, kind="stable"))


def _raise_floor(lists: _Lists, share: float) -> None:
    """Lifts items of the favoured providers so that every first p free slots show floor(share * p) of them.

    The j-th such item may stand no later than free slot ceil(j / share); it moves there if it stands later, and the
    others close up. Only items that keep the caps are lifted: the floor never breaks a cap.
    """
    width = lists.items.shape[1]
    column = np.arange(width)
    member = lists.items["in_floor_group"] & (column >= lists.n_pinned) & (column < lists.n_kept)
    member &= ~lists.items["blocked"]
    deadline = np.ceil(np.arange(1, width + 1) / share - _ROUNDING).astype(np.int64) - 1
    nth = np.cumsum(member, axis=1) - 1
    latest = lists.n_pinned + deadline[np.maximum(nth, 0)]
    _move(lists, member, np.minimum(column, latest))


def _place_pins(lists: _Lists) -> None:
    """Puts the pinned items, so far in front by rising slot, at their slots; a short list takes them at its end."""
    member = np.arange(lists.items.shape[1]) < lists.n_pinned
    _move(lists, member, lists.items["pinned_slot"])
    lists.reorder(np.argsort(lists.items["blocked"], axis=1, kind="stable"))


def _move(lists: _Lists, member: np.ndarray, target: np.ndarray) -> None:
    """Moves members to their target places, rising within a row, and fills the places left with the others in order."""
    rows, columns = np.nonzero(member)
    taken = np.zeros(member.shape, bool)
    taken[rows, target[rows, columns]] = True
    order = np.empty(member.shape, np.int64)
    order[taken] = columns
    order[~taken] = np.nonzero(~member)[1]
    lists.reorder(order)


def _same_earlier(code: np.ndarray) -> np.ndarray:
    """f4 [B, W, W]: 1 where place j stands before place i and has its code."""
    return ((code[:, :, None] == code[:, None, :]) & _earlier(code.shape[1])).astype(np.float32)


@lru_cache(maxsize=8)
def _earlier(width: int) -> np.ndarray:
    """bool [width, width]: True where column j < row i."""
    return np.tri(width, k=-1, dtype=bool)


def uniform(seed: tuple[int, int], user_id: np.ndarray, position: np.ndarray) -> np.ndarray:
    """f8 [B, W] in (0, 1) by hashing (seed, generation, user, item position): no state, so any request replays exactly."""
    state = np.uint64(0)
    for part in (np.uint64(seed[0]), np.uint64(seed[1]), user_id.astype(np.uint64)[:, None], position.astype(np.uint64)):
        state = _splitmix64(np.atleast_1d(state ^ part))
    return ((state >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52  # 52 bits: the half still fits, 1.0 never comes


def _splitmix64(x: np.ndarray) -> np.ndarray:
    """The finaliser of SplitMix64 (Steele, Lea, Flood 2014): every input bit reaches every output bit."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
