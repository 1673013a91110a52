"""Rules against their oracle, and each promise of the documentation on its own."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest

from repository.rules import compile_rules, insert_rows
from serving.contract.errors import ArtifactError, ConfigError
from serving.stages.rules.config import (
    CONFIG_FILE,
    ITEM_RULES,
    ITEMS_FILE,
    KEPT,
    NEVER,
    OVER_CAP,
    Exploration,
    Pin,
    ProviderFloor,
    RulesConfig,
)
from serving.stages.rules.passes import draw_uniform
from serving.stages.rules.rules import Rules, hash_seed
from tests.unit.serving import rules_oracle

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


def compile_config(tmp_path, catalogue, config: RulesConfig, k: int = K) -> Rules:
    compile_rules(tmp_path, config, **catalogue, items_returned=k)
    return Rules.load(tmp_path, GENERATION)


def requests(rng: np.random.Generator, batch: int, n_candidates: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
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
                novelty=(popularity > popularity[p]).sum() / (N_ITEMS - 1),
            )
            for column, p in enumerate(position[row])
            if p >= 0
        ]
        columns = rules_oracle.serve(items, config, int(user_id[row]), k, GENERATION)
        answer[row, : len(columns)] = columns
    return answer


def random_config(rng, catalogue) -> RulesConfig:
    """Each rule on or off by a coin, with values from useless to impossible to keep."""
    ids = rng.permutation(catalogue["item_ids"])
    on = rng.random(9) < 0.5
    slots = rng.permutation(K)
    pins = tuple(Pin(int(i), int(s)) for i, s in zip(ids[15 : 20 + rng.integers(0, 3)], slots, strict=False)) if on[1] else ()
    return RulesConfig(
        blocked_items=tuple(int(i) for i in ids[:20]) if on[0] else (),
        pinned=pins,
        price_cap=float(rng.uniform(1, 25)) if on[2] else None,
        max_per_category=int(rng.integers(1, 4)) if on[3] else None,
        category_caps={"Bags": int(rng.integers(0, 3)), "Toys": 2} if on[4] else {},
        max_per_provider=int(rng.integers(1, 4)) if on[5] else None,
        provider_floor=ProviderFloor(("Cleo", "Dora"), float(rng.choice([0.1, 0.3, 1 / 3, 0.7, 1.0]))) if on[6] else None,
        diversity=float(rng.choice([0.1, 0.4, 1.0])) if on[7] else 0.0,
        exploration=Exploration(int(rng.integers(1, K + 1)), 12, float(rng.uniform(-2, 3)), 7) if on[8] else None,
    )


def test_equals_the_greedy_walk(tmp_path, catalogue):
    for seed in range(120):
        rng, folder = np.random.default_rng(seed), tmp_path / str(seed)
        folder.mkdir()
        config = random_config(rng, catalogue)
        rules = compile_config(folder, catalogue, config)
        position, scores, user_id = requests(rng, batch=6, n_candidates=int(rng.choice([5, 12, 40, 100])))
        got, expected = (
            rules.apply(position, scores, user_id, K),
            oracle_answer(catalogue, config, position, scores, user_id, K),
        )
        np.testing.assert_array_equal(got, expected, err_msg=f"seed {seed}: {config}")


def few_items(tmp_path, config: RulesConfig, category="AAABBBCC", k: int = 4) -> Rules:
    """Items 0…7 with categories as spelled; every second one is made by "small"; item i costs i."""
    n = len(category)
    compile_rules(
        tmp_path,
        config,
        item_ids=np.arange(n),
        category=list(category),
        provider=["small" if i % 2 else "big" for i in range(n)],
        price=np.arange(n, dtype=np.float32),
        popularity=np.arange(n)[::-1],
        items_returned=k,
    )
    return Rules.load(tmp_path, GENERATION)


def serve_positions(rules: Rules, position, k: int = 4, scores=None) -> list[int]:
    """Item positions in served order for one request whose candidates come best first, unless scores say otherwise."""
    position = np.array([position])
    scores = np.linspace(1, 0, position.shape[1], dtype=np.float32)[None] if scores is None else np.array([scores], np.float32)
    columns = rules.apply(position, scores, np.array([1]), k)[0]
    return [int(position[0, column]) if column >= 0 else -1 for column in columns]


def test_default_config_serves_by_score_with_ties_to_the_lower_position(tmp_path):
    rules = few_items(tmp_path, RulesConfig())
    assert serve_positions(rules, [5, 3, 7, 1], scores=[2.0, 2.0, 9.0, 2.0]) == [7, 1, 3, 5]
    assert rules.n_items == 8


def test_scores_that_are_no_number_count_as_the_worst(tmp_path):
    rules = few_items(tmp_path, RulesConfig())
    assert serve_positions(rules, [0, 3, 6, 7], scores=[np.nan, 1.0, np.inf, -np.inf]) == [6, 3, 7, 0]


def test_short_lists_end_in_padding(tmp_path):
    rules = few_items(tmp_path, RulesConfig(blocked_items=(3,), pinned=(Pin(5, 3),), exploration=Exploration(2, 4)))
    assert serve_positions(rules, [2, 3, -1]) == [2, -1, -1, -1]
    assert serve_positions(rules, [2, 5]) == [2, 5, -1, -1]  # the pinned slot is out of reach: the end of the list
    assert serve_positions(rules, [3, -1]) == [-1, -1, -1, -1]
    assert serve_positions(rules, [2, 8, 8]) == [2, -1, -1, -1]  # n_items is padding as well
    with pytest.raises(IndexError):
        serve_positions(rules, [2, 9])


def test_a_pin_behind_the_end_of_a_short_list_comes_last(tmp_path):
    rules = few_items(tmp_path, RulesConfig(pinned=(Pin(5, 0), Pin(6, 7))), k=8)
    assert serve_positions(rules, [2, 3, 4, 5, 6], k=8) == [5, 2, 3, 4, 6, -1, -1, -1]


def test_blocked_wins_over_pinned(tmp_path):
    rules = few_items(tmp_path, RulesConfig(blocked_items=(2,), pinned=(Pin(2, 0), Pin(4, 1))))
    assert serve_positions(rules, [0, 1, 2, 3, 4]) == [0, 4, 1, 3]


def test_a_pin_does_not_bring_back_what_retrieval_left_out(tmp_path):
    rules = few_items(tmp_path, RulesConfig(pinned=(Pin(7, 0),)))
    assert serve_positions(rules, [0, 1, 2, 3]) == [0, 1, 2, 3]
    assert serve_positions(rules, [0, 1, 2, 7]) == [7, 0, 1, 2]


def test_pinned_items_use_up_the_quota_of_their_category_and_ignore_caps(tmp_path):
    rules = few_items(tmp_path, RulesConfig(pinned=(Pin(2, 3),), price_cap=1.5, max_per_category=1))
    assert serve_positions(rules, [0, 1, 2, 3, 4]) == [0, 1, 3, 2]  # 0 and 1 are over the quota, 3 and 4 too dear
    rules = few_items(tmp_path, RulesConfig(pinned=(Pin(2, 3),), max_per_category=1))
    assert serve_positions(rules, [0, 1, 3, 6, 2]) == [3, 6, 0, 2]


def test_caps_relax_before_the_price_cap_and_never_leave_the_list_short(tmp_path):
    rules = few_items(tmp_path, RulesConfig(price_cap=2.5, max_per_category=1))
    assert serve_positions(rules, [7, 2, 1, 4, 0]) == [2, 1, 0, 7]


def test_an_item_that_costs_as_much_as_the_price_cap_is_not_above_it(tmp_path):
    assert serve_positions(few_items(tmp_path, RulesConfig(price_cap=2.0)), [3, 2, 1, 0]) == [2, 1, 0, 3]


def test_a_named_category_cap_replaces_the_general_one(tmp_path):
    rules = few_items(tmp_path, RulesConfig(max_per_category=1, category_caps={"A": 2, "B": 0}))
    assert serve_positions(rules, [0, 1, 2, 3, 6, 7]) == [0, 1, 6, 2]


def test_an_item_turned_down_by_one_cap_uses_up_nothing_of_the_other(tmp_path):
    """Items 0 and 2 are big's: 2 is turned down, so that category A still has room for 1."""
    rules = few_items(tmp_path, RulesConfig(max_per_category=2, max_per_provider=1), k=2)
    assert serve_positions(rules, [0, 2, 1], k=2) == [0, 1]


