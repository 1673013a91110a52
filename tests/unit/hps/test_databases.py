import struct

import numpy as np
import pytest

from serving.contract.errors import DataError
from serving.tables.formats import rows

KEYS = np.array([0, 1, -2, 256, 2**62, np.iinfo(np.int64).min])  # zero bytes at either end must survive
VECTORS = np.random.default_rng(0).normal(size=(len(KEYS), 3)).astype(np.float32)
VECTORS[0] = 0.0


def packed_keys() -> list[bytes]:
    return [struct.pack("<q", key) for key in KEYS.tolist()]


def packed_vectors() -> list[bytes]:
    return [struct.pack("<3f", *vector) for vector in VECTORS.tolist()]


def test_rows_byte_for_byte():
    assert rows.encode_keys(KEYS) == packed_keys()
    assert rows.encode_vectors(VECTORS) == packed_vectors()
    vectors, found = rows.decode_vectors(packed_vectors(), 3)
    np.testing.assert_array_equal(vectors, VECTORS, strict=True)
    assert found is None


def test_keys_of_any_integers_and_order_in_memory_have_the_same_bytes():
    small = KEYS[:4]
    for keys in (small.astype(np.int32), small.astype(">i8"), np.repeat(small, 2)[::2]):
        assert rows.encode_keys(keys) == packed_keys()[:4]


def test_missing_values_stay_zero():
    values = [*packed_vectors()[:2], None, *packed_vectors()[3:]]
    vectors, found = rows.decode_vectors(values, 3)
    assert found is not None
    assert found.tolist() == [True, True, False, True, True, True]
    np.testing.assert_array_equal(vectors[found], VECTORS[found])
    assert not vectors[2].any()


def test_nothing_and_nothing_found():
    assert rows.decode_vectors([], 3)[0].shape == (0, 3)
    _, found = rows.decode_vectors([None, None], 3)
    assert found is not None
    assert not found.any()
    assert rows.encode_keys(KEYS[:0]) == []


def test_stored_bytes_of_another_size():
    with pytest.raises(DataError, match=r"a stored vector has 12 bytes\. Expected 16 for width 4"):
        rows.decode_vectors(packed_vectors(), 4)
