"""Chunks: columns of a batch that the learner's threads process independently.

Threads take chunks as they become free, so a thread whose core is busy with sampling delays the others by at most one
chunk. torch's own threads, in contrast, divide each operation evenly and wait for the slowest one. Small chunks also
stay in the cache from one layer to the next.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

C = TypeVar("C")
T = TypeVar("T")
Columns = Tensor | slice
"""Indices int64 ``[n]`` of columns, or a range of them."""
ChunkKind = Literal["dense", "flat", "image"]
"""Kinds of network, which differ in how long a sample takes and in what a chunk costs besides."""

_LIMITS = {"dense": (2048, 16384, 2), "flat": (2048, 8192, 2), "image": (64, 1024, 1)}
"""Least and most samples of a chunk, and least number of chunks per thread, by kind of network. Chunks should fit into
the second-level cache (compiled dense layers take care of that themselves), and be large enough to amortise Python's
overhead or the large layer behind an image encoder."""


def select_columns(x: Tensor, columns: Columns, dim: int) -> Tensor:
    """The given columns along dimension `dim` of `x`; a view for a slice."""
    if isinstance(columns, slice):
        return x.narrow(dim, columns.start, columns.stop - columns.start)
    return x.index_select(dim, columns)


def chunk_slices(columns: int, width: int) -> list[slice]:
    """Slices of `width` columns that cover all columns; the last one may be smaller."""
    return [slice(begin, min(begin + width, columns)) for begin in range(0, columns, width)]


def chunk_columns(columns: int, steps: int, threads: int, kind: ChunkKind) -> int:
    """Columns of each chunk of a batch ``[steps, columns]``.

    Args:
        columns, steps: Size of the batch.
        threads: Threads that share the work.
        kind: Kind of the network: dense (compiled dense layers), image (has an image encoder, with which a sample takes
            about thirty times as long), or flat (others).
    """
    least, most, for_each = _LIMITS[kind]
    samples = steps * columns
    wanted = max(-(-samples // most), for_each * threads)
    return -(-columns // max(1, min(wanted, samples // least)))


class ChunkThreads:
    """Calls a function for many chunks on several threads.

    Args:
        threads: Number of threads, the caller's included.
    """

    def __init__(self, threads: int) -> None:
        self._helpers = threads - 1
        self._pool = (
            ThreadPoolExecutor(self._helpers, "chunk", initializer=torch.set_num_threads, initargs=(1,))
            if threads > 1
            else None
        )

    def map(self, function: Callable[[C], T], chunks: Sequence[C]) -> list[T]:
        """Results of the function in the order of the chunks. An error in any of them is raised after all threads have
        finished."""
        if self._pool is None or len(chunks) == 1:
            return [function(chunk) for chunk in chunks]
        results: list[Any] = [None] * len(chunks)
        places = iter(range(len(chunks)))  # thread-safe: every place is handed out once

        def work() -> None:
            for place in places:
                results[place] = function(chunks[place])

        helpers = [self._pool.submit(work) for _ in range(min(self._helpers, len(chunks) - 1))]
        try:
            work()
        finally:
            wait(helpers)
        for helper in helpers:
            helper.result()
        return results
