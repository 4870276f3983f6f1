"""Work on a batch by chunks of its columns, on several threads of the learner.

Threads take chunks as they become free, so a thread whose core is busy with sampling delays nobody by more than one chunk; torch's own
threads divide each operation evenly and wait for the slowest at its end. Small chunks also stay in the cache from one layer to the next.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

T = TypeVar("T")

_LIMITS = {"flat": (2048, 8192), "image": (64, 256)}
"""Fewest and most samples of a chunk: few enough for the second-level cache, and so many that Python's share stays small."""


def chunk_columns(columns: int, steps: int, threads: int, images: bool) -> int:
    """Columns of each chunk of a batch ``[steps, columns]``.

    Args:
        threads: That share the work; with several there are two chunks for each, if the batch is large enough.
        images: The observation has an image, so that a sample takes as long as some thirty others.
    """
    least, most = _LIMITS["image" if images else "flat"]
    samples = steps * columns
    wanted = max(-(-samples // most), 2 * threads) if threads > 1 or not images else 1
    return -(-columns // max(1, min(wanted, samples // least)))


class ChunkThreads:
    """Calls a function for many chunks.

    Args:
        threads: With one, the caller's own.
    """

    def __init__(self, threads: int) -> None:
        self._pool = ThreadPoolExecutor(threads, "chunk", initializer=torch.set_num_threads, initargs=(1,)) if threads > 1 else None

    def map(self, function: Callable[..., T], *chunks: Iterable) -> list[T]:
        """The function's results in the order of the chunks; an error in one of them is raised here."""
        calls = list(zip(*chunks, strict=True))
        if self._pool is None or len(calls) == 1:
            return [function(*call) for call in calls]
        return list(self._pool.map(lambda call: function(*call), calls))
