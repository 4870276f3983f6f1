"""A device that does its work as late as it may, or in its other streams as early, for tests of what CUDA does at its
own time.

Work goes into streams. A late stream does it when somebody waits for it, and only as much of it as he waits for; an
eager one at once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch


class Event:
    """A place in a stream."""

    def __init__(self) -> None:
        self._stream: Stream | None = None
        self._place = 0

    def record(self, stream: Stream) -> None:
        self._stream, self._place = stream, stream.given

    def query(self) -> bool:
        return self._stream is None or self._stream.done >= self._place

    def synchronize(self) -> None:
        if self._stream is not None:
            self._stream.run_to(self._place)


class Stream:
    """Work in order."""

    def __init__(self, eager: bool) -> None:
        self._work: list[Callable[[], object]] = []
        self._eager, self.done = eager, 0

    @property
    def given(self) -> int:
        return len(self._work)

    def give(self, work: Callable[[], object]) -> None:
        self._work.append(work)
        if self._eager:
            self.run_to(self.given)

    def run_to(self, place: int) -> None:
        while self.done < place:
            self.done += 1
            self._work[self.done - 1]()

    def wait_event(self, event: Event) -> None:
        waited = Event()
        waited._stream, waited._place = event._stream, event._place
        self.give(waited.synchronize)

    def wait_stream(self, stream: Stream) -> None:
        event = Event()
        event.record(stream)
        self.wait_event(event)


class LateDevice:
    """Stands in for ``torch.cuda``: what ``torch.get_device_module`` gives.

    Args:
        eager: Whether streams are eager; the default stream is always late.
    """

    Event = Event

    def __init__(self, eager: bool) -> None:
        self._eager = eager
        self.current = self.default = Stream(eager=False)

    def Stream(self, *_: object) -> Stream:
        return Stream(self._eager)

    def current_stream(self, *_: object) -> Stream:
        return self.current

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        self.current, before = stream, self.current
        try:
            yield
        finally:
            self.current = before

    def later(self, work: Callable[..., object]) -> Callable[..., None]:
        """A function that only gives its work, of tensors without gradients, to the current stream."""
        work = torch.inference_mode()(work)
        return lambda *args, **kwargs: self.current.give(lambda: work(*args, **kwargs))
