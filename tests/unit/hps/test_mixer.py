import numpy as np

from serving.tables.formats.mixer import compute_partitions, mix_keys
from tests.unit.hps.oracle import mix

# key, mixed, mod 8, mod 16: computed by NVIDIA's C++ header
VECTORS = [
    (0, 0, 0, 0),
    (1, 0x0DADBFEEB7D64133, 3, 3),
    (2, 0x90AEEA2043435D3E, 6, 14),
    (42, 0x7E5408D0AA979155, 5, 5),
    (1_000_000_007, 0xF2CE22B18637841D, 5, 13),
    (-1, 0xE398180ADC04D6FC, 4, 12),
]
KEYS = np.array([key for key, *_ in VECTORS])


def test_reference_vectors():
    assert mix_keys(KEYS).tolist() == [mixed for _, mixed, _, _ in VECTORS]
    assert compute_partitions(KEYS, 8).tolist() == [eighth for _, _, eighth, _ in VECTORS]
    assert compute_partitions(KEYS, 16).tolist() == [sixteenth for *_, sixteenth in VECTORS]


def test_against_the_slow_mixer():
    keys = np.random.default_rng(0).integers(-(2**63), 2**63 - 1, 5_000)
    assert mix_keys(keys).tolist() == [mix(key) for key in keys.tolist()]
    assert compute_partitions(keys, 13).tolist() == [mix(key) % 13 for key in keys.tolist()]


def test_one_partition_and_32_bit_keys():
    assert compute_partitions(KEYS, 1).tolist() == [0] * len(KEYS)
    assert mix_keys(np.array([42, 2**32 - 1], np.uint32)).tolist() == [mix(42), mix(2**32 - 1)]  # zero-extended


def test_shapes_and_strides_are_kept():
    keys = np.arange(24).reshape(4, 6)[:, ::2]
    assert mix_keys(keys).tolist() == [[mix(key) for key in row] for row in keys.tolist()]
