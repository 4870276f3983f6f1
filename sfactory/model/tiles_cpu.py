"""The matrix tiles of Intel's processors (AMX) for Numba: bfloat16 products at 16 times the rate of vectors of float32.

A tile has 16 rows of 64 bytes and is named by its number, 0 to 7, which must be a literal. :func:`dot` adds to a tile of float32 the
product of 16 x 32 bfloat16 and 32 x 16, of which the second lie in pairs: in row r of the tile the elements of rows 2r and 2r + 1 in turn.
Rows are loaded from addresses that are multiples of 64; from others it takes six times as long. See Intel's Software Developer's Manual,
volume 1, chapter 18.

Compiled code with these runs where :func:`at_hand`, between :func:`configure` with :data:`SQUARE` and one with what was there before.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.core.registry import cpu_target
from numba.extending import intrinsic

_BYTE = ir.IntType(8)

SQUARE = np.zeros(64, np.uint8)
"""A configuration: all tiles with 16 rows of 64 bytes."""
SQUARE[0] = 1
SQUARE[16:32].view(np.uint16)[:] = 64
SQUARE[48:56] = 16


@cache
def at_hand() -> bool:
    """Whether Numba compiles for a processor with such tiles, and the system lets this process use them."""
    _, _, features = cpu_target.target_context.codegen().magic_tuple()
    return {"+amx-bf16", "+avx512bf16"} <= set(features.split(",")) and torch.cpu._init_amx()


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
