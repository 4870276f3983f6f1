"""Products of bfloat16 matrices by dot products of pairs (AVX512_BF16) for Numba: twice the rate of vectors of float32.

An instruction adds to 16 sums of float32 two numbers of a row of the left matrix times 16 pairs of the right one, in
which the elements of rows 2r and 2r + 1 lie in turn. See Intel's Software Developer's Manual, VDPBF16PS; AMD's
processors have it since Zen 4.

Offers the same as :mod:`sfactory.kernels.convolution.tiles`, for few rows at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from sfactory.kernels.convolution.vectors import BFLOAT, FLOATS, INTS, Lines, processor_features

ROWS = range(7, 13)
"""How many rows :func:`multiply` can do at once. With 32 columns they are 14 to 24 sums: enough to hide the time that
one takes, and few enough for the registers."""
COLUMNS = 16
"""Of which :func:`add_product` needs a multiple."""
_ADDED = 8
"""Rows that :func:`add_product` does at once."""
_PAIRS = ir.VectorType(BFLOAT, 32)
_NAME = "llvm.x86.avx512bf16.dpbf16ps.512"


def at_hand() -> bool:
    """Whether Numba compiles for a processor with these instructions."""
    return "+avx512bf16" in processor_features()


def _write_products(build: ir.IRBuilder, rows: int, halves: int, add: bool, operands: Sequence[ir.Value]) -> None:
    """The code of products of so many rows and times 16 columns, whose sums begin with zero or are added to the
    total."""
    parts, length, left, left_step, left_part, right, right_step, right_part, total, total_step = operands
    known = build.module.globals.get(_NAME)
    dot = known or ir.Function(build.module, ir.FunctionType(FLOATS, [FLOATS, _PAIRS, _PAIRS]), _NAME)
    lines, cells = Lines(build), [(row, half) for row in range(rows) for half in range(halves)]

    def below(address: ir.Value, step: ir.Value, row: int) -> ir.Value:
        return build.add(address, build.mul(step, _long(row)))

    sums = {cell: cgutils.alloca_once(build, FLOATS) for cell in cells}  # LLVM keeps them in registers
    for row, half in cells:
        begin = lines.load(below(total, total_step, row), 64 * half, FLOATS) if add else ir.Constant(FLOATS, [0.0] * 16)
        build.store(begin, sums[row, half])
    with cgutils.for_range(build, parts) as part:
        left_of_part = build.add(left, build.mul(part.index, left_part))
        right_of_part = build.add(right, build.mul(part.index, right_part))
        with cgutils.for_range(build, build.lshr(length, _long(1))) as pair:
            pairs = build.add(right_of_part, build.mul(pair.index, right_step))
            of_right = [lines.load(pairs, 64 * half, _PAIRS) for half in range(halves)]
            column = build.add(left_of_part, build.shl(pair.index, _long(2)))
            for row in range(rows):
                of_left = build.bitcast(lines.spread(below(column, left_step, row), INTS), _PAIRS)
                for half in range(halves):
                    build.store(
                        build.call(dot, [build.load(sums[row, half]), of_left, of_right[half]]), sums[row, half]
                    )
    for row, half in cells:
        lines.store(build.load(sums[row, half]), below(total, total_step, row), 64 * half)


def _long(number: int) -> ir.Value:
    return ir.Constant(ir.IntType(64), number)


@intrinsic
def _set_rows(typing, rows, parts, length, left, left_step, left_part, right, right_step, right_part, total):
    """:func:`multiply`."""

    def emit(context: Any, build: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        rows, *operands = arguments
        for number in ROWS:
            with build.if_then(build.icmp_signed("==", rows, _long(number))):
                _write_products(build, number, 2, False, [*operands, _long(128)])
        return context.get_dummy_value()

    return types.none(*[types.intp] * 10), emit


@njit(cache=True, nogil=True)
def multiply(rows, parts, length, left, left_step, left_part, right, right_step, right_part, total):
    """As :func:`sfactory.kernels.convolution.tiles.multiply`, with a number of :data:`ROWS`."""
    _set_rows(rows, parts, length, left, left_step, left_part, right, right_step, right_part, total)


@intrinsic
def _add_rows(
    typing, columns, parts, length, left, left_step, left_part, right, right_step, right_part, total, total_step
):
    """:func:`add_product` of :data:`_ADDED` rows."""

    def emit(context: Any, build: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        columns, *operands = arguments
        for halves in (1, 2):
            with build.if_then(build.icmp_signed("==", columns, _long(16 * halves))):
                _write_products(build, _ADDED, halves, True, operands)
        return context.get_dummy_value()

    return types.none(*[types.intp] * 11), emit


@njit(cache=True, nogil=True)
def add_product(columns, parts, length, left, left_step, left_part, right, right_step, right_part, total, total_step):
    """As :func:`sfactory.kernels.convolution.tiles.add_product`."""
    for row in range(0, 32, _ADDED):
        some, sums = left + row * left_step, total + row * total_step
        _add_rows(columns, parts, length, some, left_step, left_part, right, right_step, right_part, sums, total_step)


@njit(cache=True, nogil=True)
def begin(kept):
    """Nothing has to be set up."""


@njit(cache=True, nogil=True)
def end(kept):
    """Nor put back."""
