import struct

import numpy as np
import pytest
from rocksdict import Options, Rdict

from serving.contract.errors import DataError
from serving.tables.formats import redis_layout, rows
from serving.tables.formats.names import make_tag

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


def test_redis_names():
    assert redis_layout.name_value_hash("rank", "item", 3) == "hps_et{hps_et.rank.item/p3}v"


def test_rocksdb_holds_what_an_independent_reader_expects(tmp_path):
    family = make_tag("rank", "item")
    options = Options(raw_mode=True)
    database = Rdict(str(tmp_path), options)
    table = database.create_column_family(family, options)
    for key, value in zip(rows.encode_keys(KEYS), rows.encode_vectors(VECTORS), strict=True):
        table[key] = value
    table.close()
    database.close()

    families = Rdict.list_cf(str(tmp_path), options)
    assert sorted(families) == ["default", "hps_et.rank.item"]
    reopened = Rdict(str(tmp_path), options, {family: options})
    table = reopened.get_column_family("hps_et.rank.item")
    stored = dict(table.items())
    assert stored == dict(zip(packed_keys(), packed_vectors(), strict=True))
    assert list(reopened.items()) == []  # the default column family stays empty
    table.close()
    reopened.close()
