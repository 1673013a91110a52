"""Process eight values at once in loops that numba cannot vectorise, because it must assume that input and output overlap.

Every array is C-contiguous; a place is a position in the flattened array, with at least eight values from there on.
"""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.core.errors import TypingError
from numba.extending import intrinsic

LANES = 8
_BYTE, _WORD, _FLOAT, _LONG = ir.IntType(8), ir.IntType(32), ir.FloatType(), ir.IntType(64)
_FLOATS = ir.VectorType(_FLOAT, LANES)


@intrinsic
def copy_eight(typing_context, source, place, target, target_place):
    """Copy eight float32 values from `place` to `target_place`."""
    return _copy(LANES, source, place, target, target_place)


@intrinsic
def copy_four(typing_context, source, place, target, target_place):
    """Copy four float32 values from `place` to `target_place`."""
    return _copy(LANES // 2, source, place, target, target_place)


@intrinsic
def scale_eight(typing_context, codes, place, target, target_place, scale, offset):
    """Write eight values code · scale + offset, each step rounded. codes: uint8; the others: float32."""

    def generate(context, builder, signature, arguments):
        codes = _load(builder, _compute_pointer(context, builder, signature, arguments, 0), ir.VectorType(_BYTE, LANES))
        _scale(context, builder, signature, arguments, codes)
        return context.get_dummy_value()

    return _make_types(types.void, (types.uint8, types.float32), codes, place, target, target_place, scale, offset), generate


@intrinsic
def scale_eight_halves(typing_context, codes, place, target, target_place, scale, offset):
    """Run `scale_eight` on four bytes of two codes each, the low half first."""

    def generate(context, builder, signature, arguments):
        kind = ir.VectorType(_BYTE, LANES // 2)
        codes = _load(builder, _compute_pointer(context, builder, signature, arguments, 0), kind)
        low = builder.and_(codes, ir.Constant(kind, [15] * (LANES // 2)))
        high = builder.lshr(codes, ir.Constant(kind, [4] * (LANES // 2)))
        order = ir.Constant(ir.VectorType(_WORD, LANES), [0, 4, 1, 5, 2, 6, 3, 7])
        _scale(context, builder, signature, arguments, builder.shuffle_vector(low, high, order))
        return context.get_dummy_value()

    return _make_types(types.void, (types.uint8, types.float32), codes, place, target, target_place, scale, offset), generate


@intrinsic
def find_in_eight(typing_context, values, place, key):
    """Return the distance from `place` to the first of eight int64 values that equals `key`, 8 when none does."""

    def generate(context, builder, signature, arguments):
        values = _load(builder, _compute_pointer(context, builder, signature, arguments, 0), ir.VectorType(_LONG, LANES))
        equal = builder.icmp_signed("==", values, _broadcast(builder, arguments[2]))
        bits = builder.zext(builder.bitcast(equal, ir.IntType(LANES)), _LONG)
        beyond = builder.or_(bits, ir.Constant(_LONG, 1 << LANES))
        return builder.cttz(beyond, ir.Constant(ir.IntType(1), 1))

    return _make_types(types.int64, (types.int64,), values, place, key), generate


@intrinsic
def make_pointer(typing_context, address):
    """Return an int64 address as a pointer, for `carray`. The caller keeps the memory alive."""

    def generate(context, builder, signature, arguments):
        return builder.inttoptr(arguments[0], context.get_value_type(types.voidptr))

    return types.voidptr(types.int64), generate


@intrinsic
def read_four(typing_context, values, place):
    """Return four bytes of a uint8 array as int32, the lowest first."""

    def generate(context, builder, signature, arguments):
        return _load(builder, _compute_pointer(context, builder, signature, arguments, 0), _WORD)

    return _make_types(types.int32, (types.uint8,), values, place), generate


@intrinsic
def read_in_order(typing_context, words, place):
    """Read an int64 of shared memory in program order, with neither earlier nor later reads moved across."""

    def generate(context, builder, signature, arguments):
        builder.fence("acquire")
        return builder.load_atomic(_compute_pointer(context, builder, signature, arguments, 0), "acquire", 8)

    return _make_types(types.int64, (types.int64,), words, place), generate


def _copy(count, source, place, target, target_place):
    """Return the signature and the code generator of a copy of `count` values."""

    def generate(context, builder, signature, arguments):
        values = _load(builder, _compute_pointer(context, builder, signature, arguments, 0), ir.VectorType(_FLOAT, count))
        _store(builder, values, _compute_pointer(context, builder, signature, arguments, 2))
        return context.get_dummy_value()

    return _make_types(types.void, (types.float32, types.float32), source, place, target, target_place), generate


def _make_types(result, elements, *arguments):
    """Return the signature of an intrinsic, with places as int64. elements: dtype of each array.

    Raises TypingError when one differs or is strided.
    """
    arrays = [kind for kind in arguments if isinstance(kind, types.Array)]
    if tuple(kind.dtype for kind in arrays) != elements or any(kind.layout != "C" for kind in arrays):
        raise TypingError(f"lanes cannot read {arrays}; expected contiguous arrays of {elements}")
    return result(*(types.int64 if isinstance(kind, types.Integer) else kind for kind in arguments))


def _compute_pointer(context, builder, signature, arguments, number):
    """Return a pointer into the array `arguments[number]`, at the place that the next argument gives."""
    array = context.make_array(signature.args[number])(context, builder, arguments[number])
    return builder.gep(array.data, [arguments[number + 1]])


def _load(builder, pointer, kind):
    """Return a value of type `kind` from unaligned memory."""
    return builder.load(builder.bitcast(pointer, kind.as_pointer()), align=1)


def _store(builder, values, pointer):
    """Write values to unaligned memory."""
    builder.store(values, builder.bitcast(pointer, values.type.as_pointer()), align=1)


def _broadcast(builder, value):
    """Return a vector with the value in all eight lanes."""
    kind = ir.VectorType(value.type, LANES)
    first = builder.insert_element(ir.Constant(kind, ir.Undefined), value, ir.Constant(_WORD, 0))
    zeros = ir.Constant(ir.VectorType(_WORD, LANES), [0] * LANES)
    return builder.shuffle_vector(first, ir.Constant(kind, ir.Undefined), zeros)


def _scale(context, builder, signature, arguments, codes):
    """Write codes · scale + offset to the target. arguments: those of `scale_eight`"""
    scaled = builder.fmul(builder.uitofp(codes, _FLOATS), _broadcast(builder, arguments[4]))
    values = builder.fadd(scaled, _broadcast(builder, arguments[5]))
    _store(builder, values, _compute_pointer(context, builder, signature, arguments, 2))