def test_provider_floor_holds_in_every_prefix_and_yields_to_caps(tmp_path):
    config = RulesConfig(provider_floor=ProviderFloor(("small",), 0.5))
    assert serve_positions(few_items(tmp_path, config), [0, 2, 4, 6, 1, 3, 5], k=4) == [0, 1, 2, 3]
    capped = RulesConfig(provider_floor=ProviderFloor(("small",), 0.5), category_caps={"A": 1})
    assert serve_positions(few_items(tmp_path, capped), [0, 4, 6, 1, 3], k=4) == [0, 3, 4, 6]
    capped = RulesConfig(provider_floor=ProviderFloor(("small",), 0.5), max_per_category=1)  # 1 and 3 come after the last place
    assert serve_positions(few_items(tmp_path, capped, "ABCDEFGH"), [0, 2, 4, 6, 1, 3, 5], k=4) == [0, 1, 2, 3]


def test_items_that_are_not_shown_use_up_no_quota_of_those_that_the_floor_lifts(tmp_path):
    """Item 2 comes after the last place: it must not turn down 3, of the same category, which the floor lifts."""
    config = RulesConfig(max_per_category=1, provider_floor=ProviderFloor(("small",), 0.5))
    rules = few_items(tmp_path, config, category="ABCCDDEE")
    assert serve_positions(rules, [0, 6, 2, 3], k=2) == [0, 3]
    assert serve_positions(rules, [0, 6, 2, 4, 3, 5], k=4) == [0, 6, 2, 4]  # 2 and 4 are shown, and caps win
    pinned = RulesConfig(pinned=(Pin(7, 0),), max_per_category=1, provider_floor=config.provider_floor)
    assert serve_positions(few_items(tmp_path, pinned, category="ABCCDDEF"), [7, 0, 6, 2, 3], k=3) == [7, 0, 3]


