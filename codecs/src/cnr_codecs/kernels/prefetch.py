"""The processor's prefetch hint, which numba does not offer."""

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


# prefetch(array, index): load the cache line of array[index], of a flat array. An index beyond the end is harmless.
prefetch: Any = intrinsic(_prefetch)
