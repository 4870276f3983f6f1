"""The matrix tiles of Intel's processors (AMX) for Numba: bfloat16 products at sixteen times the rate of vectors of float32.

A tile has 16 rows of 64 bytes and is named by its number, 0 to 7, which must be a literal. :func:`dot` adds to a tile of float32 the product
of 16 x 32 bfloat16 and 32 x 16, of which the second lie in pairs: in row r of the tile the elements of rows 2r and 2r + 1 in turn. Rows are
loaded from addresses that are multiples of 64; from others it takes six times as long. Further operations are for 16 or 32 numbers at an
address. See Intel's Software Developer's Manual, volume 1, chapter 18.

Compiled code with these runs where :func:`at_hand`, between :func:`configure` with :data:`SQUARE` and one with what was there before.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import llvmlite.binding
import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

_BYTE, _LONG = ir.IntType(8), ir.IntType(64)


class _BFloat(ir.Type):
    """LLVM's bfloat, which llvmlite has no name for."""

    def __str__(self) -> str:
        return "bfloat"


_SHORTS, _INTS, _FLOATS = (ir.VectorType(kind, 16) for kind in (ir.IntType(16), ir.IntType(32), ir.FloatType()))

SQUARE = np.zeros(64, np.uint8)
"""A configuration: all tiles with 16 rows of 64 bytes."""
SQUARE[0] = 1
SQUARE[16:32].view(np.uint16)[:] = 64
SQUARE[48:56] = 16


PAIRED = [8 * lane + 4 * half + i for half in range(2) for lane in range(4) for i in range(4)]
"""The order of 32 numbers that :func:`pair` has paired: that in which two vectors are unpacked, in lanes of 8 numbers."""


@cache
def at_hand() -> bool:
    """Whether this machine has such tiles and lets this process use them."""
    features = llvmlite.binding.get_host_cpu_features()
    return bool(features.get("amx-bf16") and features.get("avx512bf16") and torch.cpu._init_amx())


