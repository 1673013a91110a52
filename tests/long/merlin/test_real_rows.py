"""A DLRM trained on Online Retail and written as HugeCTR's files answers, from the files, what it answered when trained."""

import numpy as np
import pandas as pd
import pytest
import torch

from export.nvidia.hugectr.forward import compute_logits, find_slot_rows
from export.nvidia.hugectr.layers import make_layers
from export.nvidia.hugectr.model import compute_slot_offsets, write_model
from tests.unit.hps.hugectr_files import read_model
from tests.unit.hps.test_hugectr import WIDTH, forward_from_files
from training.dataset import load_dataset
from training.models.rankers.dlrm import DLRM, Shape

ROWS = 10_000
SLOTS = ("user_id", "item_id", "category")


@pytest.fixture(scope="module")
def rows() -> tuple[np.ndarray, np.ndarray, np.ndarray, list[int]]:
    """Real rows -> (slots int64 [N, 3], numbers float32 [N, 4], label bool [N]: bought by the dozen, rows of each table)."""
    dataset = load_dataset("online-retail")
    log = dataset.interactions.sample(2 * ROWS, random_state=0).merge(dataset.items, on="item_id")
    assert len(log) == 2 * ROWS
    codes = np.stack([pd.factorize(log[name].astype(str))[0] for name in SLOTS], axis=1)
    seconds = log["timestamp"].to_numpy()
    numbers = (seconds // 3600 % 24, seconds // 86_400 % 7, np.log1p(log["price"]), (seconds.max() - seconds) / 86_400)
    return codes, np.stack(numbers, axis=1).astype(np.float32), log["weight"].to_numpy() >= 12, (codes.max(axis=0) + 1).tolist()


@pytest.fixture(scope="module")
def trained(rows) -> DLRM:
    """A few steps on the first half: enough for weights that are no longer what they began as."""
    codes, numbers, label, sizes = rows
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = DLRM(Shape({"user_id": sizes[0]}, {"item_id": sizes[1], "category": sizes[2]}, 2, 2, WIDTH, (16,), (32, 16)))
    model.network.mean.copy_(torch.from_numpy(numbers.mean(axis=0)))
    model.network.scale.copy_(torch.from_numpy(1 / numbers.std(axis=0)))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    target = torch.from_numpy(label.astype(np.float32))
    losses = []
    for start in (*range(0, ROWS, 500), *range(0, ROWS, 500)):
        batch = slice(start, start + 500)
        loss = torch.nn.functional.binary_cross_entropy_with_logits(answers(model, codes[batch], numbers[batch]), target[batch])
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[-1] < losses[0]
    model.eval()
    return model


def answers(model: DLRM, codes: np.ndarray, numbers: np.ndarray) -> torch.Tensor:
    """Logits [N]: one candidate per request."""
    user, item, category = (torch.from_numpy(codes[:, [slot]]) for slot in range(3))
    user_rows, item_rows = model.look_up_users(user), model.look_up_items([item[:, None], category[:, None]])
    values = torch.from_numpy(numbers)
    return model.network(values[:, :2], user_rows, values[:, None, 2:], item_rows)[:, 0]


@pytest.fixture(scope="module")
def written(rows, trained, tmp_path_factory):
    """Return (folder, keys int64 [N, 3] and numbers float32 [N, 4] of 10,000 rows it was not trained on, what it answers)."""
    codes, numbers = rows[0][ROWS:], rows[1][ROWS:]
    with torch.no_grad():
        expected = torch.sigmoid(answers(trained, codes, numbers)).numpy()
    trained.network.fold()
    tables = {name: table.array() for name, table in zip(SLOTS, (*trained.user_tables, *trained.item_tables), strict=True)}
    counts = {name: np.bincount(rows[0][:, slot], minlength=len(tables[name])) for slot, name in enumerate(SLOTS)}
    folder = tmp_path_factory.mktemp("hugectr")
    first = write_model(folder, "dlrm", make_layers(trained.network.collect_layers()), tables, dict.fromkeys(SLOTS, 1), counts)
    assert first == compute_slot_offsets(tables)
    return folder, codes + np.array(list(first.values())), numbers, expected


def test_ten_thousand_rows_from_the_files(written):
    folder, keys, numbers, expected = written
    assert len(keys) == ROWS
    assert expected.std() > 0.05  # answers differ from row to row
    layers, table = read_model(folder, "dlrm")
    got = compute_logits(layers, numbers, find_slot_rows(np.asarray(table.keys), np.asarray(table.vectors), keys))
    np.testing.assert_allclose(1 / (1 + np.exp(-got)), expected, atol=1e-5)


def test_the_bytes_alone_say_the_same(written):
    """Recomputed in float64 from the JSON and the bytes, with nothing of the code under test."""
    folder, keys, numbers, expected = written
    some = slice(0, 500)
    got = forward_from_files(folder, numbers[some], [[[key] for key in row] for row in keys[some].tolist()])
    np.testing.assert_allclose(got, expected[some], atol=1e-5)
