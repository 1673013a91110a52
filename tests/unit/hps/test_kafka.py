import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.contract.errors import ConfigError, DataError
from serving.tables.formats import kafka
from tests.unit.hps.oracle import message, mix, read_message

RNG_SEED = 0


def rows(n: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(RNG_SEED)
    return rng.integers(-(2**62), 2**62, n), rng.normal(size=(n, width)).astype(np.float32)


def test_payload_byte_for_byte():
    keys, vectors = rows(50, 5)
    written = message(list(zip(keys.tolist(), vectors.tolist(), strict=True)), 5)
    assert kafka.encode_message(keys, vectors) == written


def test_an_independent_payload_is_read():
    keys, vectors = rows(50, 5)
    got_keys, got_vectors = kafka.decode_message(message(list(zip(keys.tolist(), vectors.tolist(), strict=True)), 5), 5)
    np.testing.assert_array_equal(got_keys, keys)
    np.testing.assert_array_equal(got_vectors, vectors)
    assert (got_keys.dtype, got_vectors.dtype) == (np.int64, np.float32)
    assert got_vectors.flags.c_contiguous
    assert got_vectors.flags.writeable


def outcome(decode, *args):
    """Return what `decode` returns, or the message of what it raises."""
    try:
        return decode(*args)
    except DataError as error:
        return str(error)


BODIES = st.lists(
    st.one_of(
        st.integers(1, 5).map(lambda n: kafka.encode_message(*rows(n, 3))),
        st.sampled_from([None, b"", message([], 3), message([], 4), b"HCTR", message([(7, [1.0] * 4)], 4), bytes(28)]),
        st.just(message([(-1, [1.0] * 3)], 3)),
    ),
    min_size=1,
    max_size=6,
)


@given(BODIES)
def test_many_messages_are_read_as_one_after_the_other(bodies):
    one_by_one = [outcome(kafka.decode_message, body, 3) for body in bodies]
    together = outcome(kafka.decode_messages, bodies, 3)
    faults = [answer for answer in one_by_one if isinstance(answer, str)]
    if faults:
        assert isinstance(together, str)
        assert together.split(":")[0] in {fault.split(":")[0] for fault in faults}
        return
    assert together[2].tolist() == [len(keys) for keys, _ in one_by_one]
    for got, expected in zip(together[:2], zip(*one_by_one, strict=True), strict=True):
        np.testing.assert_array_equal(got, np.concatenate(expected))
        assert got.flags.c_contiguous
        assert got.flags.writeable


def test_beacon_and_null_payload_carry_no_rows():
    for payload in (b"HCTR\x40\x00\x00\x00", b"HCTR\x08\x00\x00\x00", None):
        keys, vectors = kafka.decode_message(payload, 16)
        assert (keys.shape, vectors.shape) == ((0,), (0, 16))


def test_groups_sizes_and_order(monkeypatch):
    width, limit = 4, 200
    monkeypatch.setattr(kafka, "MAX_MESSAGE_BYTES", limit)
    keys, vectors = rows(300, width)
    keys[1::2] = keys[0::2]  # each key is updated twice: the later row must stay behind the earlier one
    per_key: dict[int, list[tuple[float, ...]]] = {}
    for group, payload in kafka.encode_updates(keys, vectors):
        assert len(payload) <= limit
        for key, vector in read_message(payload):
            assert mix(key) % 8 == group
            per_key.setdefault(key, []).append(vector)
    expected: dict[int, list[tuple[float, ...]]] = {}
    for key, vector in zip(keys.tolist(), vectors.tolist(), strict=True):
        expected.setdefault(key, []).append(tuple(vector))
    assert per_key == expected


@pytest.mark.parametrize("partition_count", [1, 3, 4, 8, 20])
def test_a_partition_is_sent_one_message_and_each_key_to_its_own(partition_count):
    keys, vectors = rows(300, 4)
    keys[1::2] = keys[0::2]
    sent = list(kafka.encode_updates(keys, vectors, partition_count=partition_count))
    assert [partition for partition, _ in sent] == list(range(min(partition_count, 8)))
    for partition, payload in sent:
        its_own = [mix(key) % 8 % partition_count == partition for key in keys.tolist()]
        got_keys, got_vectors = kafka.decode_message(payload, 4)
        np.testing.assert_array_equal(got_keys, keys[its_own])
        np.testing.assert_array_equal(got_vectors, vectors[its_own])


def test_messages_of_quarter_megabyte_are_full():
    keys, vectors = rows(40_000, 16)
    sizes = [len(payload) for group, payload in kafka.encode_updates(keys, vectors) if group == 0]
    assert max(sizes) <= 256 * 1024 < max(sizes) + 8 + 64


def test_a_row_larger_than_a_message():
    with pytest.raises(ConfigError, match="does not fit a message of 20 bytes"):
        kafka.count_rows_per_message(16, 20)


@pytest.mark.parametrize("payload", [b"", b"HCT", b"XXXX\x40\0\0\0", b"HCTR\x40\0"])
def test_what_is_no_message(payload):
    with pytest.raises(DataError, match="Expected HCTR and a u32 value size"):
        kafka.decode_message(payload, 16)


@pytest.mark.parametrize("value_size", [0, 8, 63, 2**32 - 1])
def test_rows_of_another_width(value_size):
    with pytest.raises(DataError, match=f"carries vectors of {value_size} bytes. Expected 64"):
        kafka.decode_message(b"HCTR" + struct.pack("<I", value_size) + bytes(72), 16)


@given(st.integers(1, 3 * 72 - 1).filter(lambda size: size % 72))
def test_cut_anywhere(kept):
    keys, vectors = rows(3, 16)
    with pytest.raises(DataError, match="ends inside a row"):
        kafka.decode_message(kafka.encode_message(keys, vectors)[: 8 + kept], 16)


@pytest.mark.parametrize("key", [-1, 2**63 - 1])
def test_reserved_keys_neither_leave_nor_enter(key):
    with pytest.raises(DataError, match=f"has key {key}"):
        kafka.encode_message(np.array([key]), np.zeros((1, 2)))
    with pytest.raises(DataError, match=f"has key {key}"):
        list(kafka.encode_updates(np.array([key]), np.zeros((1, 2))))
    with pytest.raises(DataError, match=f"has key {key}"):
        kafka.decode_message(message([(key, [0.0, 0.0])], 2), 2)


@pytest.mark.parametrize("shape", [(3, 2), (2,), (2, 0)])
def test_one_vector_per_key(shape):
    with pytest.raises(DataError, match=r"Expected \[2, D\]"):
        kafka.encode_message(np.array([1, 2]), np.zeros(shape))


def test_filters_are_matched_against_the_model():
    assert kafka.make_subscription([".+"]) == [r"^hps_et\..+\..+$"]
    assert kafka.is_subscribed([".+"], "rank", "item")
    assert kafka.is_subscribed(["rank"], "rank", "item")
    assert not kafka.is_subscribed(["item"], "rank", "item")
    assert not kafka.is_subscribed(["^hps_.+$"], "rank", "item")  # HPS's own default
    assert not kafka.is_subscribed([], "rank", "item")


def test_consumer_groups_and_partitions():
    assert kafka.name_consumer_group("host") == "hps.persistent.host"
    assert [kafka.choose_kafka_partition(group, 3) for group in range(8)] == [0, 1, 2, 0, 1, 2, 0, 1]
    assert kafka.name_topic("rank", "item") == "hps_et.rank.item"
