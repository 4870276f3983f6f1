"""Training batches: finished segments side by side, as tensors on the learner's device.

A batch has the fields of :class:`sfactory.arena.Segments` that the loss needs, time-major with all segments' rows as columns:
``[T(+1), B, ...]``.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sfactory.arena import Arena

WITHOUT_TIME = ("rnn_state", "owner")
"""Fields that a segment has once, without a time dimension."""


@dataclass(frozen=True)
class Batch:
    """Segments as tensors.

    Attributes:
        obs: One tensor ``[T+1, B, *leaf.shape]`` per leaf.
        mask: bool ``[T+1, B, logits]``, or None.
        first: bool ``[T+1, B]``.
        active: bool ``[T+1, B]``.
        reward, terminated, truncated, final_value, log_prob: ``[T, B]``.
        value: float32 ``[T+1, B]`` of the behaviour policy; row T is not meaningful.
        categorical, continuous: ``[T, B, K]`` and ``[T, B, D]``.
        rnn_state: float32 ``[B, S]``.
        owner: int32 ``[B]``.
    """

    obs: tuple[Tensor, ...]
    mask: Tensor | None
    first: Tensor
    active: Tensor
    reward: Tensor
    terminated: Tensor
    truncated: Tensor
    final_value: Tensor
    log_prob: Tensor
    value: Tensor
    categorical: Tensor
    continuous: Tensor
    rnn_state: Tensor
    owner: Tensor

    def columns(self, index: Tensor) -> Batch:
        """The batch's columns of the given indices, int64 ``[n]``; copies."""

        def select(name: str, value: Tensor | tuple[Tensor, ...] | None) -> Tensor | tuple[Tensor, ...] | None:
            if isinstance(value, tuple):
                return tuple(leaf.index_select(1, index) for leaf in value)
            return None if value is None else value.index_select(0 if name in WITHOUT_TIME else 1, index)

        return Batch(**{f.name: select(f.name, getattr(self, f.name)) for f in dataclasses.fields(self)})

    def split(self, columns: int) -> list[Batch]:
        """The batch in parts of so many columns, the last one smaller if need be; views."""
        width = self.first.shape[1]
        if columns >= width:
            return [self]

        def part(name: str, value: Tensor | tuple[Tensor, ...] | None, begin: int) -> Tensor | tuple[Tensor, ...] | None:
            if isinstance(value, tuple):
                return tuple(part(name, leaf, begin) for leaf in value)
            return None if value is None else value.narrow(0 if name in WITHOUT_TIME else 1, begin, min(columns, width - begin))

        names = [f.name for f in dataclasses.fields(self)]
        return [Batch(**{name: part(name, getattr(self, name), begin) for name in names}) for begin in range(0, width, columns)]


class Assembler:
    """Makes batches of a fixed number of segments.

    On the CPU a batch of one segment is a view of its slot. Everything else is copied once, slot by slot, into buffers that are
    kept: pinned ones for CUDA, from which one asynchronous copy per field goes to the device.

    Args:
        arena: Where the segments lie.
        segments: Per batch.
        device: Of the batches.
    """

    def __init__(self, arena: Arena, segments: int, device: torch.device) -> None:
        self._arena, self._segments, self._device = arena, segments, device
        self.is_view = segments == 1 and device.type == "cpu"
        self._buffers: dict[str, Tensor] = {}
        self._sources = {f.name: getattr(arena, f.name) for f in dataclasses.fields(Batch) if f.name != "obs"}
        self._sources |= {f"obs{i}": leaf for i, leaf in enumerate(arena.obs)}
        if not self.is_view:
            self._buffers = {name: self._buffer(name, a) for name, a in self._sources.items() if a is not None}

    def __call__(self, slots: list[int]) -> Batch:
        """The batch of the given slots; valid until the next call, and where it is a view, as long as the slot is not given back."""
        if self.is_view:
            tensors = {n: None if a is None else torch.from_numpy(a[slots[0]]) for n, a in self._sources.items()}
        else:
            tensors = {n: None if a is None else self._gather(n, a, slots) for n, a in self._sources.items()}
        obs = tuple(tensors.pop(f"obs{i}") for i in range(len(self._arena.obs)))
        return Batch(obs=obs, **tensors)

    def _buffer(self, name: str, source: np.ndarray) -> Tensor:
        rows = self._arena.rows * self._segments
        shape = (rows, *source.shape[2:]) if name in WITHOUT_TIME else (source.shape[1], rows, *source.shape[3:])
        dtype = torch.from_numpy(np.empty(0, source.dtype)).dtype
        return torch.empty(shape, dtype=dtype, pin_memory=self._device.type == "cuda")

    def _gather(self, name: str, source: np.ndarray, slots: list[int]) -> Tensor:
        buffer, rows = self._buffers[name], self._arena.rows
        target = buffer.numpy()
        for i, slot in enumerate(slots):
            part = slice(i * rows, (i + 1) * rows)
            if name in WITHOUT_TIME:
                target[part] = source[slot]
            else:
                target[:, part] = source[slot]
        return buffer if self._device.type == "cpu" else buffer.to(self._device, non_blocking=True)
