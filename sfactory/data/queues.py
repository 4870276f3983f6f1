"""Queues of integers: slots, groups and packed requests, the only messages between workers.

A full queue blocks its writer, which is counted, unless that asks for what does not fit; no message is ever dropped. A
reader takes all waiting messages with one call. There are three kinds:

- :class:`IndexQueue`, based on faster-fifo, between sampling processes. A process that is killed while it holds the
  queue's lock leaves it locked forever (11 of 1,000 kills of a process that put without pause), so the queue and all
  processes that use it are replaced.
- :class:`PipeQueue`, between the learner and the rollout workers. It has no lock outside the kernel, so the learner
  survives the death of a process at the other end, at any instruction.
- :class:`LocalQueue`, within one process.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import os
import select
import struct
import termios
from collections import deque
from collections.abc import Sequence
from multiprocessing import reduction
from queue import Empty, Full
from typing import Any, Protocol

import faster_fifo
import faster_fifo_reduction  # noqa: F401  lets queues travel to spawned processes

_PACKED = struct.Struct("<q")
_HEADER_BYTES = 8
_PER_WRITE = select.PIPE_BUF // _PACKED.size
_PER_READ = 1 << 13
_PIPE_BYTES = 1 << 16


def _pack(value: int) -> bytes:
    return _PACKED.pack(value)


def _unpack(data: bytes | memoryview) -> int:
    return _PACKED.unpack(data)[0]


class Queue(Protocol):
    """The interface of all queues.

    Attributes:
        full_waits: Number of puts of this process that found the queue full.
    """

    full_waits: int

    def __len__(self) -> int:
        """Number of waiting messages; takes no lock."""

    def put_many(self, values: Sequence[int]) -> None:
        """Append all values; waits while the queue is full."""

    def put_some(self, values: Sequence[int]) -> list[int]:
        """Append as many values as fit without a wait, in order; gives the others."""

    def get_many(self, timeout: float | None, most: int = 1_000_000) -> list[int]:
        """Take waiting messages.

        Args:
            timeout: Longest wait for the first message in seconds; 0: no wait; None: no limit.
            most: Most messages to take.

        Returns:
            The messages in order; empty after the timeout.
        """


class IndexQueue:
    """A queue between processes with many writers and many readers, first in first out.

    Args:
        capacity: Least number of messages that fit.
    """

    def __init__(self, capacity: int) -> None:
        bytes_needed = (capacity + 1) * (_PACKED.size + _HEADER_BYTES)
        self._queue = faster_fifo.Queue(max_size_bytes=max(bytes_needed, 1024), loads=_unpack, dumps=_pack)
        self.full_waits = 0

    def __len__(self) -> int:
        return self._queue.qsize()

    def put_many(self, values: Sequence[int]) -> None:
        try:
            self._queue.put_many_nowait(values)
        except Full:
            self.full_waits += 1
            self._queue.put_many(values, block=True, timeout=1e9)

    def put_some(self, values: Sequence[int]) -> list[int]:
        for i, value in enumerate(values):
            try:
                self._queue.put_nowait(value)
            except Full:
                return list(values[i:])
        return []

    def get_many(self, timeout: float | None, most: int = 1_000_000) -> list[int]:
        try:
            if timeout == 0:
                return self._queue.get_many_nowait(max_messages_to_get=most)
            return self._queue.get_many(
                block=True, timeout=1e9 if timeout is None else timeout, max_messages_to_get=most
            )
        except Empty:
            return []


class PipeQueue:
    """A queue between processes over a pipe of 8-byte integers.

    The kernel writes up to ``PIPE_BUF`` bytes as a whole or not at all, and no read takes a part of an integer.
    Messages that a process had read before it was killed are lost; :func:`sfactory.data.scheduler.reclaim_slots`
    recovers them.

    Args:
        capacity: Messages that should fit. Beyond the system's limit (/proc/sys/fs/pipe-max-size) writers wait sooner.
    """

    def __init__(self, capacity: int) -> None:
        self._attach(*os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC))
        with contextlib.suppress(OSError):
            # Twice the size, because a write that does not fit into the last page begins a new one.
            fcntl.fcntl(self._write_end, fcntl.F_SETPIPE_SZ, max(_PIPE_BYTES, 2 * capacity * _PACKED.size))

    def _attach(self, read_end: int, write_end: int) -> None:
        self._read_end, self._write_end = read_end, write_end
        self.full_waits = 0
        self._readable, self._writable = select.poll(), select.poll()
        self._readable.register(read_end, select.POLLIN)
        self._writable.register(write_end, select.POLLOUT)

    def __getstate__(self) -> tuple[Any, Any]:
        return reduction.DupFd(self._read_end), reduction.DupFd(self._write_end)

    def __setstate__(self, ends: tuple[Any, Any]) -> None:
        read_end, write_end = ends
        self._attach(read_end.detach(), write_end.detach())

    def __del__(self) -> None:
        for end in (getattr(self, "_read_end", None), getattr(self, "_write_end", None)):
            if end is not None:
                os.close(end)

    def __len__(self) -> int:
        waiting = array.array("i", [0])
        fcntl.ioctl(self._read_end, termios.FIONREAD, waiting)
        return waiting[0] // _PACKED.size

    def put_many(self, values: Sequence[int]) -> None:
        for begin in range(0, len(values), _PER_WRITE):
            part = values[begin : begin + _PER_WRITE]
            while not self._write(part):
                self.full_waits += 1
                self._writable.poll()

    def put_some(self, values: Sequence[int]) -> list[int]:
        for begin in range(0, len(values), _PER_WRITE):
            if not self._write(values[begin : begin + _PER_WRITE]):
                return list(values[begin:])
        return []

    def _write(self, values: Sequence[int]) -> bool:
        """Append a few values if there is room for all of them."""
        try:
            return bool(os.write(self._write_end, struct.pack(f"<{len(values)}q", *values)))
        except BlockingIOError:
            return False

    def get_many(self, timeout: float | None, most: int = 1_000_000) -> list[int]:
        data = self._read(most)
        if not data and timeout != 0 and self._readable.poll(None if timeout is None else 1000 * timeout):
            data = self._read(most)
        return list(struct.unpack(f"<{len(data) // _PACKED.size}q", data))

    def _read(self, most: int) -> bytes:
        try:
            return os.read(self._read_end, _PACKED.size * min(most, _PER_READ))
        except BlockingIOError:  # the pipe is empty, or another reader was faster
            return b""


class LocalQueue:
    """A queue within one process. It never waits, since nothing in the same process could end the wait."""

    def __init__(self) -> None:
        self._values: deque[int] = deque()
        self.full_waits = 0

    def __len__(self) -> int:
        return len(self._values)

    def put_many(self, values: Sequence[int]) -> None:
        self._values.extend(values)

    def put_some(self, values: Sequence[int]) -> list[int]:
        self._values.extend(values)
        return []

    def get_many(self, timeout: float | None, most: int = 1_000_000) -> list[int]:
        count = min(most, len(self._values))
        return [self._values.popleft() for _ in range(count)]


def pack_request(slot: int, group: int, step: int, value_only: bool = False) -> int:
    """Pack a group's request for actions, or only for values, into one integer: slot | group | step | value_only.

    Args:
        slot: Slot of the group's segment, below 2**22.
        group: Number of the group in the run, below 2**20.
        step: Step of the segment, below 2**20.
        value_only: Whether only values are requested.
    """
    return ((slot << 20 | group) << 20 | step) << 1 | value_only


def unpack_request(message: int) -> tuple[int, int, int, bool]:
    """(slot, group, step, value_only) of a packed request."""
    return message >> 41, message >> 21 & 0xFFFFF, message >> 1 & 0xFFFFF, bool(message & 1)
