"""Weights as one flat vector, and their publication from the learner to the policy workers.

Concurrent access to :class:`PublishedWeights`: one writer, any number of readers, no lock. Publications alternate
between two buffers. The writer announces the publication it begins, fills its buffer, then announces it as complete. A
reader copies the buffer of the complete publication, and repeats that if the writer has meanwhile begun the publication
after next, which uses the same buffer.

A barrier stands between an announcement and the buffer that it is about.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor, nn

from sfactory.data.memory_order import barrier
from sfactory.data.shared_memory import SharedArray

_BEGUN, _COMPLETE, _VERSIONS = 0, 1, 2


def _float_tensors(module: nn.Module) -> Iterator[Tensor]:
    """Parameters, then floating-point buffers (running statistics), in a fixed order."""
    yield from module.parameters()
    yield from (buffer for buffer in module.buffers() if buffer.is_floating_point())


class FlatWeights:
    """Moves parameters and floating-point buffers of a module into one flat float32 vector, of which they become views.

    Memory formats are kept: a channels-last convolution stays channels-last.

    Args:
        module: The module.
        gradients: Whether to allocate gradients of the parameters, as views of one flat vector too.

    Attributes:
        vector: float32 ``[size]`` on the module's device.
        parameters: The part of the vector that the optimizer owns, as one leaf tensor.
        gradient: Its ``grad``, of which the gradients of the module's parameters are views; empty without `gradients`.
    """

    def __init__(self, module: nn.Module, gradients: bool = False) -> None:
        tensors = list(_float_tensors(module))
        count = sum(p.numel() for p in module.parameters())
        self.vector = torch.cat([_storage_order(t.detach()) for t in tensors]).float() if tensors else torch.zeros(0)
        self.parameters = self.vector[:count].requires_grad_(gradients) if gradients else self.vector[:count]
        self.gradient = torch.zeros_like(self.parameters) if gradients else torch.zeros(0)
        if gradients:
            self.parameters.grad = self.gradient
        offset = 0
        for tensor in tensors:
            shape, stride, here = tensor.shape, tensor.stride(), offset
            tensor.data = self.vector.detach().as_strided(shape, stride, here)
            if gradients and isinstance(tensor, nn.Parameter):
                tensor.grad = self.gradient.as_strided(shape, stride, here)
            offset += tensor.numel()


def _storage_order(tensor: Tensor) -> Tensor:
    """The elements of a dense tensor in memory order."""
    return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())


class PublishedWeights:
    """The newest weights of the learner in shared memory, for every policy worker.

    Args:
        size: Length of the flat vector.
    """

    def __init__(self, size: int) -> None:
        self._header = SharedArray((4,), np.int64)
        self._buffers = SharedArray((2, size), np.float32)

    @property
    def version(self) -> int:
        """The newest complete version; 0 before the first publication."""
        return self._newest(lambda buffer: None)

    def publish(self, vector: Tensor, version: int) -> None:
        """Publish a copy of the weights as the newest version. Only the learner calls this.

        Args:
            vector: float32 ``[size]``, on any device.
            version: Number of learner updates behind the weights. It never decreases.
        """
        header = self._header.array
        turn = int(header[_COMPLETE]) + 1
        header[_BEGUN] = turn
        barrier()
        torch.from_numpy(self._buffers.array[turn % 2]).copy_(vector.detach())
        header[_VERSIONS + turn % 2] = version
        barrier()
        header[_COMPLETE] = turn

    def read(self, out: Tensor) -> int:
        """Copy the newest complete version into a vector, and return the version.

        Args:
            out: float32 ``[size]``, on any device.
        """
        return self._newest(lambda buffer: out.copy_(torch.from_numpy(buffer)))

    def _newest(self, take: Callable[[np.ndarray], object]) -> int:
        """Take what is wanted of the newest complete version's buffer, again if it was overwritten meanwhile."""
        header = self._header.array
        while True:
            turn = int(header[_COMPLETE])
            barrier()
            take(self._buffers.array[turn % 2])
            version = int(header[_VERSIONS + turn % 2])
            barrier()
            if int(header[_BEGUN]) <= turn + 1:
                return version


class WeightPublisher:
    """Publishes the learner's weights without waiting for its device, while the weights go on changing.

    From the CPU a version is published at once. From CUDA it is copied to pinned memory after all work submitted so
    far, and published by the first :meth:`finish` after that copy.

    Args:
        published: Where to publish.
        vector: float32 ``[size]``, on any device.
        staged: Whether to copy through pinned memory; None: on CUDA only.
    """

    def __init__(self, published: PublishedWeights, vector: Tensor, staged: bool | None = None) -> None:
        on_cuda = vector.device.type == "cuda"
        self._published, self._vector, self._pending = published, vector.detach(), -1
        self._host = torch.empty(vector.shape, pin_memory=on_cuda) if (on_cuda if staged is None else staged) else None
        self._module = torch.get_device_module(vector.device)
        self._copied = self._module.Event()

    def publish(self, version: int) -> None:
        """Start publishing the weights as of all work submitted so far. A pending publication is finished first."""
        self.finish()
        if self._host is None:
            self._published.publish(self._vector, version)
            return
        self._host.copy_(self._vector, non_blocking=True)
        self._copied.record(self._module.current_stream(self._vector.device))
        self._pending = version

    def offer(self, version: int) -> None:
        """:meth:`publish`, unless an older version is still being copied from the device: waiting for it is not worth a
        version that is soon outdated."""
        self.finish(wait=False)
        if self._pending < 0:
            self.publish(version)

    def finish(self, wait: bool = True) -> None:
        """Complete a pending publication.

        Args:
            wait: Wait for its copy. Otherwise nothing happens while the copy is still running.
        """
        if self._host is not None and self._pending >= 0 and (wait or self._copied.query()):
            self._copied.synchronize()
            self._published.publish(self._host, self._pending)
            self._pending = -1
