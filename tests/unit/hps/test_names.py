"""Names and keys that HPS (NVIDIA's Hierarchical Parameter Server) would refuse are refused by our checks."""

import numpy as np
import pytest

from serving.contract.errors import ConfigError, DataError
from serving.tables.formats.names import INT64_MAX, check_keys, check_name


@pytest.mark.parametrize("name", ["", "a.b", "größe", "a/b", "x" * 121, "a b", "a\n", 3])
def test_names_hps_does_not_take(name):
    with pytest.raises(ConfigError, match=r"Expected 1 to 120 of A-Z a-z 0-9 _ -\. Rename the table"):
        check_name("table", name)


def test_longest_name():
    assert check_name("model", "x" * 120) == "x" * 120


@pytest.mark.parametrize("reserved", [-1, INT64_MAX])
def test_reserved_keys_are_refused(reserved):
    with pytest.raises(DataError, match=f"here: row 2 has key {reserved}. HPS reserves"):
        check_keys(np.array([5, 6, reserved]), "here")


def test_keys_that_are_no_int64():
    with pytest.raises(DataError, match=r"keys are float64 \[1\]"):
        check_keys(np.array([1.0]), "here")
    with pytest.raises(DataError, match=r"keys are int64 \[1, 1\]"):
        check_keys(np.array([[1]]), "here")
    with pytest.raises(DataError, match="past int64"):
        check_keys(np.array([2**63], np.uint64), "here")


def test_ordinary_keys_pass():
    keys = np.array([np.iinfo(np.int64).min, -2, 0, INT64_MAX - 1])
    np.testing.assert_array_equal(check_keys(keys, "here"), keys)
    assert check_keys(np.array([7], np.uint32), "here").dtype == np.int64
