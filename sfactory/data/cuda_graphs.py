"""CUDA graphs: work of many small kernels, a policy worker's forward pass or a learner's whole update, is recorded
once, and from then on launched with one call of the driver.

A recording reads and writes the memory that it was made with. So whatever changes between two calls lies in tensors
that stay where they are, and what follows from Python, a number or a choice, is as it was when the recording was made.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from sfactory.errors import said

Work = Callable[[], object]
"""Work on one device that always reads and writes the same memory."""
Step = Callable[[], Iterable[Tensor]]
"""Work that gives tensors, each as soon as it is there."""
WARM_UPS = 3
"""Runs before a recording, in which libraries choose their kernels and take their memory."""
SAME_CHANGE = 0.05
"""How far a recorded step may end from where the plain one does, in units of how far that goes."""
_failed = ""
"""What made a recording of this process fail; empty if none has."""
_log = logging.getLogger(__name__)


def record(work: Work, device: torch.device, pool: Any = None) -> Work:
    """Record what work that is warmed up does in the current stream of a CUDA device; the result repeats it. On the
    CPU: the work itself.

    Args:
        pool: Memory that recordings share which never run at the same time, and whose results lie outside of it
            (:func:`graph_pool`).

    Raises:
        RuntimeError: If work does what cannot be recorded, such as waiting for the device; says what it raised. After
            that nothing more is recorded in this process: PyTorch up to 2.11 goes on counting the failed recording as
            under way.
    """
    global _failed
    if device.type == "cpu":
        return work
    if _failed:
        raise RuntimeError(f"an earlier recording has failed in this process: {_failed}")
    graph, reason = torch.cuda.CUDAGraph(), ""
    # In this mode other threads may do with the device what they like meanwhile.
    stream = torch.cuda.current_stream(device)
    try:
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            try:
                work()
            except Exception as error:
                reason = said(error)  # the end of the recording raises another one, which says only that one was raised
                raise
    except Exception as error:
        _failed = reason or said(error)
        raise RuntimeError(_failed) from error
    return graph.replay


@contextlib.contextmanager
def refusing_waits(device: torch.device) -> Iterator[None]:
    """Work that waits for the device raises a RuntimeError, as far as PyTorch notices; unlike in a recording, that does
    no further harm."""
    if device.type != "cuda":
        yield
        return
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the first call warns that PyTorch does not notice all of them
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def graph_pool(device: torch.device) -> Any:
    """Memory of its own for recordings, or None on the CPU."""
    return torch.cuda.graph_pool_handle() if device.type == "cuda" else None


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
        self._pool = graph_pool(device)

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
            recorded = record(work, self._device, self._pool)
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


class PlainSteps:
    """Steps that are done as they come: what :class:`RecordedSteps` is where nothing is recorded."""

    def keep(self, name: Hashable, found: Tensor) -> Tensor:
        """The tensor itself, which nothing has to find again."""
        return found

    def __call__(self, name: str, source: Tensor, step: Step) -> list[Tensor]:
        """Do a step; gives what it gave."""
        return list(step())


class RecordedSteps:
    """Steps that change a state in place: the first ones of each kind are done plainly, which warms them up, and then
    they are recorded. A recording is used only if it changes the state as the plain step does.

    Args:
        device: Where steps are done.
        state: All that steps change, besides what they give.

    Attributes:
        enabled: Off after the first step that could not be recorded: from then on all are done plainly.
    """

    def __init__(self, device: torch.device, state: Sequence[Tensor]) -> None:
        self._device, self._own_state, self._pool = device, list(state), graph_pool(device)
        self._module = torch.get_device_module(device)
        self._stream = self._module.Stream(device)
        self._times: dict[Hashable, int] = {}
        self._recordings: dict[Hashable, Work] = {}
        self._kept: dict[Hashable, Tensor] = {}
        self._given: dict[str, list[Tensor]] = {}
        self.enabled = True

    def keep(self, name: Hashable, found: Tensor) -> Tensor:
        """Copy a tensor into memory that stays where it is, contiguous whatever the tensor is, so that its reshaped
        views stay there too; give that. Of another shape than before it gets new memory, and everything is recorded
        anew."""
        kept = self._kept.get(name)
        if kept is not None and kept.shape == found.shape:
            return kept.copy_(found.detach())
        if kept is not None:
            self._times.clear()
            self._recordings.clear()
            self._pool = graph_pool(self._device)
        self._kept[name] = found.detach().clone(memory_format=torch.contiguous_format)
        return self._kept[name]

    def __call__(self, name: str, source: Tensor, step: Step) -> list[Tensor]:
        """Do a step; gives what it gave, in memory that its next one writes anew.

        Args:
            name: Kind of step.
            source: What it reads, besides what is kept: a step must do the same whenever that lies in the same place
                and has the same shape.
        """
        kind = name, source.shape
        key = *kind, source.data_ptr()

        def work() -> None:
            self._given[name] = [self.keep((name, i), found) for i, found in enumerate(step())]

        if (recording := self._recordings.get(key)) is not None:
            recording()
        elif not self.enabled:
            work()
        elif (times := self._times.get(kind, 0)) < WARM_UPS:
            self._times[kind] = times + 1
            self._apart(work)
        else:
            self._apart(lambda: self._record(key, work))
        return self._given[name]

    def _apart(self, work: Work) -> None:
        """Do work in a stream of its own, since nothing can be recorded in the default one."""
        current = self._module.current_stream(self._device)
        self._stream.wait_stream(current)
        with self._module.stream(self._stream):
            work()
        current.wait_stream(self._stream)

    def _record(self, key: Hashable, work: Work) -> None:
        """Do a step plainly and once more, from the same state, recorded; then keep the recording if both are alike."""
        state = [x.detach() for x in (*self._own_state, *self._kept.values())]
        before = [x.clone() for x in state]
        try:
            with refusing_waits(self._device):
                work()
        except RuntimeError as error:
            self._restore(state, before)
            work()
            self._give_up(error)
            return
        expected = [x.clone() for x in state]
        self._restore(state, before)
        try:
            recording = record(work, self._device, self._pool)
            recording()
            if any(map(self._differs, state, expected, before)):
                raise RuntimeError("it gives other numbers when it is replayed")
        except Exception as error:
            self._restore(state, expected)
            self._give_up(error)
            return
        self._recordings[key] = recording

    def _give_up(self, error: Exception) -> None:
        self.enabled = False
        reason = said(error).strip().partition("\n")[0]
        _log.warning("no CUDA graphs in the learner, which launches its operations one by one: %s", reason)

    @staticmethod
    def _restore(state: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        with torch.no_grad():
            for own, value in zip(state, values, strict=True):
                own.copy_(value)

    @staticmethod
    def _differs(found: Tensor, expected: Tensor, before: Tensor) -> bool:
        """Whether something has not changed as it should. Sums in another order differ by little of that."""
        found, expected, before = (torch.nan_to_num(x.double(), 1e9, 2e9, -2e9) for x in (found, expected, before))
        limit = SAME_CHANGE * (expected - before).norm() + 1e-6 * expected.norm()
        return bool((found - expected).norm() > limit)
