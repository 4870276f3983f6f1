"""The order in which processes see each other's loads and stores of shared memory, where no lock keeps it.

x86-64 reorders neither stores with stores nor loads with loads, so that :func:`barrier` has nothing to do there. It
does let a load overtake an earlier store to another address, as ARM does; :func:`fence` prevents that as well.
"""

from __future__ import annotations

import ctypes
import platform
import threading
from collections.abc import Callable

_SEQUENTIALLY_CONSISTENT = 5
"""C11's memory_order_seq_cst."""


def make_fence() -> Callable[[], object]:
    """What keeps all loads and stores before it from those after it."""
    try:
        atomic_fence = ctypes.CDLL("libatomic.so.1").atomic_thread_fence
    except (OSError, AttributeError):  # then a lock's own barriers, one in each direction
        lock = threading.Lock()
        return lambda: (lock.acquire(), lock.release())  # type: ignore[func-returns-value]
    return lambda: atomic_fence(_SEQUENTIALLY_CONSISTENT)


def make_barrier(machine: str) -> Callable[[], object]:
    """What keeps loads before it from loads after it, and stores from stores, on a kind of machine."""
    return (lambda: None) if machine in ("x86_64", "AMD64") else fence


fence = make_fence()
barrier = make_barrier(platform.machine())
