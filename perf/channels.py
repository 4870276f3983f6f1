"""Ways to pass an integer between forked processes, for perf/queues.py: the queue that the trainer uses, and others."""

from __future__ import annotations

import fcntl
import mmap
import multiprocessing
import os
import queue
import select
import struct
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from numba import njit, types
from numba.extending import intrinsic

from sfactory.data.queues import IndexQueue

FORK = multiprocessing.get_context("fork")
CAPACITY = 4096
WRITERS = 2


class Channel(Protocol):
    """A queue of integers that forked processes share.

    Attributes:
        writer: Which of its writers this process is; only rings, which have one for each, look at it.
    """

    writer: int

    def put_many(self, values: Sequence[int]) -> None: ...

    def get_many(self, timeout: float | None) -> list[int]: ...


class FasterFifo(IndexQueue):
    """As the trainer uses it."""

    writer = 0

    def __init__(self) -> None:
        super().__init__(CAPACITY)


class StandardQueue:
    """multiprocessing.Queue: a thread of the writer pickles and sends. A block of values is one message."""

    writer = 0

    def __init__(self) -> None:
        self._queue = FORK.Queue(CAPACITY)

    def put_many(self, values: Sequence[int]) -> None:
        self._queue.put(values)

    def get_many(self, timeout: float | None) -> list[int]:
        try:
            return list(self._queue.get(timeout=timeout))
        except queue.Empty:
            return []


class SimpleQueue:
    """multiprocessing.SimpleQueue: a pipe, pickles and two locks. A block of values is one message; it knows no
    timeout."""

    writer = 0

    def __init__(self) -> None:
        self._queue = FORK.SimpleQueue()

    def put_many(self, values: Sequence[int]) -> None:
        self._queue.put(values)

    def get_many(self, timeout: float | None) -> list[int]:
        return list(self._queue.get())


class Pipe:
    """A bare pipe of 8-byte integers, for any number of writers and readers.

    It has no lock in user space. The kernel writes at most PIPE_BUF bytes as a whole or not at all, and every read
    takes whole messages, since nothing else is ever written.
    """

    writer = 0
    _MOST = select.PIPE_BUF // 8

    def __init__(self) -> None:
        self._reader, self._writer_end = os.pipe2(os.O_NONBLOCK)
        self._bytes = fcntl.fcntl(self._writer_end, fcntl.F_SETPIPE_SZ, 8 * CAPACITY)
        self._readable, self._writable = select.poll(), select.poll()
        self._readable.register(self._reader, select.POLLIN)
        self._writable.register(self._writer_end, select.POLLOUT)

    def put_many(self, values: Sequence[int]) -> None:
        for begin in range(0, len(values), self._MOST):
            part = values[begin : begin + self._MOST]
            data = struct.pack(f"<{len(part)}q", *part)
            while True:
                try:
                    os.write(self._writer_end, data)
                    break
                except BlockingIOError:
                    self._writable.poll()

    def get_many(self, timeout: float | None) -> list[int]:
        try:
            data = os.read(self._reader, self._bytes)
        except BlockingIOError:
            if not self._readable.poll(None if timeout is None else 1000 * timeout):
                return []
            try:
                data = os.read(self._reader, self._bytes)
            except BlockingIOError:  # another reader was quicker
                return []
        return list(struct.unpack(f"<{len(data) // 8}q", data))

    def __del__(self) -> None:
        os.close(self._reader)
        os.close(self._writer_end)


@intrinsic
def _fence(typing_context):
    """Makes what was stored before visible before anything after it is loaded."""

    def generate(context, builder, signature, arguments):
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), generate


HEAD, TAIL, FIRST = 0, 8, 16
"""Places in a ring, an int64 array: messages taken, messages put (each in a cache line of its own), and the first of
CAPACITY messages."""


@njit
def _ring_put(ring, sleeping, values):
    """Append all values if there is room. Returns -1 if there is none, 1 if the reader is asleep, else 0."""
    tail = ring[TAIL]
    if tail + len(values) - ring[HEAD] > CAPACITY:
        return -1
    for i in range(len(values)):
        ring[FIRST + (tail + i) % CAPACITY] = values[i]
    _fence()
    ring[TAIL] = tail + len(values)
    _fence()
    return sleeping[0]


@njit
def _rings_get(rings, sleeping, out, sleep):
    """Take what waits in all rings; returns how many. With `sleep`, say before the last look that the reader is about
    to sleep."""
    sleeping[0] = sleep
    _fence()
    count = 0
    for w in range(len(rings)):
        head, tail = rings[w, HEAD], rings[w, TAIL]
        _fence()
        for i in range(head, tail):
            out[count] = rings[w, FIRST + i % CAPACITY]
            count += 1
        _fence()
        rings[w, HEAD] = tail
    return count


class Ring:
    """One ring in shared memory for each writer, one reader, no lock; a sleeping reader is woken by a subclass's means.

    Compiled code keeps the order of loads and stores. A full ring is waited for by giving up the processor again and
    again.
    """

    writer = 0

    def __init__(self) -> None:
        shape = (WRITERS, FIRST + CAPACITY)
        self._rings = np.frombuffer(mmap.mmap(-1, 8 * shape[0] * shape[1]), np.int64).reshape(shape)
        self._sleeping = np.frombuffer(mmap.mmap(-1, 64), np.int64)
        self._out = np.empty(WRITERS * CAPACITY, np.int64)

    def put_many(self, values: Sequence[int]) -> None:
        array = np.array(values, np.int64)
        while (state := _ring_put(self._rings[self.writer], self._sleeping, array)) < 0:
            os.sched_yield()
        if state:
            self._wake()

    def get_many(self, timeout: float | None) -> list[int]:
        count = _rings_get(self._rings, self._sleeping, self._out, 0)
        if not count:
            count = _rings_get(self._rings, self._sleeping, self._out, 1)
            if not count:
                self._sleep(timeout)
                count = _rings_get(self._rings, self._sleeping, self._out, 0)
        return self._out[:count].tolist()

    def _wake(self) -> None:
        raise NotImplementedError

    def _sleep(self, timeout: float | None) -> None:
        raise NotImplementedError


class EventfdRing(Ring):
    """The reader sleeps on an eventfd."""

    def __init__(self) -> None:
        super().__init__()
        self._event = os.eventfd(0, os.EFD_NONBLOCK)
        self._readable = select.poll()
        self._readable.register(self._event, select.POLLIN)

    def _wake(self) -> None:
        os.eventfd_write(self._event, 1)

    def _sleep(self, timeout: float | None) -> None:
        if self._readable.poll(None if timeout is None else 1000 * timeout):
            os.eventfd_read(self._event)

    def __del__(self) -> None:
        os.close(self._event)


class SemaphoreRing(Ring):
    """The reader sleeps on a POSIX semaphore, which is a futex."""

    def __init__(self) -> None:
        super().__init__()
        self._semaphore = FORK.Semaphore(0)

    def _wake(self) -> None:
        self._semaphore.release()

    def _sleep(self, timeout: float | None) -> None:
        self._semaphore.acquire(timeout=timeout)


CHANNELS: dict[str, Callable[[], Channel]] = {
    "faster-fifo (as used)": FasterFifo,
    "multiprocessing.Queue": StandardQueue,
    "multiprocessing.SimpleQueue": SimpleQueue,
    "pipe": Pipe,
    "ring, eventfd": EventfdRing,
    "ring, semaphore": SemaphoreRing,
}
