"""The re-ranker's loops against numpy, with short lists, ties, empty lists and a network that gives no numbers."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from repository.rules import compile_rules, insert_rows
from serving.contract.artifacts import StageInfo
from serving.contract.errors import ArtifactError
from serving.contract.tensors import PAD_ID, PROBE_USER_ID, Axes, Degraded, new_lineage
from serving.loops.ordering import compute_sort_key, sort_stably
from serving.stages.best_lists import BestLists, list_features, pick_best_columns
from serving.stages.features.coverage import ShownWindow
from serving.stages.features.drift import WINDOW_ROWS
from serving.stages.features.ids import MOST_NEWCOMERS, ItemIndex
from serving.stages.live.catalogue.listed_items import ListedItems
from serving.stages.live.content import Content
from serving.stages.rerank import Rerank, RerankInputs, RerankOutputs, RerankSettings
from serving.stages.rules.config import ITEMS_FILE, Pin, ProviderFloor, RulesConfig
from serving.stages.rules.rules import Rules
from tests.unit.serving import rerank_oracle

N_ITEMS, C, M, K = 300, 40, 24, 8
ODD = [0.0, -0.0, 1.5, -1.5, np.inf, -np.inf, np.nan, 1e-45, 3e38]
SCORES = st.lists(st.one_of(st.sampled_from(ODD), st.floats(width=32)), min_size=1, max_size=80)


@given(SCORES)
def test_falling_sorts_as_the_negated_score(scores):
    scores = np.array(scores, np.float32)
    ranks = np.array([compute_sort_key(score) for score in scores])
    np.testing.assert_array_equal(np.argsort(ranks, kind="stable"), np.argsort(-scores, kind="stable"))
    assert (np.abs(ranks) < 2**31).all()


@given(st.lists(st.integers(-5, 5), max_size=70), st.integers(0, 70))
def test_sort_is_stable_and_leaves_the_rest_alone(keys, count):
    keys, count = np.array(keys, np.int64), min(count, len(keys))
    values, order = np.arange(len(keys)), np.argsort(keys[:count], kind="stable")
    expected_keys, expected = (np.concatenate([a[:count][order], a[count:]]) for a in (keys, values))
    sort_stably(keys, values, count, np.empty_like(keys), np.empty_like(values))
    np.testing.assert_array_equal(keys, expected_keys)
    np.testing.assert_array_equal(values, expected)


@given(SCORES, st.integers(1, 90))
def test_first_by_score_is_a_stable_argsort(scores, count):
    scores = np.array([scores, scores[::-1]], np.float32)
    np.testing.assert_array_equal(pick_best_columns(scores, count), rerank_oracle.pick_best_columns(scores, count))


class Network:
    """A correction that depends on what is fed alone, or one that is given."""

    def __init__(self, correction: np.ndarray | None = None) -> None:
        self.correction = correction

    def run(self, names: list[str], feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
        made = np.round(feeds["vectors"][..., 0] * 2) / 2  # halves: many corrected scores are equal
        return [made if self.correction is None else self.correction]


@pytest.fixture(scope="module")
def rerank(tmp_path_factory) -> Rerank:
    folder, rng = tmp_path_factory.mktemp("rerank"), np.random.default_rng(0)
    items = ItemIndex(np.sort(rng.choice(10_000, N_ITEMS, replace=False)))
    nothing = [None] * N_ITEMS
    compile_rules(
        folder, RulesConfig(), item_ids=items.ids, category=nothing, provider=nothing, price=None,
        popularity=np.arange(N_ITEMS), items_returned=K,
    )  # fmt: skip
    vectors = rng.normal(size=(N_ITEMS + 1, 6)).astype(np.float32)
    info = StageInfo("rerank", 7, Axes(candidates=C, items_returned=K))
    rules = Rules.load(folder, 7)
    outputs = RerankOutputs(RerankSettings(M, 0.5), 7, items, K, rules)
    content = Content.of([{}] * N_ITEMS)
    return Rerank(info, BestLists(items, M, rules), RerankInputs(vectors), Network(), outputs, ShownWindow(items), content)


def lists(rerank: Rerank, seed: int, batch: int = 16) -> dict[str, np.ndarray]:
    """Candidates without repeats, of any length from none to C; few different rank scores."""
    rng = np.random.default_rng(seed)
    ids = np.stack([rng.choice(rerank.lists.items.ids, C, replace=False) for _ in range(batch)])
    valid = np.arange(C) < rng.integers(0, C + 1, (batch, 1))
    valid[0], valid[1] = False, True
    rank_scores = np.round(rng.normal(0, 2, ids.shape), 1)
    return {
        "user_id": rng.integers(0, 99, (batch, 1)),
        "candidate_ids": np.where(valid, ids, PAD_ID),
        "rank_scores": np.where(valid, rank_scores, -np.inf).astype(np.float32),
        "retrieval_scores": np.where(valid, rng.normal(5, 1, ids.shape), -np.inf).astype(np.float32),
        "candidate_sources": rng.integers(0, 128, ids.shape).astype(np.uint8),
        "lineage": new_lineage(batch, 7, rng.integers(0, 4, batch)),
    }


@pytest.mark.parametrize("seed", range(20))
def test_feeds_equal_numpy_s(rerank, seed):
    inputs = lists(rerank, seed)
    got, expected = rerank.inputs.make_feeds(rerank.lists.pick(inputs)), rerank_oracle.feeds(rerank, inputs)
    np.testing.assert_allclose(got["features"], expected["features"], rtol=1e-6, atol=1e-6)
    assert got["features"].dtype == np.float32
    for name in ("vectors", "valid"):
        np.testing.assert_array_equal(got[name], expected[name])
        assert got[name].dtype == np.float32


@pytest.mark.parametrize("seed", range(20))
def test_answers_equal_numpy_s_row_by_row_and_together(rerank, seed):
    inputs = lists(rerank, seed)
    correction = rerank.network.run([], rerank.inputs.make_feeds(rerank.lists.pick(inputs)))[0].copy()
    correction[3, 0], correction[4, M - 1], correction[5] = np.nan, np.inf, np.nan  # meaningless where not valid
    got, expected = (
        rerank.outputs.serve(inputs, rerank.lists.pick(inputs), correction),
        rerank_oracle.served(rerank, inputs, correction),
    )
    for name, values in expected.items():
        np.testing.assert_array_equal(got[name], values, err_msg=name)
        assert got[name].dtype == values.dtype
    for row in range(len(correction)):
        one = {name: values[row : row + 1] for name, values in inputs.items()}
        alone = rerank.outputs.serve(one, rerank.lists.pick(one), correction[row : row + 1])
        for name, values in alone.items():
            np.testing.assert_array_equal(values[0], got[name][row], err_msg=name)


def test_a_network_without_numbers_leaves_the_ranker_s_order(rerank):
    inputs = lists(rerank, seed=0)
    correction = np.zeros((len(inputs["user_id"]), M), np.float32)
    correction[1, 3] = np.nan
    outputs = rerank.outputs.serve(inputs, rerank.lists.pick(inputs), correction)
    assert outputs["degraded"][1] == inputs["lineage"][1, 1] | Degraded.RERANK
    assert (np.delete(outputs["degraded"], 1, axis=0) == np.delete(inputs["lineage"][:, 1:2], 1, axis=0)).all()
    np.testing.assert_array_equal(outputs["scores"][1], np.sort(inputs["rank_scores"][1])[::-1][:K])


def test_a_pinned_candidate_is_shown_however_low_it_ranks(rerank, tmp_path):
    inputs = lists(rerank, seed=0)
    row, slot = 1, 2  # a full list
    worst_columns = np.lexsort((np.arange(C), inputs["rank_scores"][row]))[:2]
    first, second = inputs["candidate_ids"][row, worst_columns].tolist()
    nothing = [None] * N_ITEMS
    compile_rules(
        tmp_path, RulesConfig(pinned=(Pin(first, slot), Pin(second, K - 1))), item_ids=rerank.lists.items.ids,
        category=nothing, provider=nothing, price=None, popularity=np.arange(N_ITEMS), items_returned=K,
    )  # fmt: skip
    before, rules = rerank(inputs), Rules.load(tmp_path, 7)
    pinning = replace(rerank, lists=replace(rerank.lists, rules=rules), outputs=replace(rerank.outputs, rules=rules))
    shown = pinning(inputs)["item_ids"][row].tolist()
    assert (shown[slot], shown[K - 1]) == (first, second)
    others = before["item_ids"][row, : K - 2].tolist()
    assert shown == [*others[:slot], first, *others[slot:], second]


def test_a_new_candidate_is_re_ranked_however_low_it_ranks(rerank):
    inputs = lists(rerank, seed=0)
    items = ItemIndex(np.append(rerank.lists.items.ids, [PAD_ID] * 2))
    new_id = int(items.ids[-1]) + 1
    items.add(new_id)
    row, worst_column = 1, int(np.argmin(inputs["rank_scores"][1]))
    inputs["candidate_ids"][row, worst_column] = new_id
    before, listed = rerank.lists.pick(inputs), replace(rerank.lists, items=items).pick(inputs)
    assert listed.ids[row].tolist() == [*before.ids[row, : M - 1].tolist(), new_id]
    assert (np.delete(listed.ids, row, axis=0) == np.delete(before.ids, row, axis=0)).all()


def test_many_new_candidates_leave_the_list_to_those_that_rank_best_and_to_pinned_ones(rerank):
    inputs, row, n_new = lists(rerank, seed=0), 1, 30
    worst_first = np.argsort(inputs["rank_scores"][row], kind="stable")
    before, items = rerank.lists.pick(inputs), ItemIndex(np.append(rerank.lists.items.ids, [PAD_ID] * n_new))
    new_ids = int(items.ids[-1]) + 1 + np.random.default_rng(0).permutation(n_new)  # in the order in which they come
    for item_id in new_ids.tolist():
        items.add(item_id)
    pinned, inputs["candidate_ids"][row, worst_first[1 : 1 + n_new]] = inputs["candidate_ids"][row, worst_first[0]], new_ids
    rules = Rules(RulesConfig(pinned=(Pin(int(pinned), 0),)), rerank.lists.rules.items)
    listed = replace(rerank.lists, items=items, rules=rules).pick(inputs).ids[row].tolist()
    n_best = M - MOST_NEWCOMERS - 1
    assert listed[:n_best] == before.ids[row, :n_best].tolist()
    assert sorted(listed[n_best:]) == sorted([int(pinned), *new_ids[-MOST_NEWCOMERS:].tolist()])


@pytest.mark.parametrize(
    ("place", "pinned_slots", "floor", "expected"),
    [
        pytest.param(2, (), None, 2, id="at its place"),
        pytest.param(50, (), None, K - 1, id="at the end of lists that are shorter"),
        pytest.param(2, (2,), None, 1, id="above an item that is pinned there"),
        pytest.param(2, (0, 1, 2), None, None, id="in none where all places are pinned"),
        pytest.param(2, (), 1.0, None, id="in none where other providers have the share"),
    ],
)
def test_a_new_item_is_shown_where_settings_and_rules_let_it(rerank, tmp_path, place, pinned_slots, floor, expected):
    inputs, row, items = lists(rerank, seed=0), 1, ItemIndex(np.append(rerank.lists.items.ids, PAD_ID))
    new_id = int(items.ids[-1]) + 1
    inputs["candidate_ids"][row, np.argmin(inputs["rank_scores"][row])] = new_id
    pins = [Pin(int(item_id), slot) for item_id, slot in zip(inputs["candidate_ids"][row], pinned_slots, strict=False)]
    config = RulesConfig(pinned=tuple(pins), provider_floor=ProviderFloor(("Ada",), floor) if floor else None)
    compile_rules(
        tmp_path, config, item_ids=items.ids, category=[None] * N_ITEMS, provider=["Ada"] * N_ITEMS, price=None,
        popularity=np.arange(N_ITEMS), items_returned=K,
    )  # fmt: skip
    insert_rows(tmp_path / ITEMS_FILE, 1)
    rules, content = Rules.load(tmp_path, 7), Content.of([{"provider": "Ada"}] * N_ITEMS)
    ListedItems(content, rerank.inputs.item_vectors, rules, items).add_item(items.add(new_id))
    settings = replace(rerank.outputs.settings, newcomer_share=1.0, newcomer_place=place)
    best = BestLists(items, M, rules).pick(inputs)
    served = RerankOutputs(settings, 7, items, K, rules).serve(inputs, best, np.zeros(best.ids.shape, np.float32))
    shown = served["item_ids"][row].tolist()
    assert (shown.index(new_id) if new_id in shown else None) == expected


def test_without_a_network_answers_are_those_of_one_whose_correction_counts_for_nothing(rerank):
    inputs = lists(rerank, seed=0)
    correction = rerank.network.run([], rerank.inputs.make_feeds(rerank.lists.pick(inputs)))[0]
    outputs = replace(rerank.outputs, settings=replace(rerank.outputs.settings, trust=0.0))
    without = replace(rerank, outputs=outputs, network=None)
    answer = without(inputs)
    for name, values in rerank_oracle.served(without, inputs, correction).items():
        np.testing.assert_array_equal(answer[name], values, err_msg=name)
    assert (rerank(inputs)["scores"] != answer["scores"]).any()


def test_features_of_a_row_do_not_depend_on_its_batch(rerank):
    best = rerank.lists.pick(lists(rerank, seed=1))
    together = list_features(best.rank_scores, best.retrieval_scores, best.valid)
    for row in range(len(together)):
        part = slice(row, row + 1)
        alone = list_features(best.rank_scores[part], best.retrieval_scores[part], best.valid[part])
        np.testing.assert_array_equal(alone[0], together[row])


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_no_answer_holds_a_score_that_is_no_number(rerank, value):
    """Forged records and changed rows may carry one: the retrieval's order answers, marked, and other rows are as before."""
    inputs = lists(rerank, seed=0)
    before = rerank(inputs)
    forged = inputs | {"rank_scores": inputs["rank_scores"].copy(), "retrieval_scores": inputs["retrieval_scores"].copy()}
    forged["rank_scores"][1, :M] = value
    forged["rank_scores"][2, 0] = forged["retrieval_scores"][2, 0] = np.inf  # nothing to fall back to but the order itself
    outputs = rerank(forged)
    assert np.isfinite(outputs["scores"]).all()
    assert outputs["degraded"][1] == inputs["lineage"][1, 1] | Degraded.RERANK
    assert (np.diff(outputs["scores"][1]) <= 0).all()
    assert set(outputs["scores"][1]) <= set(inputs["retrieval_scores"][1])
    for name, values in outputs.items():
        np.testing.assert_array_equal(np.delete(values, [1, 2], axis=0), np.delete(before[name], [1, 2], axis=0))


