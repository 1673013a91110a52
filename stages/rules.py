"""Business rules over the re-ranked candidates: a handful of passes over an ordered list, whole batch at once.

    order by score ─▶ diversity ─▶ exploration ─▶ caps ─▶ provider floor ─▶ pins to their slots ─▶ first K

Each pass reorders what the one before left, so a later pass has the last word; pinned items wait in front of the list
and blocked ones behind it from the start. Each pass but the caps is the closed form of the greedy walk that one would
write down first, and that `tests/unit/rules_oracle.py` does.

Pinned items are only moved when they are among the candidates: retrieval has already dropped what the caller excluded,
and a pin must not bring it back. Equal scores go to the lower item position, whatever order the candidates came in.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from stages.errors import ArtifactError, ConfigError
from stages.rules_config import BLOCKED, CATEGORY, CONFIG_FILE, ITEM_RULES, ITEMS_FILE, KEPT, OVER_CAP, PROVIDER, RulesConfig

_ROUNDING = 1e-9  # a share times a count may come out this little off a whole number


class _Lists:
    """B lists in their present order: pinned items first, then the rest, then what must not be served."""

    def __init__(self, items: np.ndarray, order: np.ndarray) -> None:
        """items: ITEM_RULES [B, W] in the caller's order; order: i8 [B, W] its columns."""
        batch, self.width = order.shape
        self._row_start = np.arange(0, batch * self.width, self.width)[:, None]
        self.place = np.arange(self.width)
        self.items = items.reshape(-1).take(self.flat(order))
        self.column = order  # i8 [B, W] where the candidate stood at the caller's
        self.n_pinned = (items["zone"] < 0).sum(axis=1, keepdims=True)  # i8 [B, 1]
        self.n_kept = self.width  # i8 [B, 1] once caps are applied: pinned items and those with room

    def flat(self, order: np.ndarray) -> np.ndarray:
        """Columns [B, n] as indices into a flattened [B, W] array, ready for `take`."""
        return order + self._row_start

    def reorder(self, order: np.ndarray) -> None:
        """order: i8 [B, W] which present place comes first, second, …"""
        flat = self.flat(order)
        self.items = self.items.reshape(-1).take(flat)
        self.column = self.column.reshape(-1).take(flat)


