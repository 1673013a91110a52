"""Inner products with one fixed order of additions, so that they are bit-identical wherever they are computed.

Sixteen partial sums run side by side: element d is added to sum d % 16. Then the upper half of the sums is added to the lower
half until one sum remains, and elements after the last whole block of 16 are added to it one by one. A plain loop is slow,
because compilers must not reorder its additions. BLAS adds in an order that depends on the number of vectors.
"""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.errors import TypingError
from numba.extending import intrinsic

from serving.loops.compiled import compiled

LANES = 16


@compiled
def compute_inner_product(a, b):
    """Return the inner product, float32, of two contiguous float32 [D]."""
    width = len(a)
    total = sum_in_lanes(a, b, width // LANES)
    for d in range(width // LANES * LANES, width):
        total += a[d] * b[d]
    return total


@intrinsic
def sum_in_lanes(typing_context, a, b, n_blocks):
    """Return the inner product of the first n_blocks * LANES elements as float32, with LLVM vectors, which numba lacks.

    Raises TypingError unless both are contiguous float32 arrays: others would be misread.
    """
    if any(kind.dtype != types.float32 or kind.layout != "C" for kind in (a, b)):
        raise TypingError(f"lanes cannot read {a} and {b}; expected contiguous arrays of float32")
    vector, index = ir.VectorType(ir.FloatType(), LANES), ir.IntType(32)

    def generate(context, builder, signature, arguments):
        kinds = signature.args
        a, b = (context.make_array(kinds[i])(context, builder, arguments[i]).data for i in range(2))
        sums = cgutils.alloca_once_value(builder, ir.Constant(vector, [0.0] * LANES))
        with cgutils.for_range(builder, arguments[2]) as block:
            start = builder.mul(block.index, ir.Constant(block.index.type, LANES))
            blocks = [
                builder.load(builder.bitcast(builder.gep(data, [start]), vector.as_pointer()), align=4) for data in (a, b)
            ]
            builder.store(builder.fadd(builder.load(sums), builder.fmul(*blocks)), sums)
        remaining = builder.load(sums)
        half = LANES // 2
        while half:
            parts = (ir.Constant(ir.VectorType(index, half), list(range(first, first + half))) for first in (0, half))
            remaining = builder.fadd(*(builder.shuffle_vector(remaining, remaining, part) for part in parts))
            half //= 2
        return builder.extract_element(remaining, ir.Constant(index, 0))

    return types.float32(a, b, n_blocks), generate
