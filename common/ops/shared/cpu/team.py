"""Runs a compiled kernel on the threads of torch's own OpenMP.

After each operation of torch these threads spin for some milliseconds, and threads of another pool would share their
cores with them: a backward pass on two of them took as long as on one. A team that is spinning begins within
microseconds. It needs no GIL: each thread calls the kernel's machine code.
"""

import ctypes
from typing import Any

import llvmlite.binding
import numba
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from .compiler import kernel

#: The name by which machine code calls GNU's entry point for a parallel region. LLVM's and Intel's OpenMP have it too.
_PARALLEL = "lineartime_parallel"
#: Kernel and dtype -> the address of its machine code.
_compiled: dict[tuple[Any, Any], int] = {}


def _find_parallel() -> bool:
    """Tell LLVM where torch's OpenMP is; False if it has none with this entry point, as on macOS and Windows."""
    try:
        function = ctypes.CDLL(None).GOMP_parallel
    except (AttributeError, OSError, TypeError):  # TypeError: Windows has no list of all functions of a process
        return False
    llvmlite.binding.add_symbol(_PARALLEL, ctypes.cast(function, ctypes.c_void_p).value)
    return True


#: Whether torch has an OpenMP whose threads can be used.
EXISTS = _find_parallel()


def run(compiled: Any, dtype: Any, team: int, heads: int, parts: int, work: int, stride: int, arguments: tuple) -> None:
    """``compiled(first, last, *arguments, work)`` for ``parts`` of the heads, on at most ``team`` threads.

    ``compiled`` is a kernel, whose arguments have the same types whenever their numbers have ``dtype``. Its part i gets
    the address ``work`` + i ``stride``, in bytes.
    """
    address = _compiled.get((compiled, dtype))
    if address is None:
        address = _compiled[compiled, dtype] = _machine_code(compiled, (0, 0, *arguments, 0))
    _in_team(address, team, heads, parts, work, stride, arguments)


def _machine_code(compiled: Any, arguments: tuple) -> int:
    """The address of the kernel's machine code for arguments of these types."""
    kinds = tuple(map(numba.typeof, arguments))
    compiled.compile(kinds)  # unless it is compiled
    result = compiled.overloads[kinds]
    return result.library.get_pointer_to_function(result.fndesc.llvm_func_name)


@intrinsic
def _parallel(context, address, team, heads, parts, work, stride, arguments):
    """Begin a parallel region whose threads take parts until none is left."""
    kinds = (types.intp, types.intp, *arguments, types.intp)

    def generate(context, builder, signature, values):
        shared = [ir.Constant(ir.IntType(64), 0), values[0], *values[2:]]  # the first one counts parts
        kind = ir.LiteralStructType([x.type for x in shared])
        place = cgutils.alloca_once(builder, kind)
        for i, x in enumerate(shared):
            builder.store(x, cgutils.gep_inbounds(builder, place, 0, i))
        part = _thread(context, builder.module, kind, kinds)
        begin_type = ir.FunctionType(ir.VoidType(), [part.type, cgutils.voidptr_t, ir.IntType(32), ir.IntType(32)])
        begin = cgutils.get_or_insert_function(builder.module, begin_type, _PARALLEL)
        size = builder.trunc(values[1], ir.IntType(32))
        builder.call(begin, [part, builder.bitcast(place, cgutils.voidptr_t), size, ir.Constant(ir.IntType(32), 0)])
        return context.get_dummy_value()

    return types.none(address, team, heads, parts, work, stride, arguments), generate


def _thread(context: Any, module: ir.Module, shared: ir.Type, kinds: tuple) -> ir.Function:
    """The function of each thread, which gets a pointer to ``shared``; ``kinds`` are the kernel's arguments."""
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [cgutils.voidptr_t]), module.get_unique_name("part"))
    function.linkage = "internal"
    builder = ir.IRBuilder(function.append_basic_block())
    place = builder.bitcast(function.args[0], shared.as_pointer())
    counter = cgutils.gep_inbounds(builder, place, 0, 0)
    address, heads, parts, work, stride, arguments = (
        builder.load(cgutils.gep_inbounds(builder, place, 0, i)) for i in range(1, 7)
    )
    code_type = context.call_conv.get_function_type(types.none, kinds)
    code = builder.inttoptr(address, code_type.as_pointer())
    # Where a function of Numba writes its result and its error; a kernel has neither.
    unused = [cgutils.alloca_once(builder, kind.pointee) for kind in code_type.args[:2]]
    head, body, end = (function.append_basic_block() for _ in range(3))
    builder.branch(head)
    builder.position_at_end(head)
    one = ir.Constant(ir.IntType(64), 1)
    i = builder.atomic_rmw("add", counter, one, "monotonic")
    builder.cbranch(builder.icmp_signed("<", i, parts), body, end)
    builder.position_at_end(body)
    first, last = (builder.sdiv(builder.mul(heads, x), parts) for x in (i, builder.add(i, one)))
    values = [first, last, *cgutils.unpack_tuple(builder, arguments), builder.add(work, builder.mul(i, stride))]
    builder.call(code, [*unused, *context.get_arg_packer(kinds).as_arguments(builder, values)])
    builder.branch(head)
    builder.position_at_end(end)
    builder.ret_void()
    return function


@kernel
def _in_team(address, team, heads, parts, work, stride, arguments):
    """``_parallel`` as a function of Python."""
    _parallel(address, team, heads, parts, work, stride, arguments)
