"""Tensors in the safetensors format, read with torch alone, so that a policy is loaded where safetensors, which writes
them, is not installed."""

from __future__ import annotations

import json
import math

import torch
from torch import Tensor

_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}


def unpack_tensors(data: bytes) -> dict[str, Tensor]:
    """Tensors by name.

    Args:
        data: A file: the header's length as 8 bytes, little-endian; the header, which has the dtype, shape and place of
            each tensor as JSON; the numbers.

    Raises:
        ValueError, KeyError, TypeError, AttributeError: If it is no such file.
    """
    begin = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:begin])
    header.pop("__metadata__", None)
    numbers = memoryview(bytearray(memoryview(data)[begin:]))  # torch wants memory that it may write to
    return {name: _tensor(numbers, **about) for name, about in header.items()}


def _tensor(numbers: memoryview, dtype: str, shape: list[int], data_offsets: list[int]) -> Tensor:
    kind, (begin, end) = _DTYPES[dtype], data_offsets
    if not 0 <= begin <= end <= len(numbers) or end - begin != math.prod(shape) * kind.itemsize:
        raise ValueError(f"a tensor {shape} of {dtype} lies at {begin} to {end} of {len(numbers)} bytes")
    if begin == end:
        return torch.empty(shape, dtype=kind)
    return torch.frombuffer(numbers[begin:end], dtype=kind).reshape(shape).clone()
