"""A processor's request for memory that it will need, as Numba's compiled functions can make it."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

LINE = 16  # float32 numbers in a line of the cache
_READ, _KEEP, _DATA = 0, 2, 1  # arguments of LLVM's intrinsic: to read, into the second-level cache, no code


def _prefetch(_typing: Any, array: Any, index: Any) -> Any:
    """Asks for the line that holds element `index` of a contiguous array (n,); never waits, never fails."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        memory = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        byte, number = ir.IntType(8).as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [byte, number, number, number])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        place = builder.bitcast(builder.gep(memory, [arguments[1]]), byte)
        builder.call(function, [place, *(ir.Constant(number, value) for value in (_READ, _KEEP, _DATA))])
        return context.get_dummy_value()

    return types.void(array, types.intp), generate


prefetch: Any = intrinsic(_prefetch)
