"""Operations of Numba code on 16 or 32 numbers at an address, where its compiler would not find the few instructions
that they take.

Addresses are integers, as of ``array.ctypes.data``; nothing checks them. A bfloat16 is a number of 16 bits, which Numba
has no type for.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.registry import cpu_target
from numba.extending import intrinsic

_INT, _LONG = ir.IntType(32), ir.IntType(64)


class _BFloat(ir.Type):
    """LLVM's bfloat, which llvmlite has no name for."""

    def __str__(self) -> str:
        return "bfloat"


BFLOAT = _BFloat()
_BYTES, _SHORTS, INTS, FLOATS, _BFLOATS = (
    ir.VectorType(kind, 16) for kind in (ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.FloatType(), BFLOAT)
)


@cache
def processor_features() -> frozenset[str]:
    """Of the processor that Numba compiles for, as LLVM names them, each after a plus sign."""
    _, _, features = cpu_target.target_context.codegen().magic_tuple()
    return frozenset(features.split(","))


class Lines:
    """Loads and stores of vectors at byte offsets from addresses."""

    def __init__(self, builder: ir.IRBuilder) -> None:
        self.builder = builder

    def load(self, address: ir.Value, offset: int | ir.Value, kind: ir.Type) -> ir.Value:
        return self.builder.load(self._at(address, offset, kind), align=1)

    def store(self, value: ir.Value, address: ir.Value, offset: int | ir.Value) -> None:
        self.builder.store(value, self._at(address, offset, value.type), align=1)

    def spread(self, address: ir.Value, kind: ir.Type) -> ir.Value:
        """A vector of the one number at an address."""
        first = self.builder.insert_element(
            ir.Constant(kind, ir.Undefined), self.load(address, 0, kind.element), ir.Constant(_INT, 0)
        )
        return self.builder.shuffle_vector(first, first, ir.Constant(ir.VectorType(_INT, kind.count), [0] * kind.count))

    def rounded(self, values: ir.Value) -> ir.Value:
        """16 float32 as bfloat16; compiles where the processor can do that (AVX512_BF16)."""
        return self.builder.bitcast(self.builder.fptrunc(values, _BFLOATS), _SHORTS)

    def _at(self, address: ir.Value, offset: int | ir.Value, kind: ir.Type) -> ir.Value:
        offset = ir.Constant(_LONG, offset) if isinstance(offset, int) else offset
        return self.builder.inttoptr(self.builder.add(address, offset), kind.as_pointer())