def test_the_share_of_the_catalogue_shown_is_that_of_the_last_full_window(rerank):
    """Half of the catalogue in the first window, one item in the second; what no longer fits is left out."""
    stage = replace(rerank, shown=ShownWindow(rerank.lists.items))
    ids = rerank.lists.items.ids

    def show(item_ids: np.ndarray, rows: int) -> list[float]:
        for _ in range(rows):
            stage.shown.add(item_ids)
        return [measured.value for measured in stage.list_measurements()]

    half = np.append(ids[: N_ITEMS // 2], PAD_ID)[None]
    too_late = np.full_like(half, ids[-1])
    assert show(half, WINDOW_ROWS - 1) == []
    assert show(np.concatenate([half, too_late]), 1) == [0.5]
    assert show(ids[None, :1], WINDOW_ROWS - 1) == [0.5]
    assert show(ids[None, :1], 1) == [1 / N_ITEMS]
    stage(lists(rerank, 0, batch=WINDOW_ROWS) | {"user_id": np.full((WINDOW_ROWS, 1), PROBE_USER_ID)})
    assert show(ids[None, :0], 0) == [1 / N_ITEMS]
    stage(lists(rerank, 0, batch=WINDOW_ROWS))
    (measured,) = stage.list_measurements()
    assert 1 / N_ITEMS < measured.value <= 1.0


def test_rules_of_another_catalogue_are_refused(rerank, tmp_path):
    fewer, nothing = ItemIndex(rerank.lists.items.ids[1:]), [None] * (N_ITEMS - 1)
    compile_rules(
        tmp_path, RulesConfig(), item_ids=fewer.ids, category=nothing, provider=nothing, price=None,
        popularity=np.arange(N_ITEMS - 1), items_returned=K,
    )  # fmt: skip
    with pytest.raises(ArtifactError, match=r"item_ids\.npy has 300 items, the rules 299"):
        RerankOutputs.load(tmp_path, rerank.info, rerank.outputs.settings, rerank.lists.items)


def test_new_items_belong_to_the_catalogue():
    items = ItemIndex(np.array([3, 5, PAD_ID, PAD_ID]))
    shown = ShownWindow(items)
    for item_id, share in ((3, 1 / 2), (9, 1 / 3)):
        if item_id == 9:
            items.add(9)
        shown.add(np.full((WINDOW_ROWS, 1), item_id))
        assert [measured.value for measured in shown.list_measurements()] == [share]
