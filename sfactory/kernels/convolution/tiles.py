"""Products of bfloat16 matrices on the matrix tiles of Intel's processors (AMX) for Numba: 16 times the rate of vectors
of float32.

A tile has 16 rows of 64 bytes and is named by its number, 0 to 7, which must be a literal. :func:`_dot` adds to a tile
of float32 the
product of 16 x 32 bfloat16 and 32 x 16, of which the second lie in pairs: in row r of the tile the elements of rows 2r
and 2r + 1 in turn. Rows are loaded from addresses that are multiples of 64; from others it takes six times as long. See
Intel's Software Developer's Manual, volume 1, chapter 18.

Products are done where :func:`at_hand`, between :func:`begin` and :func:`end`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from sfactory.kernels.convolution.vectors import processor_features

_BYTE = ir.IntType(8)

ROWS = (32,)
"""How many rows :func:`multiply` can do at once."""
COLUMNS = 32
"""Of which :func:`add_product` needs a multiple."""
_SQUARE = np.zeros(64, np.uint8)
"""A configuration: all tiles with 16 rows of 64 bytes."""
_SQUARE[0] = 1
_SQUARE[16:32].view(np.uint16)[:] = 64
_SQUARE[48:56] = 16


def exist() -> bool:
    """Whether Numba compiles for a processor with such tiles."""
    return processor_features() >= {"+amx-bf16", "+avx512bf16"}


@cache
def at_hand() -> bool:
    """Whether they exist and the system lets this process use them."""
    return exist() and torch.cpu._init_amx()


def _instruction(name: str, tiles: int, operands: int = 0) -> Callable[..., Any]:
    """How to compile an instruction on so many tiles and, if it goes to memory, an address and perhaps a stride in
    bytes."""

    def emit(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        values = [ir.Constant(_BYTE, tile.literal_value) for tile in signature.args[:tiles]]
        for i, argument in enumerate(arguments[tiles : tiles + operands]):
            values.append(builder.inttoptr(argument, _BYTE.as_pointer()) if i == 0 else argument)
        known = builder.module.globals.get(name)
        function = known or ir.Function(
            builder.module, ir.FunctionType(ir.VoidType(), [value.type for value in values]), name
        )
        builder.call(function, values)
        return context.get_dummy_value()

    return emit


@intrinsic
def _configure(typing, address):
    """Set the tiles' shapes from 64 bytes."""
    return types.none(types.intp), _instruction("llvm.x86.ldtilecfg", 0, 1)


@intrinsic
def _keep_configuration(typing, address):
    """Write the tiles' shapes to 64 bytes."""
    return types.none(types.intp), _instruction("llvm.x86.sttilecfg", 0, 1)


@intrinsic(prefer_literal=True)
def _zero(typing, tile):
    return types.none(tile), _instruction("llvm.x86.tilezero", 1)


@intrinsic(prefer_literal=True)
def _load(typing, tile, address, stride):
    return types.none(tile, types.intp, types.intp), _instruction("llvm.x86.tileloadd64", 1, 2)


@intrinsic(prefer_literal=True)
def _store(typing, tile, address, stride):
    return types.none(tile, types.intp, types.intp), _instruction("llvm.x86.tilestored64", 1, 2)


@intrinsic(prefer_literal=True)
def _dot(typing, total, left, right):
    """``total += left @ right``."""
    return types.none(total, left, right), _instruction("llvm.x86.tdpbf16ps", 3)


@njit(cache=True, nogil=True)
def begin(kept):
    """Set the tiles up; the 64 bytes at an address keep what they were before."""
    _keep_configuration(kept)
    _configure(_SQUARE.ctypes.data)


@njit(cache=True, nogil=True)
def end(kept):
    """Set them up as :func:`begin` found them."""
    _configure(kept)


@njit(cache=True, nogil=True)
def multiply(rows, parts, length, left, left_step, left_part, right, right_step, right_part, total):
    """The sum of products ``[rows, length] @ [length, 32]``, as float32 ``[rows, 32]``; all lie at addresses, with
    steps in bytes.

    Args:
        rows: One of :data:`ROWS`.
        parts: Number of products.
        left, right: Of the first product; the right one lies in pairs.
        left_step: From a row to the next.
        right_step: From a pair of rows to the next.
        left_part, right_part: From a product to the next.
    """
    _zero(0)
    _zero(1)
    _zero(2)
    _zero(3)
    _add_products(parts, length, left, left_step, left_part, right, right_step, right_part)
    _store_square(total, 128)


@njit(cache=True, nogil=True)
def add_product(columns, parts, length, left, left_step, left_part, right, right_step, right_part, total, total_step):
    """Add such products of 32 rows to a total.

    Args:
        columns: Of the right ones and the total: 32, or if :data:`COLUMNS` is less as many.
        length: Even; what follows it, to a multiple of 32, must be zero in the left ones or the right ones.
    """
    _load(0, total, total_step)
    _load(1, total + 64, total_step)
    _load(2, total + 16 * total_step, total_step)
    _load(3, total + 16 * total_step + 64, total_step)
    _add_products(parts, length, left, left_step, left_part, right, right_step, right_part)
    _store_square(total, total_step)


@njit(cache=True, nogil=True)
def _add_products(parts, length, left, left_step, left_part, right, right_step, right_part):
    """To the square of tiles 0 to 3."""
    for part in range(parts):
        of_left, of_right = left + part * left_part, right + part * right_part
        for _ in range(0, length, 32):
            _load(4, of_left, left_step)
            _load(6, of_right, right_step)
            _load(7, of_right + 64, right_step)
            _dot(0, 4, 6)
            _dot(1, 4, 7)
            _load(5, of_left + 16 * left_step, left_step)
            _dot(2, 5, 6)
            _dot(3, 5, 7)
            of_left += 64
            of_right += 16 * right_step


@njit(cache=True, nogil=True)
def _store_square(address, step):
    _store(0, address, step)
    _store(1, address + 64, step)
    _store(2, address + 16 * step, step)
    _store(3, address + 16 * step + 64, step)