def _instruction(name: str, tiles: int, operands: int = 0) -> Callable[..., Any]:
    """How to compile an instruction on so many tiles and, if it goes to memory, an address and perhaps a stride in bytes."""

    def emit(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        values = [ir.Constant(_BYTE, tile.literal_value) for tile in signature.args[:tiles]]
        for i, argument in enumerate(arguments[tiles : tiles + operands]):
            values.append(builder.inttoptr(argument, _BYTE.as_pointer()) if i == 0 else argument)
        known = builder.module.globals.get(name)
        function = known or ir.Function(builder.module, ir.FunctionType(ir.VoidType(), [value.type for value in values]), name)
        builder.call(function, values)
        return context.get_dummy_value()

    return emit


@intrinsic
def configure(typing, address):
    """Set the tiles' shapes from 64 bytes."""
    return types.none(types.intp), _instruction("llvm.x86.ldtilecfg", 0, 1)


@intrinsic
def keep_configuration(typing, address):
    """Write the tiles' shapes to 64 bytes."""
    return types.none(types.intp), _instruction("llvm.x86.sttilecfg", 0, 1)


@intrinsic(prefer_literal=True)
def zero(typing, tile):
    return types.none(tile), _instruction("llvm.x86.tilezero", 1)


@intrinsic(prefer_literal=True)
def load(typing, tile, address, stride):
    return types.none(tile, types.intp, types.intp), _instruction("llvm.x86.tileloadd64", 1, 2)


@intrinsic(prefer_literal=True)
def store(typing, tile, address, stride):
    return types.none(tile, types.intp, types.intp), _instruction("llvm.x86.tilestored64", 1, 2)


@intrinsic(prefer_literal=True)
def dot(typing, total, left, right):
    """``total += left @ right``."""
    return types.none(total, left, right), _instruction("llvm.x86.tdpbf16ps", 3)


class _Lines:
    """Loads and stores of vectors at byte offsets from addresses."""

    def __init__(self, builder: ir.IRBuilder) -> None:
        self.builder = builder

    def load(self, address: ir.Value, offset: int | ir.Value, kind: ir.Type) -> ir.Value:
        return self.builder.load(self._at(address, offset, kind), align=2)

    def store(self, value: ir.Value, address: ir.Value, offset: int | ir.Value) -> None:
        self.builder.store(value, self._at(address, offset, value.type), align=2)

    def rounded(self, values: ir.Value) -> ir.Value:
        """16 float32 as bfloat16."""
        return self.builder.bitcast(self.builder.fptrunc(values, ir.VectorType(_BFloat(), 16)), _SHORTS)

    def _at(self, address: ir.Value, offset: int | ir.Value, kind: ir.Type) -> ir.Value:
        offset = ir.Constant(_LONG, offset) if isinstance(offset, int) else offset
        return self.builder.inttoptr(self.builder.add(address, offset), kind.as_pointer())


def _on_lines(write: Callable[..., None]) -> Callable[..., Any]:
    """How to compile an operation on addresses and strides."""

    def emit(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        write(_Lines(builder), *arguments)
        return context.get_dummy_value()

    return emit


@intrinsic
def activate(typing, values, bias, target):
    """ReLU of 32 float32 and biases, as bfloat16."""

    def write(lines, values, bias, target):
        zeros = ir.Constant(_FLOATS, [0.0] * 16)
        for part in range(2):
            x = lines.builder.fadd(lines.load(values, 64 * part, _FLOATS), lines.load(bias, 64 * part, _FLOATS))
            x = lines.builder.select(lines.builder.fcmp_ordered("<", x, zeros), zeros, x)  # keeps what is not a number
            lines.store(lines.rounded(x), target, 32 * part)

    return types.none(types.intp, types.intp, types.intp), _on_lines(write)


def _write_where_active(lines: _Lines, values: ir.Value, activation: ir.Value, target: ir.Value, part: int) -> None:
    zeros = ir.Constant(_SHORTS, [0] * 16)
    active = lines.builder.icmp_signed(">", lines.load(activation, 32 * part, _SHORTS), zeros)
    lines.store(lines.builder.select(active, values, zeros), target, 32 * part)


@intrinsic
def cut_off(typing, values, activation, target):
    """32 bfloat16 where activations in bfloat16 are positive, else 0."""

    def write(lines, values, activation, target):
        for part in range(2):
            _write_where_active(lines, lines.load(values, 32 * part, _SHORTS), activation, target, part)

    return types.none(types.intp, types.intp, types.intp), _on_lines(write)


@intrinsic
def round_and_cut_off(typing, values, activation, target):
    """The same of 32 float32."""

    def write(lines, values, activation, target):
        for part in range(2):
            _write_where_active(lines, lines.rounded(lines.load(values, 64 * part, _FLOATS)), activation, target, part)

    return types.none(types.intp, types.intp, types.intp), _on_lines(write)


@intrinsic
def pair(typing, first, second, target):
    """32 numbers of 16 bits and 32 others side by side, in the order of :data:`PAIRED`, which takes the fewest instructions."""

    def write(lines, first, second, target):
        kind = ir.VectorType(ir.IntType(16), 32)
        each = lines.load(first, 0, kind), lines.load(second, 0, kind)
        for half in range(2):
            order = [i for k in PAIRED[16 * half : 16 * half + 16] for i in (k, 32 + k)]
            lines.store(lines.builder.shuffle_vector(*each, ir.Constant(ir.VectorType(ir.IntType(32), 32), order)), target, 64 * half)

    return types.none(types.intp, types.intp, types.intp), _on_lines(write)


@intrinsic
def transpose(typing, source, source_stride, target, target_stride):
    """32 rows of 16 numbers of 16 bits to 16 rows of 32; strides in bytes."""

    def write(lines, source, source_stride, target, target_stride):
        build = lines.builder

        def row(i: int) -> ir.Value:
            return build.zext(lines.load(source, build.mul(source_stride, ir.Constant(_LONG, i)), _SHORTS), _INTS)

        rows = [build.or_(row(2 * i), build.shl(row(2 * i + 1), ir.Constant(_INTS, [16] * 16))) for i in range(16)]
        for side in (8, 4, 2, 1):  # rows that far apart exchange the squares of that side that lie off the diagonal
            upper = ir.Constant(_INTS, [k if not k & side else 16 + k - side for k in range(16)])
            lower = ir.Constant(_INTS, [k + side if not k & side else 16 + k for k in range(16)])
            for i in (i for i in range(16) if not i & side):
                both = rows[i], rows[i + side]
                rows[i], rows[i + side] = build.shuffle_vector(*both, upper), build.shuffle_vector(*both, lower)
        for i, each in enumerate(rows):
            lines.store(each, target, build.mul(target_stride, ir.Constant(_LONG, i)))

    return types.none(*[types.intp] * 4), _on_lines(write)
