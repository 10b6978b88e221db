"""Instructions of the processor that numba does not offer, or only by way of functions that it compiles first."""

from __future__ import annotations

from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]  # llvmlite ships no types
from numba import types
from numba.extending import intrinsic


def _prefetch(typingctx: Any, array: Any, index: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        place = builder.bitcast(builder.gep(data, [args[1]]), ir.IntType(8).as_pointer())
        number = ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [place.type, number, number, number])
        hint = builder.module.declare_intrinsic("llvm.prefetch.p0i8", (), kind)
        # Arguments: for reading, keep in all caches, data rather than instructions.
        builder.call(hint, [place, number(0), number(3), number(1)])
        return context.get_dummy_value()

    return types.void(array, index), codegen


_BITS = {types.float32: types.uint32, types.float64: types.int64}
_FLOATS = {types.uint32: types.float32, types.int32: types.float32, types.int64: types.float64}


def _reinterpret(to: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], context.get_value_type(signature.return_type))

    return lambda typingctx, value: (to[value](value), codegen)


# prefetch(array, index): load the cache line of array[index], of a flat array. An index beyond the end is harmless.
prefetch: Any = intrinsic(_prefetch)


def _bits_of(typingctx: Any, value: Any) -> Any:
    return _reinterpret(_BITS)(typingctx, value)


def _float_of(typingctx: Any, value: Any) -> Any:
    return _reinterpret(_FLOATS)(typingctx, value)


# bits_of(value): the bits of a float32 as uint32, of a float64 as int64. float_of(bits): the float of these bits.
bits_of: Any = intrinsic(_bits_of)
float_of: Any = intrinsic(_float_of)