def _on_lines(write: Callable[..., None]) -> Callable[..., Any]:
    """How to compile an operation on addresses and strides."""

    def emit(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        write(Lines(builder), *arguments)
        return context.get_dummy_value()

    return emit


@intrinsic
def activate(typing, values, bias, target):
    """ReLU of 32 float32 and biases, as bfloat16."""

    def write(lines, values, bias, target):
        zeros = ir.Constant(FLOATS, [0.0] * 16)
        for part in range(2):
            x = lines.builder.fadd(lines.load(values, 64 * part, FLOATS), lines.load(bias, 64 * part, FLOATS))
            x = lines.builder.select(lines.builder.fcmp_ordered("<", x, zeros), zeros, x)  # keeps what is not a number
            lines.store(lines.rounded(x), target, 32 * part)

    return types.none(types.intp, types.intp, types.intp), _on_lines(write)


def _write_where_active(lines: Lines, values: ir.Value, activation: ir.Value, target: ir.Value, part: int) -> None:
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
            _write_where_active(lines, lines.rounded(lines.load(values, 64 * part, FLOATS)), activation, target, part)

    return types.none(types.intp, types.intp, types.intp), _on_lines(write)


@intrinsic
def clear(typing, target):
    """32 zeros of 16 bits."""

    def write(lines, target):
        for part in range(2):
            lines.store(ir.Constant(_SHORTS, [0] * 16), target, 32 * part)

    return types.none(types.intp), _on_lines(write)


@intrinsic
def add_rows(typing, source, stride, rows, total):
    """Add rows of 32 bfloat16, that many bytes apart, to 32 float32."""

    def write(lines, source, stride, rows, total):
        build, sums = (
            lines.builder,
            [cgutils.alloca_once_value(lines.builder, lines.load(total, 64 * part, FLOATS)) for part in range(2)],
        )
        with cgutils.for_range(build, rows) as row:
            line = build.add(source, build.mul(row.index, stride))
            for part, each in enumerate(sums):
                bits = build.shl(build.zext(lines.load(line, 32 * part, _SHORTS), INTS), ir.Constant(INTS, [16] * 16))
                build.store(build.fadd(build.load(each), build.bitcast(bits, FLOATS)), each)
        for part, each in enumerate(sums):
            lines.store(build.load(each), total, 64 * part)

    return types.none(*[types.intp] * 4), _on_lines(write)


@intrinsic
def pair(typing, first, second, target):
    """16 numbers of 16 bits and 16 others side by side."""

    def write(lines, first, second, target):
        low, high = (lines.builder.zext(lines.load(each, 0, _SHORTS), INTS) for each in (first, second))
        lines.store(lines.builder.or_(low, lines.builder.shl(high, ir.Constant(INTS, [16] * 16))), target, 0)

    return types.none(types.intp, types.intp, types.intp), _on_lines(write)


@intrinsic
def transpose(typing, source, source_stride, target, target_stride):
    """32 rows of 16 numbers of 16 bits to 16 rows of 32; strides in bytes."""

    def write(lines, source, source_stride, target, target_stride):
        build = lines.builder

        def row(i: int) -> ir.Value:
            return build.zext(lines.load(source, build.mul(source_stride, ir.Constant(_LONG, i)), _SHORTS), INTS)

        rows = [build.or_(row(2 * i), build.shl(row(2 * i + 1), ir.Constant(INTS, [16] * 16))) for i in range(16)]
        for side in (8, 4, 2, 1):  # rows that far apart exchange the squares of that side that lie off the diagonal
            upper = ir.Constant(INTS, [k if not k & side else 16 + k - side for k in range(16)])
            lower = ir.Constant(INTS, [k + side if not k & side else 16 + k for k in range(16)])
            for i in (i for i in range(16) if not i & side):
                both = rows[i], rows[i + side]
                rows[i], rows[i + side] = build.shuffle_vector(*both, upper), build.shuffle_vector(*both, lower)
        for i, each in enumerate(rows):
            lines.store(each, target, build.mul(target_stride, ir.Constant(_LONG, i)))

    return types.none(*[types.intp] * 4), _on_lines(write)


def _spread_pixels(lines: Lines, words: tuple[ir.Value, ...], signed: bool) -> ir.Value:
    """Four times four numbers of eight bits as 16 float32."""
    word, pixels = ir.IntType(32), ir.Constant(ir.VectorType(ir.IntType(32), 4), ir.Undefined)
    for i, address in enumerate(words):
        pixels = lines.builder.insert_element(pixels, lines.load(address, 0, word), ir.Constant(word, i))
    bits = lines.builder.bitcast(pixels, _BYTES)
    return lines.builder.sitofp(bits, FLOATS) if signed else lines.builder.uitofp(bits, FLOATS)


def _to_float32(signed: bool) -> Callable[..., Any]:
    def pixels_to_float32(typing, first, second, third, fourth, target):
        def write(lines, *addresses):
            lines.store(_spread_pixels(lines, addresses[:4], signed), addresses[4], 0)

        return types.none(*[types.intp] * 5), _on_lines(write)

    return intrinsic(pixels_to_float32)


def _to_bfloat16(signed: bool) -> Callable[..., Any]:
    def pixels_to_bfloat16(typing, first, second, third, fourth, target):
        def write(lines, *addresses):
            build = lines.builder
            bits = build.bitcast(_spread_pixels(lines, addresses[:4], signed), INTS)
            lines.store(build.trunc(build.lshr(bits, ir.Constant(INTS, [16] * 16)), _SHORTS), addresses[4], 0)

        return types.none(*[types.intp] * 5), _on_lines(write)

    return intrinsic(pixels_to_bfloat16)


uint8_to_float32, int8_to_float32 = _to_float32(False), _to_float32(True)
"""Four numbers of eight bits from each of four addresses, written as float32."""
uint8_to_bfloat16, int8_to_bfloat16 = _to_bfloat16(False), _to_bfloat16(True)
"""The same in bfloat16, which holds each of them."""
