"""CUDA graphs: a forward pass of some twenty small kernels is recorded once, and from then on launched with one call of
the driver."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Work = Callable[[], object]
"""Work on one device that always reads and writes the same memory."""
WARM_UPS = 3
"""Runs before a recording, in which libraries choose their kernels and take their memory."""
_log = logging.getLogger(__name__)


def record(work: Work, device: torch.device) -> Work:
    """Record what work that is warmed up does in the current stream of a CUDA device; the result repeats it. On the
    CPU: the work itself.

    Raises:
        Exception: Whatever work raises when it does what cannot be recorded, such as waiting for the device. After that
            nothing more
            may be recorded in this process: PyTorch up to 2.11 goes on counting the failed recording as under way.
    """
    if device.type == "cpu":
        return work
    graph = torch.cuda.CUDAGraph()
    # In this mode other threads may do with the device what they like meanwhile.
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream(device), capture_error_mode="thread_local"):
        work()
    return graph.replay


class Recorder:
    """Records work where that is possible and right; otherwise it leaves work as it is, from then on, and says why.

    Args:
        device: Where work is done.
        tolerance: Largest difference between a result and that of its recording, in units of the largest number in it
            (at least 1).
        enabled: Off: nothing is recorded.

    Attributes:
        enabled: The same, and off after the first work that could not be recorded.
    """

    def __init__(self, device: torch.device, tolerance: float, enabled: bool = True) -> None:
        self._device, self._tolerance, self.enabled = device, tolerance, enabled

    def __call__(self, work: Work, results: Sequence[Tensor]) -> Work:
        """Work that does the same, recorded if it can be.

        Args:
            work: Is run a few times.
            results: Floats that it writes. A recording that gives other ones, as of work that draws random numbers or
                depends on more than its memory, is not used.
        """
        if not self.enabled:
            return work
        for _ in range(WARM_UPS):
            work()
        expected = [result.clone() for result in results]
        try:
            recorded = record(work, self._device)
        except Exception as error:
            return self._give_up(work, f"cannot be recorded: {error}")
        for result in results:
            result.fill_(float("nan"))
        recorded()
        if not all(map(self._equal, results, expected)):
            return self._give_up(work, "gives other numbers when it is replayed")
        return recorded

    def _equal(self, result: Tensor, expected: Tensor) -> bool:
        limit = self._tolerance * expected.abs().max().clamp(min=1.0)
        return bool((result - expected).abs().max() <= limit)

    def _give_up(self, work: Work, reason: str) -> Work:
        self.enabled = False
        _log.warning("no CUDA graphs: the model %s; its operations are launched one by one", reason)
        return work
