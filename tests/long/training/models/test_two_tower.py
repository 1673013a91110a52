"""The towers: what they begin as, what they forget, that they learn, and that batches and blocks do not matter."""

import numpy as np
import pytest
import torch

from serving.contract.tensors import OOV_ROW
from serving.stages.features.encode import Ragged
from serving.stages.search.search import compute_recency_weights
from training.features.build import Examples
from training.models.candidates.train_two_tower import (
    Negatives,
    TowerSettings,
    compute_sampled_loss,
    hold_out_users,
    make_batch,
    train_towers,
)
from training.models.candidates.two_tower import MOST_DENSE_ROWS, ItemInputs, TwoTower, forget_users

N_ITEMS, HISTORY, WIDTH, N_CATEGORIES = 24, 6, 8, 6


def catalogue() -> ItemInputs:
    """Two blocks of items, told apart by a category and by a list (empty for every third item)."""
    category = np.append(3 + np.arange(N_ITEMS) // 12, 0)[:, None]
    lengths = np.append(np.where(np.arange(N_ITEMS) % 3 == 0, 0, 2), 0)
    lists = Ragged(np.repeat(category[:, 0], lengths), np.concatenate([[0], np.cumsum(lengths)]))
    numbers = np.random.default_rng(0).normal(size=(N_ITEMS + 1, 2)).astype(np.float32)
    return ItemInputs(category, (lists,), numbers, (N_CATEGORIES, N_CATEGORIES))


def towers(seed=0) -> TwoTower:
    torch.manual_seed(seed)
    return TwoTower(catalogue(), user_rows=(10, 4), user_continuous=2, width=WIDTH)


def examples(n: int, seed=0) -> tuple[Examples, np.ndarray]:
    """Users stay in the block of their history; a tenth of them has none."""
    rng = np.random.default_rng(seed)
    block = rng.integers(0, 2, n)
    history = (rng.integers(0, 12, (n, HISTORY)) + 12 * block[:, None]).astype(np.int32)
    history[rng.random(n) < 0.1] = N_ITEMS
    users = Examples(
        rng.integers(0, 4, (n, 2)),
        rng.normal(size=(n, 2)).astype(np.float32),
        history,
        np.zeros(history.shape, np.float32),
    )
    return users, rng.integers(0, 12, n) + 12 * block


def vectors_of(model: TwoTower, users: Examples) -> np.ndarray:
    weights = torch.from_numpy(compute_recency_weights(users.history_positions, N_ITEMS))
    history = torch.from_numpy(users.history_positions.astype(np.int64))
    with torch.no_grad():
        return model.compute_user_vectors(
            torch.from_numpy(users.user_categorical), torch.from_numpy(users.user_continuous), history, weights
        ).numpy()


def item_vectors_of(model: TwoTower) -> np.ndarray:
    with torch.no_grad():
        return model.compute_item_vectors(torch.arange(N_ITEMS)).numpy()


def test_untrained_towers_are_what_they_begin_as():
    rng, model = np.random.default_rng(1), towers()
    sides = rng.normal(size=(2, N_ITEMS, WIDTH - 1)).astype(np.float32)
    appeal = rng.normal(size=N_ITEMS).astype(np.float32)
    model.initialise(sides[0], sides[1], appeal)
    users, _ = examples(20)
    scores = vectors_of(model, users) @ item_vectors_of(model).T
    weights = compute_recency_weights(users.history_positions, N_ITEMS)
    for row in range(20):
        known = [(weight, item) for weight, item in zip(weights[row], users.history_positions[row], strict=True) if weight]
        length = max(1.0, sum(weight**2 for weight, _ in known) ** 0.5)
        pooled = sum((weight * sides[0][item] for weight, item in known), np.zeros(WIDTH - 1)) / length
        np.testing.assert_allclose(scores[row], sides[1] @ pooled + appeal, atol=1e-4)


def test_item_vectors_add_up_their_features_one_by_one():
    model, items = towers(), catalogue()
    for table in (*model.item_feature_tables, *model.list_tables):
        torch.nn.init.normal_(table.weight)
    torch.nn.init.normal_(model.item_numbers.weight)
    got = item_vectors_of(model)
    for item in range(N_ITEMS):
        listed = items.lists[0].values[items.lists[0].offsets[item] : items.lists[0].offsets[item + 1]]
        listed = listed if len(listed) else np.array([1])  # an empty list is a missing value
        with torch.no_grad():
            expected = (
                np.append(model.item_table.weight[item].numpy(), model.appeal[item].numpy())
                + model.item_feature_tables[0].weight[items.categorical[item, 0]].numpy()
                + model.list_tables[0].weight.numpy()[listed].mean(axis=0)
                + model.item_numbers(torch.from_numpy(items.continuous[item])).numpy()
            )
        np.testing.assert_allclose(got[item], expected, atol=1e-5)


def test_training_finds_the_blocks_and_is_seeded():
    users, targets = examples(2_000)
    settings = TowerSettings(width=WIDTH, epochs=5, batch=64, negatives=12)
    models = [towers(), towers()]
    said: list[str] = []
    for model in models:
        train_towers(model, users, targets, np.arange(2_000) // 10, settings, seed=3, say=said.append)
    fresh, wanted = examples(300, seed=9)
    known = (fresh.history_positions < N_ITEMS).any(axis=1)
    best = (vectors_of(models[0], fresh) @ item_vectors_of(models[0]).T).argmax(axis=1)
    assert (best[known] // 12 == wanted[known] // 12).mean() > 0.95
    np.testing.assert_array_equal(item_vectors_of(models[0]), item_vectors_of(models[1]))
    assert said[0].startswith("  towers: step 7 of 148, at most ")


def test_a_large_table_learns_and_users_without_examples_are_unknown_ones():
    torch.manual_seed(0)
    model = TwoTower(catalogue(), user_rows=(MOST_DENSE_ROWS + 1, 4), user_continuous=2, width=WIDTH)
    (users, targets), (fresh, wanted) = examples(2_000), examples(300, seed=9)
    before = model.user_tables[0].weight.detach().clone()
    settings = TowerSettings(width=WIDTH, epochs=5, batch=64, negatives=12, forget_user=0.0)
    train_towers(model, users, targets, np.arange(2_000) // 10, settings, seed=3, say=lambda _: None)
    trained = np.unique(users.user_categorical[:, 0])
    assert (model.user_tables[0].weight.detach() != before)[trained].any(dim=1).all()
    rows = model.user_tables[0].weight.detach()
    of_its_own = (rows != rows[OOV_ROW]).any(dim=1).nonzero().ravel()
    assert of_its_own.tolist() == trained[trained != OOV_ROW].tolist()
    known = (fresh.history_positions < N_ITEMS).any(axis=1)
    best = (vectors_of(model, fresh) @ item_vectors_of(model).T).argmax(axis=1)
    assert (best[known] // 12 == wanted[known] // 12).mean() > 0.95


def test_a_user_without_examples_is_served_as_an_unknown_one():
    """As one whose first events come after those that a retriever of the past learned from."""
    (users, targets), (fresh, _) = examples(2_000), examples(300, seed=9)
    model, settings = towers(), TowerSettings(width=WIDTH, epochs=5, batch=64, negatives=12)
    train_towers(model, users, targets, np.arange(2_000) // 10, settings, seed=3, say=lambda _: None)
    unknown, known, new = (fresh._replace(user_categorical=fresh.user_categorical.copy()) for _ in range(3))
    for asked, row in ((unknown, OOV_ROW), (known, 3), (new, 7)):
        asked.user_categorical[:, 0] = row
    np.testing.assert_array_equal(vectors_of(model, new), vectors_of(model, unknown))
    assert (vectors_of(model, known) != vectors_of(model, unknown)).any()


def test_training_goes_back_to_where_it_helped_held_out_users_most():
    """Targets drawn at random: there is nothing to learn, so every pass makes it worse for held-out users."""
    users, _ = examples(1_000)
    targets = np.random.default_rng(5).integers(0, N_ITEMS, 1_000)
    settings = TowerSettings(width=WIDTH, epochs=50, batch=64, negatives=24, patience=3)
    model = towers()
    said: list[str] = []
    train_towers(model, users, targets, np.arange(1_000) // 5, settings, seed=3, say=said.append)
    losses = [float(line.rsplit(" ", 1)[1]) for line in said]
    assert len(losses) < settings.checks  # it ended early
    aside = hold_out_users(np.arange(1_000) // 5, settings, np.random.default_rng(3))[1]
    batch = make_batch(users, targets, aside)
    everything = torch.arange(N_ITEMS)
    with torch.no_grad():
        kept = compute_sampled_loss(model, batch, everything, torch.zeros(N_ITEMS)).item()
    assert kept < losses[-1]


@pytest.mark.parametrize("count", [5, 30, 59, 60, 90])
def test_the_correction_for_the_sampling_is_how_often_an_item_is_drawn(count):
    """Popular items are drawn less often than `count` times their share, because no item is drawn twice."""
    targets = np.repeat(np.arange(60), 2 ** (np.arange(60) // 8))
    negatives, generator, n_samples = Negatives(targets, 60, count), torch.Generator().manual_seed(0), 4_000
    drawn = torch.cat([negatives.draw(generator) for _ in range(n_samples)]).numpy()
    shares = np.bincount(drawn, minlength=60) / n_samples
    np.testing.assert_allclose(np.exp(negatives.log_drawn.numpy()), shares, atol=0.03)


@pytest.mark.parametrize(("share", "most"), [(0.2, 10_000), (0.2, 12), (0.0, 10_000)])
def test_nobody_is_both_learned_from_and_held_out(share, most):
    users = np.random.default_rng(0).integers(0, 50, 400)
    settings = TowerSettings(held_out_share=share, most_held_out=most)
    learned, aside = hold_out_users(users, settings, np.random.default_rng(1))
    assert not set(users[learned].tolist()) & set(users[aside].tolist())
    np.testing.assert_array_equal(np.sort(np.concatenate([learned, aside])), np.arange(400))
    assert len(aside) <= most
    assert len(np.unique(users[aside])) <= 50 * share


def test_a_user_with_more_examples_than_may_be_held_out_leaves_room_for_others():
    """This holds whichever user is drawn first: without another held-out user, nothing would tell when to stop."""
    users = np.append(np.zeros(300, np.int64), np.arange(1, 50))
    settings = TowerSettings(held_out_share=0.1, most_held_out=100)
    for seed in range(60):
        _, aside = hold_out_users(users, settings, np.random.default_rng(seed))
        assert len(aside) == 5
        assert 0 not in users[aside]


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_forgotten_users_lose_their_id_only(share):
    rows = torch.arange(3, 13).reshape(5, 2)
    forgotten = forget_users(rows, share, torch.Generator().manual_seed(0))
    expected = rows.clone()
    if share:
        expected[:, 0] = OOV_ROW
    assert torch.equal(forgotten, expected)
