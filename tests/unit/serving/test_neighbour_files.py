"""The files of an item's neighbours: what is read back, and what is refused."""

import numpy as np
import pytest

from serving.contract.errors import ArtifactError
from serving.stages.search.search import Neighbours

N_ITEMS, N_NEIGHBOURS = 300, 5


@pytest.fixture
def neighbours() -> Neighbours:
    rng = np.random.default_rng(0)
    positions = rng.integers(0, N_ITEMS + 1, (N_ITEMS + 1, N_NEIGHBOURS)).astype(np.int32)
    return Neighbours(positions, rng.random(positions.shape).astype(np.float32))


def test_neighbours_come_back_from_disk(neighbours, tmp_path):
    neighbours.save(tmp_path)
    np.testing.assert_array_equal(Neighbours.load(tmp_path).positions, neighbours.positions)
    np.testing.assert_array_equal(Neighbours.load(tmp_path).weights, neighbours.weights)


@pytest.mark.parametrize("wrong", [-1, N_ITEMS + 1])
def test_neighbours_of_different_shapes_and_outside_of_the_catalogue_are_refused(neighbours, wrong, tmp_path):
    Neighbours(neighbours.positions, neighbours.weights[:, :2]).save(tmp_path)
    with pytest.raises(ArtifactError, match="expected equal shapes"):
        Neighbours.load(tmp_path)
    neighbours.positions[7, 2] = wrong
    neighbours.save(tmp_path)
    with pytest.raises(ArtifactError, match="expected 0 to 300"):
        Neighbours.load(tmp_path)


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("neighbours", lambda array: array.astype(np.int64), r"holds int64 \[301, 5\]; expected int32 \[any, any\]"),
        ("neighbour_weights", lambda array: array.astype(np.float16), "holds float16 .*; expected float32"),
        ("neighbour_weights", np.asfortranarray, "holds float32 .*, not in C order; expected float32"),
    ],
)
def test_neighbours_of_another_form_are_refused(neighbours, tmp_path, name, change, said):
    neighbours.save(tmp_path)
    np.save(tmp_path / f"{name}.npy", change(np.load(tmp_path / f"{name}.npy")))
    with pytest.raises(ArtifactError, match=said):
        Neighbours.load(tmp_path)
