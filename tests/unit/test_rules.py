"""Rules against their oracle, and each promise of the documentation on its own."""

from __future__ import annotations

import json

import numpy as np
import pytest

from stages.errors import ArtifactError, ConfigError
from stages.rules import Rules, uniform
from stages.rules_config import (
    CONFIG_FILE,
    ITEMS_FILE,
    Exploration,
    Pin,
    ProviderFloor,
    RulesConfig,
    compile_rules,
)
from tests.unit import rules_oracle

N_ITEMS, K, GENERATION = 120, 8, 3


@pytest.fixture(scope="module")
def catalogue() -> dict:
    """120 items with gaps in the ids; some without category, provider or price; tied popularity."""
    rng = np.random.default_rng(1)
    names = np.array(["Bags", "Cups", "Lamps", "Toys", "Rugs", None], object)
    makers = np.array(["Ada", "Bea", "Cleo", "Dora", None], object)
    price = rng.gamma(2.0, 5.0, N_ITEMS).astype(np.float32)
    price[::11] = np.nan
    return {
        "item_ids": np.arange(N_ITEMS, dtype=np.int64) * 3 + 10,
        "category": list(rng.choice(names, N_ITEMS, p=[0.4, 0.2, 0.15, 0.1, 0.1, 0.05])),
        "provider": list(rng.choice(makers, N_ITEMS, p=[0.5, 0.25, 0.1, 0.1, 0.05])),
        "price": price,
        "popularity": rng.integers(0, 50, N_ITEMS),
    }


def compiled(tmp_path, catalogue, config: RulesConfig, k: int = K) -> Rules:
    compile_rules(tmp_path, config, **catalogue, items_returned=k)
    return Rules.load(tmp_path, GENERATION)


def requests(rng, batch: int, n_candidates: int):
    """Rows of distinct positions in random order, ragged by padding, with plenty of equal scores."""
    position = np.argsort(rng.random((batch, N_ITEMS)), axis=1)[:, :n_candidates]
    length = rng.integers(0, n_candidates + 1, (batch, 1))
    position = np.where(np.arange(n_candidates) < np.maximum(length, n_candidates // 2), position, -1)
    scores = np.round(rng.normal(0, 2, position.shape), 1).astype(np.float32)
    return position, scores, rng.integers(-5, 2**62, batch)


def oracle_answer(catalogue, config, position, scores, user_id, k) -> np.ndarray:
    answer = np.full((len(position), k), -1)
    popularity = catalogue["popularity"]
    for row in range(len(position)):
        items = [
            rules_oracle.Item(
                column=column,
                position=int(p),
                item_id=int(catalogue["item_ids"][p]),
                score=float(scores[row, column]),
                category=catalogue["category"][p],
                provider=catalogue["provider"][p],
                price=float(catalogue["price"][p]),
                novelty=float(np.float32((popularity > popularity[p]).sum() / (N_ITEMS - 1))),
            )
            for column, p in enumerate(position[row])
            if p >= 0
        ]
        served = rules_oracle.serve(items, config, int(user_id[row]), k, GENERATION)
        answer[row, : len(served)] = served
    return answer


def random_config(rng, catalogue) -> RulesConfig:
    """Each rule on or off by a coin, with values from useless to impossible to keep."""
    ids = rng.permutation(catalogue["item_ids"])
    on = rng.random(9) < 0.5
    slots = rng.permutation(K)
    return RulesConfig(
        blocked_items=[int(i) for i in ids[:20]] if on[0] else [],
        pinned=[Pin(int(i), int(s)) for i, s in zip(ids[15 : 20 + rng.integers(0, 3)], slots, strict=False)] if on[1] else [],
        price_cap=float(rng.uniform(1, 25)) if on[2] else None,
        max_per_category=int(rng.integers(1, 4)) if on[3] else None,
        category_caps={"Bags": int(rng.integers(0, 3)), "Toys": 2} if on[4] else {},
        max_per_provider=int(rng.integers(1, 4)) if on[5] else None,
        provider_floor=ProviderFloor(("Cleo", "Dora"), float(rng.choice([0.1, 0.3, 1 / 3, 0.7, 1.0]))) if on[6] else None,
        diversity=float(rng.choice([0.1, 0.4, 1.0])) if on[7] else 0.0,
        exploration=Exploration(int(rng.integers(1, K + 1)), 12, float(rng.uniform(-2, 3)), 7) if on[8] else None,
    )


@pytest.mark.parametrize("seed", range(120))
def test_equals_the_greedy_walk(tmp_path, catalogue, seed):
    rng = np.random.default_rng(seed)
    config = random_config(rng, catalogue)
    rules = compiled(tmp_path, catalogue, config)
    position, scores, user_id = requests(rng, batch=6, n_candidates=int(rng.choice([5, 12, 40, 100])))
    got = rules.apply(position, scores, user_id, K)
    np.testing.assert_array_equal(got, oracle_answer(catalogue, config, position, scores, user_id, K), err_msg=str(config))