def test_pinned_items_of_favoured_providers_do_not_fill_the_floor(tmp_path):
    """The pass for caps goes on until it has kept items that the floor can lift."""
    config = RulesConfig(pinned=(Pin(7, 0), Pin(5, 1)), category_caps={"C": 2}, provider_floor=ProviderFloor(("small",), 0.5))
    assert serve_positions(few_items(tmp_path, config), [7, 5, 0, 2, 4, 6, 1, 3]) == [7, 5, 0, 1]


def test_a_pin_below_the_last_returned_place_takes_none(tmp_path):
    for slot in (2, 3):
        rules = few_items(tmp_path, RulesConfig(pinned=(Pin(7, slot),), category_caps={"A": 1}))
        assert serve_positions(rules, [0, 1, 3, 7], k=2) == [0, 3]


@pytest.mark.parametrize("share", [1 / 98, 1 / 49, 3 / 47, 0.1, 0.29, 1 / 3, 0.58, 0.7])
def test_floor_shares_are_exact_despite_rounding(tmp_path, catalogue, share):
    """1 / (1 / 49) is 49.00000000000001 and 0.58 * 50 is 28.999999999999996: both must count as whole."""
    config = RulesConfig(provider_floor=ProviderFloor(("Cleo", "Dora"), share))
    position, scores, user_id = requests(np.random.default_rng(2), batch=8, n_candidates=100)
    scores[np.isin(np.array(catalogue["provider"], object)[position], ["Cleo", "Dora"])] -= 100  # all lifted, if any
    got = compile_config(tmp_path, catalogue, config, k=100).apply(position, scores, user_id, 100)
    np.testing.assert_array_equal(got, oracle_answer(catalogue, config, position, scores, user_id, 100))


def test_diversity_trades_score_for_variety(tmp_path):
    best_first = [0, 1, 2, 3, 6]
    assert serve_positions(few_items(tmp_path, RulesConfig(diversity=0.1)), best_first) == [0, 1, 2, 3]
    assert serve_positions(few_items(tmp_path, RulesConfig(diversity=0.35)), best_first) == [0, 1, 3, 2]
    assert serve_positions(few_items(tmp_path, RulesConfig(diversity=1.0)), best_first) == [0, 3, 6, 1]
    no_categories = few_items(tmp_path, RulesConfig(diversity=1.0), category=[*[None] * 7, "C"])
    assert serve_positions(no_categories, best_first) == [0, 1, 2, 3]  # items without a category are not alike


