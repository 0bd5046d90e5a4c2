"""Vectors of 64 bytes inside kernels, for loops whose sums should stay in registers.

LLVM vectorises innermost loops, and these then read and write every sum in each pass, and check whether their arrays
overlap. With vectors, a loop over columns can be outside of one over rows: two to three times as fast for sums of four
tokens. A vector is 16 float32 or 8 float64; a processor with shorter registers uses several for it.

Arrays are contiguous with two dimensions, and their rows have ``padded`` sizes.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.core.datamodel import PrimitiveModel, register_default
from numba.extending import intrinsic, overload

_BYTES = 64
_FAST = ("contract", "reassoc", "nsz")


class Vector(types.Type):
    """Numba's type of a vector of numbers of ``dtype``."""

    def __init__(self, dtype: types.Float) -> None:
        self.dtype, self.size = dtype, 8 * _BYTES // dtype.bitwidth
        super().__init__(f"Vector({dtype})")


@register_default(Vector)
class _VectorModel(PrimitiveModel):
    """LLVM type of a vector."""

    def __init__(self, manager: Any, vector: Vector) -> None:
        element = manager.lookup(vector.dtype).get_value_type()
        super().__init__(manager, vector, ir.VectorType(element, vector.size))


def padded(size: int) -> int:
    """The least number of whole vectors of float32 that has ``size`` numbers, in numbers; for float64 as well."""
    return (size + 15) // 16 * 16


def width(like):
    """Numbers of a vector."""


@overload(width, inline="always")
def _width(like):
    size = 8 * _BYTES // like.bitwidth
    return lambda like: size


@intrinsic
def load(context, x, i, j):
    """The vector that begins at x[i, j]."""

    def generate(context, builder, signature, arguments):
        pointer = _pointer(context, builder, signature.args[0], *arguments)
        return builder.load(pointer, align=x.dtype.bitwidth // 8)

    return Vector(x.dtype)(x, types.intp, types.intp), generate


@intrinsic
def store(context, x, i, j, vector):
    """Write ``vector`` to x[i, j] and what follows."""

    def generate(context, builder, signature, arguments):
        pointer = _pointer(context, builder, signature.args[0], *arguments[:3])
        builder.store(arguments[3], pointer, align=x.dtype.bitwidth // 8)
        return context.get_dummy_value()

    return types.none(x, types.intp, types.intp, vector), generate


def _pointer(context, builder, kind, array, i, j):
    """The pointer to the vector that begins in row i, column j of an array."""
    parts = context.make_array(kind)(context, builder, array)
    position = builder.add(builder.mul(i, builder.extract_value(parts.shape, 1)), j)
    pointer = builder.gep(parts.data, [position])
    return builder.bitcast(pointer, context.get_value_type(Vector(kind.dtype)).as_pointer())


@intrinsic
def load_first(context, x, j, count):
    """The vector that begins at entry j of a row x and has its first ``count`` numbers, and 0 after them.

    Other memory is not read, not even where ``count`` is less than 1.
    """
    name = f"llvm.masked.load.v{8 * _BYTES // x.dtype.bitwidth}f{x.dtype.bitwidth}.p0"

    def generate(context, builder, signature, arguments):
        row = context.make_array(signature.args[0])(context, builder, arguments[0])
        kind = context.get_value_type(signature.return_type)
        pointer = builder.bitcast(builder.gep(row.data, [arguments[1]]), kind.as_pointer())
        mask = ir.VectorType(ir.IntType(1), kind.count)
        function = builder.module.globals.get(name)
        if function is None:
            kinds = (pointer.type, ir.IntType(32), mask, kind)
            function = ir.Function(builder.module, ir.FunctionType(kind, kinds), name)
        align = ir.Constant(ir.IntType(32), x.dtype.bitwidth // 8)
        return builder.call(function, [pointer, align, _is_first(builder, arguments[2], kind), ir.Constant(kind, None)])

    return Vector(x.dtype)(x, types.intp, types.intp), generate


def _is_first(builder, count, kind):
    """Which numbers of a vector are among its first ``count``."""
    indices = ir.Constant(ir.VectorType(ir.IntType(64), kind.count), list(range(kind.count)))
    return builder.icmp_signed("<", indices, _filled(builder, count, indices.type))


@intrinsic
def first(context, vector, count):
    """The first ``count`` numbers of a vector, and 0 after them."""

    def generate(context, builder, signature, arguments):
        kind = arguments[0].type
        return builder.select(_is_first(builder, arguments[1], kind), arguments[0], ir.Constant(kind, None))

    return vector(vector, types.intp), generate


@intrinsic
def filled(context, number):
    """The vector whose numbers are all ``number``."""

    def generate(context, builder, signature, arguments):
        return _filled(builder, arguments[0], context.get_value_type(signature.return_type))

    return Vector(number)(number), generate


def _filled(builder, x, kind):
    """``x`` itself if it is a vector, and otherwise the vector of this number."""
    if x.type == kind:
        return x
    first = builder.insert_element(ir.Constant(kind, ir.Undefined), x, ir.Constant(ir.IntType(32), 0))
    zeros = ir.Constant(ir.VectorType(ir.IntType(32), kind.count), None)
    return builder.shuffle_vector(first, ir.Constant(kind, ir.Undefined), zeros)


@intrinsic
def times(context, x, y):
    """x y for a vector x, and y a vector or a number."""

    def generate(context, builder, signature, arguments):
        x, y = arguments
        return builder.fmul(x, _filled(builder, y, x.type), flags=_FAST)

    return x(x, y), generate


@intrinsic
def plus(context, x, y, z):
    """x + y z for vectors x and z, and y a vector or a number."""

    def generate(context, builder, signature, arguments):
        x, y, z = arguments
        return builder.fadd(x, builder.fmul(_filled(builder, y, z.type), z, flags=_FAST), flags=_FAST)

    return x(x, y, z), generate


@intrinsic
def total(context, x):
    """The sum of the numbers of a vector."""

    def generate(context, builder, signature, arguments):
        kind = arguments[0].type
        name = f"llvm.vector.reduce.fadd.v{kind.count}f{x.dtype.bitwidth}"
        function = builder.module.globals.get(name)
        if function is None:
            function = ir.Function(builder.module, ir.FunctionType(kind.element, (kind.element, kind)), name)
        return builder.call(function, [ir.Constant(kind.element, 0.0), arguments[0]], fastmath=_FAST)

    return x.dtype(x), generate
