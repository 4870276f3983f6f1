"""Arrays that travel together between the host and a device: one block of memory on each side, one copy for all of
them.

A copy of a few hundred bytes to a GPU takes about as long as one of a hundred kilobytes, so a batch's many fields are
put side by side. The host's blocks are pinned, because only from pinned memory does a copy run by itself. Everything
here runs on the CPU too, where the tests hold it to the plain way; torch's streams and events of the CPU do nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

ALIGNMENT = 64


def torch_dtype(dtype: np.dtype) -> torch.dtype:
    """torch's name of a NumPy dtype."""
    return torch.from_numpy(np.empty(0, dtype)).dtype


class Packed:
    """Arrays of one block of host memory, and tensors of the same shapes in one block of a device.

    Args:
        arrays: Shape and dtype of each.
        device: Of the tensors.
        staged: Off: there is one block alone, on the CPU, and the tensors are views of the arrays.

    Attributes:
        arrays: In host memory, pinned for CUDA; zero at first.
        tensors: On the device.
    """

    def __init__(
        self, arrays: Sequence[tuple[tuple[int, ...], np.dtype]], device: torch.device, staged: bool = True
    ) -> None:
        sizes = [math.prod(shape) * np.dtype(dtype).itemsize for shape, dtype in arrays]
        begins = np.cumsum([0, *(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes)]).tolist()
        self._ends = [begin + size for begin, size in zip(begins, sizes, strict=False)]
        self._host = torch.zeros(begins[-1], dtype=torch.uint8, pin_memory=device.type == "cuda")
        self._on_device = torch.zeros(begins[-1], dtype=torch.uint8, device=device) if staged else self._host
        places = list(zip(begins, self._ends, arrays, strict=False))
        memory = self._host.numpy()
        self.arrays = [memory[begin:end].view(dtype).reshape(shape) for begin, end, (shape, dtype) in places]
        self.tensors = [
            self._on_device[begin:end].view(torch_dtype(dtype)).view(shape) for begin, end, (shape, dtype) in places
        ]

    def upload(self) -> None:
        """Begin to copy all arrays to the device, in the current stream."""
        if self._on_device is not self._host:
            self._on_device.copy_(self._host, non_blocking=True)

    def download(self, count: int) -> None:
        """Begin to copy the first so many tensors to the host, in the current stream."""
        end = self._ends[count - 1]
        if self._on_device is not self._host:
            self._host[:end].copy_(self._on_device[:end], non_blocking=True)


class PackedInTurns:
    """Two :class:`Packed` in turn: while the device still uses one, or its copy is under way, the other is filled and
    copied.

    Args:
        arrays: Shape and dtype of each.
        device: Of the tensors.
    """

    def __init__(self, arrays: Sequence[tuple[tuple[int, ...], np.dtype]], device: torch.device) -> None:
        self._device, self._module = device, torch.get_device_module(device)
        self._stream = self._module.Stream(device)
        self._turns = [Packed(arrays, device) for _ in range(2)]
        self._uploaded = [self._module.Event() for _ in self._turns]
        self._used = [self._module.Event() for _ in self._turns]
        self._turn = 0
        self._stream.wait_stream(self._module.current_stream(device))

    def next(self) -> Packed:
        """The one to fill; waits until its own last copy, two turns ago, is done. The device may be given work on the
        other until now."""
        self._used[self._turn].record(self._module.current_stream(self._device))
        self._turn = 1 - self._turn
        self._uploaded[self._turn].synchronize()
        return self._turns[self._turn]

    def upload(self) -> None:
        """Copy what was filled, in a stream of its own; the current stream's work from here on waits for the copy, the
        host does not."""
        self._stream.wait_event(self._used[self._turn])
        with self._module.stream(self._stream):
            self._turns[self._turn].upload()
        self._uploaded[self._turn].record(self._stream)
        self._module.current_stream(self._device).wait_event(self._uploaded[self._turn])