def test_exploration_replays_exactly_and_differs_by_user_seed_and_generation(tmp_path, catalogue):
    position, scores = np.arange(60)[None], np.linspace(1, 0, 60, dtype=np.float32)[None]

    def answer(user_id=1, seed=0, generation=1):
        compile_rules(tmp_path, RulesConfig(exploration=Exploration(4, 40, 1.0, seed)), **catalogue, items_returned=K)
        return Rules.load(tmp_path, generation).apply(position, scores, np.array([user_id]), K)[0].tolist()

    assert answer() == answer()
    assert answer()[: K - 4] == [0, 1, 2, 3]
    assert len({tuple(a) for a in (answer(), answer(user_id=2), answer(seed=1), answer(generation=2))}) == 4


def test_threads_that_share_rules_are_answered_as_one_is(tmp_path, catalogue):
    rules = compile_config(tmp_path, catalogue, RulesConfig(diversity=0.3, max_per_category=2, max_per_provider=3))
    asked = [requests(np.random.default_rng(seed), 500, 40) for seed in range(4)]
    expected = [rules.apply(*request, K) for request in asked]
    with ThreadPoolExecutor(len(asked)) as threads:
        for _ in range(10):
            answers = threads.map(rules.apply, *zip(*asked, strict=True), [K] * len(asked))
            for got, wanted in zip(answers, expected, strict=True):
                np.testing.assert_array_equal(got, wanted)


def test_draws_are_even_and_inside_the_open_interval():
    seed = hash_seed(0, 1)
    draws = np.array([draw_uniform(seed, user, position) for user in range(-500, 500) for position in range(100)])
    assert ((draws > 0) & (draws < 1)).all()
    np.testing.assert_allclose(np.histogram(draws, bins=10, range=(0, 1))[0] / draws.size, 0.1, atol=0.004)


def test_answers_depend_neither_on_batch_mates_nor_on_the_order_of_candidates(tmp_path, catalogue):
    rng = np.random.default_rng(5)
    config = RulesConfig(
        pinned=(Pin(40, 2),), max_per_category=2, diversity=0.3, max_per_provider=3, exploration=Exploration(2, 10)
    )
    rules = compile_config(tmp_path, catalogue, config)
    position, scores, user_id = requests(rng, batch=16, n_candidates=40)
    together = np.take_along_axis(position, rules.apply(position, scores, user_id, K), axis=1)
    shuffle = rng.permutation(40)
    for row in range(16):
        one = position[row : row + 1, shuffle]
        columns = rules.apply(one, scores[row : row + 1, shuffle], user_id[row : row + 1], K)
        np.testing.assert_array_equal(one[0, columns[0]], together[row])


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (RulesConfig(pinned=(Pin(10, K),)), "item 10 is pinned to slot 8; lists have slots 0 to 7"),
        (RulesConfig(exploration=Exploration(K + 1)), "exploration.slots is 9, but a list has 8 slots"),
        (RulesConfig(category_caps={"Cup": 1}), "names 'Cup', which no item has. Did you mean 'Cups'"),
        (RulesConfig(provider_floor=ProviderFloor(("Zoe",), 0.1)), "names 'Zoe', which no item has. The catalogue has 4"),
        (RulesConfig(pinned=(Pin("x", 0),)), "pinned names item 'x', but the ids of this shop's items are numbers"),
    ],
)
def test_a_config_that_does_not_fit_the_catalogue_is_refused(tmp_path, catalogue, config, message):
    with pytest.raises(ConfigError) as caught:
        compile_rules(tmp_path, config, **catalogue, items_returned=K)
    assert message in str(caught.value)


def test_a_price_cap_needs_prices(tmp_path, catalogue):
    with pytest.raises(ConfigError, match="the items have no price"):
        compile_rules(tmp_path, RulesConfig(price_cap=1.0), **{**catalogue, "price": None}, items_returned=K)


@pytest.mark.parametrize(
    ("config", "role"),
    [
        (RulesConfig(max_per_category=2), "category"),
        (RulesConfig(diversity=0.2), "category"),
        (RulesConfig(max_per_provider=2), "provider"),
    ],
)
def test_rules_of_groups_need_items_that_have_one(tmp_path, catalogue, config, role):
    without = {**catalogue, role: [None] * N_ITEMS}
    with pytest.raises(ConfigError, match=rf'no item has a {role}\. Name its column .* \(\[items\] {role} = "…"\), or leave'):
        compile_rules(tmp_path, config, **without, items_returned=K)
    compile_rules(tmp_path, RulesConfig(), **without, items_returned=K)


