"""Compare two generations inside one answer: team-draft interleaving with competitive pairs.

Both generations rank the same request, then draft items in rounds. In each round a coin decides who is first, and each takes
its best item that is not taken yet. A click is credited to the team that drafted the item. If both want the same item, it is
drafted without a coin, and a click on it credits nobody. Crediting one of them would only add noise, most of all if the
generations differ little. Every user sees items of both, so a small difference shows with far fewer requests than in an A/B
test.

An item that the rules pin keeps its slot, and a click on it credits nobody either: neither generation chose its place.

Sources: Radlinski, Kurup and Joachims 2008; competitive pairs: Zhang, Du, Andersen and He 2022.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection

import numpy as np

from serving.contract.tensors import PAD_ID

CHAMPION, CHALLENGER, BOTH, NOBODY = 0, 1, 2, -1


def draft_teams(
    champion: np.ndarray, challenger: np.ndarray, seed: str, pins: Collection[tuple[int, int]] = ()
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (items, teams, propensities): int64 [K], int8 [K], float32 [K]; after the last item PAD_ID, NOBODY and 1.

    A team is CHAMPION, CHALLENGER or, for an item that is pinned there or that both wanted, BOTH.

    A propensity is the probability over the coins that the item is drafted at its place, given the items before it. The
    product of all propensities is that of the whole list.

    champion, challenger: int64 [K], best first, PAD_ID after the last
    seed: of the coins. With the request id as seed, a request has the same draft in every process.
    pins: (item, slot), slot 0 at the top. A pin counts if a list has the item there, and no list has it elsewhere
    """
    length = len(champion)
    items, teams = np.full(length, PAD_ID, np.int64), np.full(length, NOBODY, np.int8)
    propensities = np.ones(length, np.float32)
    lists = [[int(item) for item in ranked if item != PAD_ID] for ranked in (champion, challenger)]
    coins = np.random.default_rng(int.from_bytes(hashlib.blake2b(seed.encode(), digest_size=8).digest(), "little"))
    for item, slot in pins:
        if {ranked.index(item) for ranked in lists if item in ranked} == {slot}:
            items[slot], teams[slot] = item, BOTH
    taken_items = set(items[teams == BOTH].tolist())
    drafted: list[tuple[int, int]] = []
    for place in np.flatnonzero(teams == NOBODY):
        if not drafted:
            bests = [next((item for item in ranked if item not in taken_items), PAD_ID) for ranked in lists]
            if bests == [PAD_ID, PAD_ID]:
                break
            if bests[0] == bests[1]:
                drafted = [(bests[0], BOTH)]
            else:
                first = int(coins.integers(2))
                drafted = [(bests[team], team) for team in (first, 1 - first) if bests[team] != PAD_ID]
            if len(drafted) == 2:
                propensities[place] = 0.5  # the first item of a pair reveals the coin
        items[place], teams[place] = drafted.pop(0)
        taken_items.add(int(items[place]))
    return items, teams, propensities


def credit_clicks(teams: np.ndarray, clicked: np.ndarray) -> int:
    """Return 1 when the challenger's items were clicked more, -1 when the champion's were, 0 otherwise.

    teams: int8 [K] as `draft_teams` returns them; clicked: bool [K].
    """
    clicks = np.asarray(teams)[np.asarray(clicked, bool)]
    return int(np.sign((clicks == CHALLENGER).sum() - (clicks == CHAMPION).sum()))
