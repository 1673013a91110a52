"""Records: what passes between two stages in one tensor, against the fields one by one."""

import numpy as np
import pytest

from serving.contract.errors import RecommenderError
from serving.contract.tensors import Axes, RecordSpec, TensorSpec, make_record, make_stage_specs, pack_records, unpack_records

# Widths that leave gaps: an odd number of 4-byte values before 8-byte ones, and nothing at all.
ODD = Axes(candidates=5, history=3, user_categorical=2, user_continuous=1)
BARE = Axes(candidates=1, history=1, user_categorical=0, user_continuous=0)
RECORDS = [
    pytest.param(tensor, id=f"{name}-{tensor.name}")
    for name, axes in (("odd", ODD), ("bare", BARE), ("default", Axes(user_categorical=9, user_continuous=6)))
    for spec in make_stage_specs(axes).values()
    for tensor in spec.outputs
    if isinstance(tensor, RecordSpec)
]


def random_fields(spec, batch, seed=0):
    rng = np.random.default_rng(seed)
    return {f.name: rng.integers(-(2**40), 2**40, (batch, *f.dims)).astype(f.numpy_dtype) for f in spec.fields}


def slowly(spec, tensors, row):
    """One row's bytes, by hand: each field where its type wants it, the whole in multiples of the widest."""
    written, widest = b"", 1
    for field in spec.fields:
        size = field.numpy_dtype.itemsize
        written += bytes(-len(written) % size) + tensors[field.name][row].tobytes()
        widest = max(widest, size)
    return written + bytes(-len(written) % widest)


@pytest.mark.parametrize("spec", RECORDS)
@pytest.mark.parametrize("batch", [1, 7])
def test_what_is_packed_lies_where_its_type_wants_it_and_comes_back(spec, batch):
    tensors = random_fields(spec, batch)
    rows = spec.pack(tensors)
    assert (rows.dtype, rows.shape) == (spec.numpy_dtype, (batch, *spec.dims))
    assert [row.tobytes() for row in rows] == [slowly(spec, tensors, row) for row in range(batch)]
    back = spec.unpack(rows)
    assert back.keys() == tensors.keys()
    for name, values in tensors.items():
        np.testing.assert_array_equal(back[name], values)
        assert (back[name].dtype, back[name].flags.c_contiguous) == (values.dtype, True)


@pytest.mark.parametrize("spec", RECORDS)
def test_bytes_from_anywhere_in_memory_become_aligned_arrays(spec):
    """Compiled loops would be compiled once more for others, while somebody waits."""
    rows = spec.pack(random_fields(spec, 1))
    shifted = np.empty(rows.size + 1, np.uint8)[1:].reshape(rows.shape)
    shifted[:] = rows
    fields = spec.unpack(shifted)
    assert all(array.flags.aligned for array in fields.values())
    np.testing.assert_array_equal(spec.pack(fields), rows)


def test_a_field_of_two_records_comes_from_the_later_one_and_others_are_handed_on():
    spec = make_stage_specs(ODD)["rank"]
    user, candidates = (random_fields(tensor, 2, seed) for seed, tensor in enumerate(spec.inputs))
    taken = unpack_records(spec.inputs, pack_records(spec.inputs[:1], user) | pack_records(spec.inputs[1:], candidates))
    assert taken.keys() == {t.name for t in spec.input_fields}
    np.testing.assert_array_equal(taken["lineage"], candidates["lineage"])
    ranked = taken | {"rank_scores": np.ones((2, 5), np.float32)}
    again = unpack_records(spec.outputs, pack_records(spec.outputs, ranked))
    np.testing.assert_array_equal(again["user_id"], user["user_id"])


@pytest.mark.parametrize(
    "wrong", [np.zeros((1, 3), np.int64), np.zeros((2, 1), np.int64), np.zeros((2, 3), np.int32)], ids=["rows", "width", "type"]
)
def test_a_field_of_another_form_is_refused_not_spread_or_cast(wrong):
    spec = make_stage_specs(ODD)["preprocess"].outputs[0]
    assert isinstance(spec, RecordSpec)
    with pytest.raises(RecommenderError, match=r"history_ids of the record user is int.*the contract says INT64 \(2, 3\)"):
        spec.pack(random_fields(spec, 2) | {"history_ids": wrong})


def test_a_record_says_what_it_holds():
    spec = make_record("pair", TensorSpec("a", "FP32", (1,)), TensorSpec("b", "INT64", (2,)))
    assert spec.text == "pair UINT8 [24] (a FP32 [1]; b INT64 [2])"
