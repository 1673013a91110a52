"""The graph of Merlin refuses a data set that it cannot be built for."""

import pytest

from experiments.merlin_graph import read_sides
from serving.contract.errors import DataError
from training.dataset import load_dataset


def test_data_without_numbers_of_users_is_refused():
    with pytest.raises(DataError, match="no continuous columns of users"):
        read_sides(load_dataset("online-retail"))
