"""Prefetch rows into the processor's cache: memory serves many reads in the time of one if they are issued together."""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from serving.loops.compiled import compiled

LINE_BYTES = 64  # of a processor's cache


@compiled
def read_ahead(array, rows):
    """Prefetch rows, int [N], of a C-contiguous array into the processor's cache, without waiting."""
    row_bytes = array.size // len(array) * array.itemsize
    for row in rows:
        for offset in range(0, row_bytes, LINE_BYTES):
            prefetch(array, row * row_bytes + offset)


@intrinsic
def prefetch(typing_context, array, offset):
    """Prefetch the cache line at byte `offset` of an array into L2, by an LLVM intrinsic that numba lacks."""

    def generate(context, builder, signature, arguments):
        byte, word = ir.IntType(8).as_pointer(), ir.IntType(32)
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        address = builder.gep(builder.bitcast(data, byte), [arguments[1]])
        signature_type = ir.FunctionType(ir.VoidType(), [byte, word, word, word])
        llvm_prefetch = builder.module.declare_intrinsic("llvm.prefetch", [byte], signature_type)
        read, locality_l2, data_cache = 0, 2, 1  # arguments of llvm.prefetch
        builder.call(llvm_prefetch, [address, *(ir.Constant(word, number) for number in (read, locality_l2, data_cache))])
        return context.get_dummy_value()

    return types.void(array, types.int64), generate
