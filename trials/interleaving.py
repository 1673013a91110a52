"""Compare two generations inside one answer: team-draft interleaving.

Both rank the same request. They draft in turns, a coin decides who is first in each round, and each takes its best item that is
not taken yet. A click is credited to the team that drafted the item. As every user sees both, far fewer requests decide than in
an A/B test.

Source: Radlinski, Kurup and Joachims 2008.
"""

from __future__ import annotations

import hashlib

import numpy as np

from serving.contract.tensors import PAD_ID

CHAMPION, CHALLENGER, NOBODY = 0, 1, -1


def draft_teams(champion: np.ndarray, challenger: np.ndarray, seed: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (items, teams, propensities): int64 [K], int8 [K], float32 [K]; PAD_ID, NOBODY and 1 after the last.

    A propensity is the probability over the coins that the item is drafted at its place, given the items before it. Their
    product is the propensity of the whole list.

    champion, challenger: int64 [K], best first, PAD_ID after the last. seed: of the coins, for instance the request id, so that
    the same request is drafted alike wherever it is computed.
    """
    length = len(champion)
    items, teams = np.full(length, PAD_ID, np.int64), np.full(length, NOBODY, np.int8)
    propensities = np.ones(length, np.float32)
    lists = [[int(item) for item in ranked if item != PAD_ID] for ranked in (champion, challenger)]
    coins = np.random.default_rng(int.from_bytes(hashlib.blake2b(seed.encode(), digest_size=8).digest(), "little"))
    taken: set[int] = set()
    place = 0
    while place < length and any(item not in taken for ranked in lists for item in ranked):
        first, coin_is_revealed = int(coins.integers(2)), False
        for team in (first, 1 - first):
            bests = [next((item for item in ranked if item not in taken), None) for ranked in lists]
            best = bests[team]
            if best is None or place == length:
                continue
            if not coin_is_revealed and None not in bests and bests[0] != bests[1]:  # the item reveals the coin
                propensities[place], coin_is_revealed = 0.5, True
            items[place], teams[place] = best, team
            taken.add(best)
            place += 1
    return items, teams, propensities


def credit_clicks(teams: np.ndarray, clicked: np.ndarray) -> int:
    """Return 1 when the challenger's items were clicked more, -1 when the champion's were, 0 otherwise.

    teams: int8 [K] as `draft_teams` returns them; clicked: bool [K].
    """
    clicks = np.asarray(teams)[np.asarray(clicked, bool)]
    return int(np.sign((clicks == CHALLENGER).sum() - (clicks == CHAMPION).sum()))