class Rules:
    """The rules of one generation. Nothing changes after construction, so threads may share it."""

    def __init__(self, config: RulesConfig, items: np.ndarray, generation: int = 0) -> None:
        """items: ITEM_RULES [n_items + 1], the padding row last; generation: part of the exploration's seed."""
        self.config = config
        self._items = items
        self._min_width = 1 + max((pin.slot for pin in config.pinned), default=-1)
        self._capped = any((config.max_per_category, config.category_caps, config.max_per_provider, config.price_cap))
        self._seed = hashed_seed(config.exploration.seed, generation) if config.exploration else None

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

        item_position: i8 [B, M] rows of the per-item arrays, -1 or n_items for padding; no item twice in a list
        scores:        f4 [B, M] larger is better; NaN counts as the worst
        user_id:       i8 [B] part of the exploration's seed
        k:             items to serve
        ->             i8 [B, k] columns of the candidates, best first, -1 after the last
        """
        config = self.config
        item_position, scores = self._widened(item_position, scores, k)
        items = self._items.take(item_position)  # -1 is the padding row, the last
        lists = _Lists(items, np.lexsort((item_position, -scores, items["zone"])))
        if config.diversity:
            _diversify(lists, config.diversity, k)
        if config.exploration:
            self._explore(lists, item_position, user_id, k)
        if self._capped:
            _cap(lists, k, n_favoured=math.ceil(config.provider_floor.share * k) if config.provider_floor else 0)
        if config.provider_floor:
            _raise_floor(lists, config.provider_floor.share)
        if config.pinned:
            _place_pins(lists)
        return np.where(lists.items["blocked"][:, :k], -1, lists.column[:, :k])

    def _widened(self, item_position: np.ndarray, scores: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """Both padded where they are too narrow to hold k items and every pinned slot."""
        missing = max(k, self._min_width) - item_position.shape[1]
        if missing <= 0:
            return item_position, scores
        padding = ((0, 0), (0, missing))
        return np.pad(item_position, padding, constant_values=-1), np.pad(scores, padding)

    def _explore(self, lists: _Lists, item_position: np.ndarray, user_id: np.ndarray, k: int) -> None:
        """Draws the last slots from the items that stand next, without replacement, by the exponential race.

        An item arrives after -log(u) / rate; the first n to arrive are a draw of n in proportion to the rates.
        Drawn items keep their order, and so do those left behind.
        """
        rule = self.config.exploration
        window = slice(k - rule.slots, k - rule.slots + rule.pool)
        items = lists.items[:, window]
        position = item_position.take(lists.flat(lists.column[:, window]))
        arrival = items["zone"] - np.log(uniform(self._seed, user_id, position)) / items["draw_rate"]
        last_drawn = np.partition(arrival, rule.slots - 1, axis=1)[:, rule.slots - 1, None]
        order = np.empty(lists.column.shape, np.int64)
        order[:] = lists.place
        order[:, window] = window.start + np.argsort(arrival > last_drawn, axis=1, kind="stable")
        lists.reorder(order)


def _diversify(lists: _Lists, weight: float, k: int) -> None:
    """Maximal marginal relevance over categories: each further item of a category is worth less.

    value = (1 - weight) * (1 - place / k) - weight * (1 - 0.5 ** items of its category before it)

    Relevance is the place by score, 1 at the top and 0 at place k, as scores have another scale after every training.
    Within a category values only fall, so always taking the largest next value is the same as sorting by value.
    """
    cost = lists.place * ((1.0 - weight) / k) - weight * np.ldexp(1.0, -_same_before(lists, CATEGORY))
    lists.reorder(np.argsort(cost + lists.items["zone"], axis=1, kind="stable"))


def _same_before(lists: _Lists, kind: int) -> np.ndarray:
    """i8 [B, W]: how many items of the same category (or provider) stand before each place."""
    code = lists.items["group"][:, :, kind]
    by_code = lists.flat(np.argsort(code, axis=1, kind="stable"))
    code = code.reshape(-1).take(by_code)
    group_start = np.zeros(code.shape, np.int64)
    group_start[:, 1:] = np.where(code[:, 1:] != code[:, :-1], lists.place[1:], 0)
    np.maximum.accumulate(group_start, axis=1, out=group_start)
    before = np.empty(code.size, np.int64)
    before[by_code] = lists.place - group_start
    return before.reshape(code.shape)


def _cap(lists: _Lists, k: int, n_favoured: int) -> None:
    """Moves items whose category or provider is full behind the rest, and items over the price cap behind those.

    Whether an item has room depends on what was kept before it, so this pass does walk down the lists. It stops where k
    items and, for the floor, n_favoured of the favoured providers are found, all besides the pinned ones: that makes it
    cheaper than running sums iterated to a fixed point, for one request and for a batch.
    """
    items = lists.items
    columns = (
        items["group"][:, :, CATEGORY].tolist(),
        items["group"][:, :, PROVIDER].tolist(),
        items["cap"][:, :, CATEGORY].tolist(),
        items["cap"][:, :, PROVIDER].tolist(),
        (items["behind"] == OVER_CAP).tolist(),
        items["in_floor_group"].tolist(),
    )
    kept = np.zeros(items.shape, bool)
    for row, (n_pinned, *of_this_list) in enumerate(zip(lists.n_pinned[:, 0].tolist(), *columns, strict=True)):
        kept[row, _with_room(zip(*of_this_list, strict=True), n_pinned, k, n_favoured)] = True
    lists.n_kept = kept.sum(axis=1, keepdims=True)
    lists.reorder(np.argsort(np.where(kept, KEPT, items["behind"]), axis=1, kind="stable"))


def _with_room(places: Iterable[tuple], n_pinned: int, k: int, n_favoured: int) -> list[int]:
    """Places of one list that hold a pinned item, or one that has room. places: the columns of `_cap`, place by place."""
    kept: list[int] = []
    in_category, in_provider = defaultdict(int), defaultdict(int)
    for place, (category, provider, category_cap, provider_cap, cheap_enough, favoured) in enumerate(places):
        pinned = place < n_pinned
        if pinned or (cheap_enough and in_category[category] < category_cap and in_provider[provider] < provider_cap):
            in_category[category] += 1
            in_provider[provider] += 1
            kept.append(place)
            n_favoured -= favoured and not pinned
            if n_favoured <= 0 and len(kept) >= n_pinned + k:
                break
    return kept


def _raise_floor(lists: _Lists, share: float) -> None:
    """Lifts items of the favoured providers so that every first p free slots show floor(share * p) of them.

    The j-th such item may stand no later than free slot ceil(j / share); it moves there if it stands later, and the
    others close up. Only items that keep the caps are lifted: the floor never breaks a cap.
    """
    member = lists.items["in_floor_group"] & (lists.place >= lists.n_pinned) & (lists.place < lists.n_kept)
    deadline = np.ceil(member.cumsum(axis=1) / share - _ROUNDING).astype(np.int64)
    _move(lists, member, np.minimum(lists.place, (lists.n_pinned - 1) + deadline))


def _place_pins(lists: _Lists) -> None:
    """Puts the pinned items, so far in front by rising slot, at their slots; a short list takes them at its end."""
    n_served = lists.width - lists.items["blocked"].sum(axis=1, keepdims=True)
    end_of_list = n_served - lists.n_pinned + lists.place
    _move(lists, lists.place < lists.n_pinned, np.minimum(lists.items["zone"] + BLOCKED, end_of_list))


def _move(lists: _Lists, member: np.ndarray, target: np.ndarray) -> None:
    """Moves members to their target places, rising within a row, and fills the places left with the others in order."""
    rows, columns = np.nonzero(member)
    taken = np.zeros(member.shape, bool)
    taken[rows, target[rows, columns]] = True
    order = np.empty(member.shape, np.int64)
    order[taken] = columns
    order[~taken] = np.nonzero(~member)[1]
    lists.reorder(order)


def hashed_seed(seed: int, generation: int) -> np.ndarray:
    """u8 [1, 1] for `uniform`: another stream for every seed and generation."""
    return _splitmix64(_splitmix64(np.array([[seed]], np.uint64)) ^ np.uint64(generation))


def uniform(seed: np.ndarray, user_id: np.ndarray, position: np.ndarray) -> np.ndarray:
    """f8 [B, W] in (0, 1) by hashing seed, user (i8 [B]) and item position (i8 [B, W]): any request replays exactly."""
    state = _splitmix64(seed ^ user_id.astype(np.uint64)[:, None])
    state = _splitmix64(state ^ position.astype(np.uint64))
    return ((state >> _U64(12)).astype(np.float64) + 0.5) * 2.0**-52  # of 52 bits the half still fits, 1.0 never comes


_U64 = np.uint64
_GOLDEN, _FIRST, _SECOND = _U64(0x9E3779B97F4A7C15), _U64(0xBF58476D1CE4E5B9), _U64(0x94D049BB133111EB)
_SHIFT_30, _SHIFT_27, _SHIFT_31 = _U64(30), _U64(27), _U64(31)


def _splitmix64(x: np.ndarray) -> np.ndarray:
    """The finaliser of SplitMix64 (Steele, Lea, Flood 2014): every input bit reaches every output bit."""
    x = x + _GOLDEN
    x = (x ^ (x >> _SHIFT_30)) * _FIRST
    x = (x ^ (x >> _SHIFT_27)) * _SECOND
    return x ^ (x >> _SHIFT_31)