def test_items_may_have_names_where_the_shops_ids_are_text(tmp_path, catalogue):
    config = RulesConfig(blocked_items=("x", "gone"), pinned=(Pin("y", 0), Pin("gone too", 1)))
    with pytest.raises(ConfigError, match="blocked_items names item 'x', but the ids of this shop's items are numbers"):
        compile_rules(tmp_path, config, **catalogue, items_returned=K)
    compile_rules(tmp_path, config, **catalogue, items_returned=K, item_names={"x": 10, "y": 19})
    rules = Rules.load(tmp_path)
    assert serve_positions(rules, [0, 1, 2, 3]) == [3, 1, 2, -1]  # positions of the ids 10, 13, 16, 19


def test_a_number_is_a_name_where_the_shops_ids_are_text(tmp_path, catalogue):
    names = {"22423": 10, "x": 13, "85123": 19}
    config = RulesConfig(blocked_items=(22423,), pinned=(Pin(85123, 0), Pin(99999, 1)))
    compile_rules(tmp_path, config, **catalogue, items_returned=K, item_names=names)
    assert serve_positions(Rules.load(tmp_path), [0, 1, 2, 3]) == [3, 1, 2, -1]
    compile_rules(tmp_path, RulesConfig(blocked_items=(13,)), **catalogue, items_returned=K, item_names=names)
    assert serve_positions(Rules.load(tmp_path), [0, 1, 2, 3]) == [0, 2, 3, -1]  # no name, and the id that answers hold


def test_config_survives_its_file(tmp_path, catalogue):
    config = replace(random_config(np.random.default_rng(8), catalogue), blocked_items=("тапочки",))
    rules = compile_config(tmp_path, {**catalogue, "item_names": {}}, config)
    assert rules.config == config
    assert RulesConfig.load(tmp_path / CONFIG_FILE) == config


def test_unreadable_or_foreign_artifacts_are_refused(tmp_path, catalogue):
    with pytest.raises(ArtifactError, match=r"cannot be loaded.*Export the repository again"):
        Rules.load(tmp_path)
    compile_config(tmp_path, catalogue, RulesConfig())
    (tmp_path / CONFIG_FILE).write_text("{")
    with pytest.raises(ConfigError, match="cannot be read as JSON"):
        RulesConfig.load(tmp_path / CONFIG_FILE)
    with pytest.raises(ArtifactError, match="cannot be read as JSON"):
        Rules.load(tmp_path)
    compile_config(tmp_path, catalogue, RulesConfig())
    np.save(tmp_path / ITEMS_FILE, np.zeros(5, np.int64))
    with pytest.raises(ArtifactError, match="holds int64"):
        Rules.load(tmp_path)


@pytest.mark.parametrize("behind", [-1, KEPT, NEVER, 4])
def test_items_that_caps_would_lose_are_refused(tmp_path, catalogue, behind):
    """Nothing counts their places, so that a list would end in what happened to lie in memory."""
    compile_config(tmp_path, catalogue, RulesConfig(blocked_items=(10,)))
    items = np.load(tmp_path / ITEMS_FILE)
    assert items["behind"][0] == NEVER
    items["behind"][3] = behind
    np.save(tmp_path / ITEMS_FILE, items)
    with pytest.raises(ArtifactError, match=rf"rules_items\.npy, field behind, holds .*{behind}.*; expected {OVER_CAP} to"):
        Rules.load(tmp_path)


def test_rows_for_new_items_are_the_same_bytes_at_every_export(tmp_path):
    path, records = tmp_path / ITEMS_FILE, np.zeros(1_001, ITEM_RULES)
    records["cap"] = 3
    np.save(path, records)
    used = np.full(1_101 * ITEM_RULES.itemsize, 255, np.uint8)  # memory that the rows get next
    del used
    insert_rows(path, 100)
    expected = np.zeros(1_101, ITEM_RULES)
    expected["cap"] = 3
    assert np.load(path).tobytes() == expected.tobytes()
