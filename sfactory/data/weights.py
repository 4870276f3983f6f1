"""Weights as one flat vector: for publishing, for copying, and for one optimizer step over all of them.

Contract of concurrent access to a :class:`WeightBoard`: one writer, any number of readers, no lock. Versions alternate
between two buffers. The writer announces the version it begins to write, fills that buffer, then announces it as
complete. A reader copies the buffer of the complete version and keeps the copy unless the writer has meanwhile begun
the version after next, which would use the same buffer.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor, nn

from sfactory.data.shared_memory import SharedArray

_BEGUN, _COMPLETE, _VERSIONS = 0, 1, 2


def _float_tensors(module: nn.Module) -> Iterator[Tensor]:
    """Parameters, then float buffers (running statistics), in a fixed order."""
    yield from module.parameters()
    yield from (buffer for buffer in module.buffers() if buffer.is_floating_point())


class FlatWeights:
    """The parameters and float buffers of a module, moved into one flat float32 vector of which they become views.

    Memory formats survive: a channels-last convolution stays channels-last.

    Attributes:
        vector: float32 ``[size]`` on the module's device.
        parameters: The part of it that the optimizer owns, as one leaf tensor; its gradient is a flat vector too, of
            which the gradients of the module's parameters are views.
    """

    def __init__(self, module: nn.Module, gradients: bool = False) -> None:
        tensors = list(_float_tensors(module))
        count = sum(p.numel() for p in module.parameters())
        self.vector = torch.cat([_storage_order(t.detach()) for t in tensors]).float() if tensors else torch.zeros(0)
        self.parameters = self.vector[:count].requires_grad_(gradients) if gradients else self.vector[:count]
        if gradients:
            self.parameters.grad = torch.zeros_like(self.parameters)
        offset = 0
        for tensor in tensors:
            shape, stride, here = tensor.shape, tensor.stride(), offset
            tensor.data = self.vector.detach().as_strided(shape, stride, here)
            if gradients and isinstance(tensor, nn.Parameter):
                tensor.grad = self.parameters.grad.as_strided(shape, stride, here)
            offset += tensor.numel()


def _storage_order(tensor: Tensor) -> Tensor:
    """A dense tensor's elements in the order in which they lie in memory."""
    return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())


class WeightBoard:
    """The learner's newest weights, for every policy worker.

    Args:
        size: Floats in the flat vector.
    """

    def __init__(self, size: int) -> None:
        self._header = SharedArray((4,), np.int64)
        self._buffers = SharedArray((2, size), np.float32)

    @property
    def version(self) -> int:
        """The newest complete version."""
        header = self._header.array
        return int(header[_VERSIONS + header[_COMPLETE] % 2])

    def publish(self, vector: Tensor, version: int) -> None:
        """Make a copy of the weights the newest version. Only the learner calls this.

        Args:
            vector: float32 ``[size]``, on any device.
            version: Not below the last one; the number of learner updates behind the weights.
        """
        header = self._header.array
        turn = int(header[_COMPLETE]) + 1
        header[_BEGUN] = turn
        torch.from_numpy(self._buffers.array[turn % 2]).copy_(vector.detach())
        header[_VERSIONS + turn % 2] = version
        header[_COMPLETE] = turn

    def read(self, out: Tensor) -> int:
        """Copy the newest complete version into a vector and return its number.

        Args:
            out: float32 ``[size]``, on any device.
        """
        header = self._header.array
        while True:
            turn = int(header[_COMPLETE])
            out.copy_(torch.from_numpy(self._buffers.array[turn % 2]))
            version = int(header[_VERSIONS + turn % 2])
            if int(header[_BEGUN]) <= turn + 1:
                return version


class Publisher:
    """The learner's side of a :class:`WeightBoard`: publishes a vector that goes on to change, and need not wait for
    its device.

    From the CPU a version is published at once. From CUDA it is copied to pinned memory once the device has done what
    it was given so far, and goes on the board at the first :meth:`finish` after that.

    Args:
        board: Of the run.
        vector: float32 ``[size]``, on any device.
        staged: Whether copies go by a memory of their own; unset: from CUDA.
    """

    def __init__(self, board: WeightBoard, vector: Tensor, staged: bool | None = None) -> None:
        on_cuda = vector.device.type == "cuda"
        self._board, self._vector, self._pending = board, vector.detach(), -1
        self._host = torch.empty(vector.shape, pin_memory=on_cuda) if (on_cuda if staged is None else staged) else None
        self._module = torch.get_device_module(vector.device)
        self._copied = self._module.Event()

    def publish(self, version: int) -> None:
        """Begin to publish the weights as they are after all that the device has been given. What was begun before is
        finished first."""
        self.finish()
        if self._host is None:
            self._board.publish(self._vector, version)
            return
        self._host.copy_(self._vector, non_blocking=True)
        self._copied.record(self._module.current_stream(self._vector.device))
        self._pending = version

    def offer(self, version: int) -> None:
        """:meth:`publish`, unless an older version is still on its way from the device: nobody waits for what will soon
        be out of date."""
        self.finish(wait=False)
        if self._pending < 0:
            self.publish(version)

    def finish(self, wait: bool = True) -> None:
        """Put on the board what was begun; unless told to wait, only if its copy is done."""
        if self._pending >= 0 and (wait or self._copied.query()):
            self._copied.synchronize()
            self._board.publish(self._host, self._pending)
            self._pending = -1
