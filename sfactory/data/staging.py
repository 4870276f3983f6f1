"""Staging buffers: arrays that are copied together between host and device, from one block of memory to another.

A copy of a few hundred bytes to a GPU takes about as long as one of a hundred kilobytes, so all fields of a batch share
one block and one copy. Blocks on the host are pinned, since only copies of pinned memory are asynchronous. Everything
here runs on the CPU too, where tests compare it with unstaged batches; torch's streams and events do nothing there.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from sfactory.data.packing import packed
from sfactory.spaces.tensors import torch_dtype


class StagingBuffer:
    """Arrays in one block of host memory, and tensors of the same shapes in one block on a device.

    Args:
        arrays: Shape and dtype of each array.
        device: Device of the tensors.
        staged: Whether the device has a block of its own. Otherwise there is one block on the CPU, and the tensors are
            views of the arrays.

    Attributes:
        arrays: The arrays in host memory, pinned for CUDA; zero at first.
        tensors: The tensors on the device.
    """

    def __init__(
        self, arrays: Sequence[tuple[tuple[int, ...], np.dtype]], device: torch.device, staged: bool = True
    ) -> None:
        places, size = packed(arrays)
        self._ends = [end for _, end in places]
        self._host = torch.zeros(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self._on_device = torch.zeros(size, dtype=torch.uint8, device=device) if staged else self._host
        memory, placed = self._host.numpy(), list(zip(places, arrays, strict=True))
        self.arrays = [memory[begin:end].view(dtype).reshape(shape) for (begin, end), (shape, dtype) in placed]
        self.tensors = [
            self._on_device[begin:end].view(torch_dtype(dtype)).view(shape) for (begin, end), (shape, dtype) in placed
        ]

    def upload(self) -> None:
        """Start copying all arrays to the device, on the current stream."""
        if self._on_device is not self._host:
            self._on_device.copy_(self._host, non_blocking=True)

    def download(self, count: int) -> None:
        """Start copying the first `count` tensors to the host, on the current stream."""
        end = self._ends[count - 1]
        if self._on_device is not self._host:
            self._host[:end].copy_(self._on_device[:end], non_blocking=True)


class DoubleBuffer:
    """Two staging buffers used alternately: one is filled and copied while the device still uses the other.

    Args:
        arrays: Shape and dtype of each array.
        device: Device of the tensors.
    """

    def __init__(self, arrays: Sequence[tuple[tuple[int, ...], np.dtype]], device: torch.device) -> None:
        self._device, self._module = device, torch.get_device_module(device)
        self._stream = self._module.Stream(device)
        self._turns = [StagingBuffer(arrays, device) for _ in range(2)]
        self._uploaded = [self._module.Event() for _ in self._turns]
        self._used = [self._module.Event() for _ in self._turns]
        self._turn = 0
        self._stream.wait_stream(self._module.current_stream(device))

    def next(self) -> StagingBuffer:
        """The buffer to fill next. Waits for the buffer's previous copy, two turns ago. Work on the other buffer must
        have been submitted to the device before this call."""
        self._used[self._turn].record(self._module.current_stream(self._device))
        self._turn = 1 - self._turn
        self._uploaded[self._turn].synchronize()
        return self._turns[self._turn]

    def upload(self) -> None:
        """Start copying the filled buffer on a separate stream. Later work on the current stream waits for the copy;
        the host does not."""
        self._stream.wait_event(self._used[self._turn])
        with self._module.stream(self._stream):
            self._turns[self._turn].upload()
        self._uploaded[self._turn].record(self._stream)
        self._module.current_stream(self._device).wait_event(self._uploaded[self._turn])
