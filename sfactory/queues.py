"""Queues of small integers: the only thing that travels between workers.

:class:`IndexQueue` is a faster-fifo queue between processes, :class:`LocalQueue` the same within one process. A full queue blocks
its writer and is counted; no message is ever dropped. Readers take all that is waiting with one call.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Sequence
from queue import Empty, Full
from typing import Protocol

import faster_fifo
import faster_fifo_reduction  # noqa: F401  lets queues travel to spawned processes

_PACKED = struct.Struct("<q")
_HEADER_BYTES = 8


def _pack(value: int) -> bytes:
    return _PACKED.pack(value)


def _unpack(data: bytes | memoryview) -> int:
    return _PACKED.unpack(data)[0]


class Queue(Protocol):
    """What workers need of a queue.

    Attributes:
        full_waits: How often a put of this process found the queue full.
    """

    full_waits: int

    def __len__(self) -> int:
        """Values that are waiting, at this moment; takes no lock."""

    def put_many(self, values: Sequence[int]) -> None:
        """Append all values, waiting for room if need be."""

    def get_many(self, timeout: float | None, most: int = 1_000_000) -> list[int]:
        """Take what is waiting, at most `most`; if nothing is, wait up to `timeout` seconds (0: not at all). Empty after that."""


class IndexQueue:
    """Integers between processes, many writers and many readers, first in first out.

    Args:
        capacity: Messages that fit at least.
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

    def get_many(self, timeout: float | None, most: int = 1_000_000) -> list[int]:
        try:
            if timeout == 0:
                return self._queue.get_many_nowait(max_messages_to_get=most)
            return self._queue.get_many(block=True, timeout=1e9 if timeout is None else timeout, max_messages_to_get=most)
        except Empty:
            return []


class LocalQueue:
    """The same within one process. It never waits: in one process nobody could end the wait."""

    def __init__(self) -> None:
        self._values: deque[int] = deque()
        self.full_waits = 0

    def __len__(self) -> int:
        return len(self._values)

    def put_many(self, values: Sequence[int]) -> None:
        self._values.extend(values)

    def get_many(self, timeout: float | None, most: int = 1_000_000) -> list[int]:
        count = min(most, len(self._values))
        return [self._values.popleft() for _ in range(count)]


def pack_request(slot: int, group: int, step: int, value_only: bool = False) -> int:
    """The message by which a group asks for actions, or only for values: slot | group | step | value_only in one integer."""
    return ((slot << 20 | group) << 20 | step) << 1 | value_only


def unpack_request(message: int) -> tuple[int, int, int, bool]:
    """(slot, group, step, value_only) of a packed request."""
    return message >> 41, message >> 21 & 0xFFFFF, message >> 1 & 0xFFFFF, bool(message & 1)
