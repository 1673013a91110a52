"""ItemIndex against a dictionary, for dense and sparse catalogues."""

import numpy as np
import pytest

from serving.contract.errors import ArtifactError
from serving.contract.tensors import PAD_ID
from serving.stages.features.ids import ItemIndex

INT64 = np.iinfo(np.int64)
CATALOGUES = {
    "dense": np.arange(5, 105),
    "gaps": np.array([0, 3, 4, 9, 30]),
    "sparse": np.array([7, 10_000_000_000, 1 << 53, INT64.max]),
    "single": np.array([42]),
}


def positions_slowly(catalogue: np.ndarray, ids: np.ndarray) -> np.ndarray:
    position_of = {int(item): position for position, item in enumerate(catalogue)}
    return np.array([position_of.get(int(i), len(catalogue)) for i in ids.ravel()]).reshape(ids.shape)


@pytest.mark.parametrize("name", CATALOGUES)
def test_positions_equal_a_dictionary(name):
    catalogue = CATALOGUES[name]
    rng = np.random.default_rng(0)
    strange = np.array([PAD_ID, -2, INT64.min, INT64.max, 0, 1 << 40])
    near = np.clip(catalogue, None, INT64.max - 1) + 1
    ids = np.concatenate([catalogue, strange, near, rng.integers(0, 200, 50)])
    ids = ids[: len(ids) // 2 * 2].reshape(2, -1)
    index = ItemIndex(catalogue)
    np.testing.assert_array_equal(index.find_positions(ids), positions_slowly(catalogue, ids))
    known = index.find_positions(ids) < index.n_items
    np.testing.assert_array_equal(index.take_ids(index.find_positions(ids)), np.where(known, ids, PAD_ID))


def test_loads_from_a_shared_file(tmp_path):
    np.save(tmp_path / "item_ids.npy", CATALOGUES["gaps"])
    assert ItemIndex.load(tmp_path / "item_ids.npy").find_positions(np.array([9, 10])).tolist() == [3, 5]


@pytest.mark.parametrize(
    ("ids", "said"),
    [
        (np.array([2, 1]), "ascending"),
        (np.array([1, 1]), "without duplicates"),
        (np.array([-1, 1]), ">= 0"),
        (np.array([], np.int64), "n_items >= 1"),
        (np.array([[1, 2]]), "expected int64"),
        (np.array([1, 2], np.int32), "int32"),
    ],
)
def test_refuses_what_is_not_a_catalogue(ids, said):
    with pytest.raises(ArtifactError, match=said):
        ItemIndex(ids)
