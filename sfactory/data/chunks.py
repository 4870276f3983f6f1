"""Work on a batch by chunks of its columns, on several threads of the learner.

Threads take chunks as they become free, so a thread whose core is busy with sampling delays nobody by more than one
chunk; torch's own threads divide each operation evenly and wait for the slowest at its end. Small chunks also stay in
the cache from one layer to the next.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

C, T = TypeVar("C"), TypeVar("T")
Columns = Tensor | slice
"""Indices int64 ``[n]`` of columns, or a range of them."""
ChunkKind = Literal["dense", "flat", "image"]
"""Kinds of network, which differ in how long a sample takes and in what a chunk costs besides."""

_LIMITS = {"dense": (2048, 16384, 2), "flat": (2048, 8192, 2), "image": (256, 1024, 1)}
"""Fewest and most samples of a chunk: few enough for the second-level cache (of which compiled dense layers see to
themselves), and so many that Python's share, or that of the large layer behind an image encoder, stays small. Least
number of chunks for each thread."""


def select_columns(x: Tensor, columns: Columns, dim: int) -> Tensor:
    """The given columns, which are a dimension of `x`; for a slice a view."""
    if isinstance(columns, slice):
        return x.narrow(dim, columns.start, columns.stop - columns.start)
    return x.index_select(dim, columns)


def chunk_slices(columns: int, width: int) -> list[slice]:
    """All columns in slices of so many, the last one smaller if need be."""
    return [slice(begin, min(begin + width, columns)) for begin in range(0, columns, width)]


def chunk_columns(columns: int, steps: int, threads: int, kind: ChunkKind) -> int:
    """Columns of each chunk of a batch ``[steps, columns]``.

    Args:
        threads: That share the work.
        kind: Of the network: compiled dense layers, others, or one that sees images, so that a sample takes as long as
            some thirty others.
    """
    least, most, for_each = _LIMITS[kind]
    samples = steps * columns
    wanted = max(-(-samples // most), for_each * threads)
    return -(-columns // max(1, min(wanted, samples // least)))


class ChunkThreads:
    """Calls a function for many chunks.

    Args:
        threads: The caller's own, which takes its share of the chunks, and others beside it.
    """

    def __init__(self, threads: int) -> None:
        self._helpers = threads - 1
        self._pool = (
            ThreadPoolExecutor(self._helpers, "chunk", initializer=torch.set_num_threads, initargs=(1,))
            if threads > 1
            else None
        )

    def map(self, function: Callable[[C], T], chunks: Sequence[C]) -> list[T]:
        """The function's results in the order of the chunks; an error in one of them is raised here, when no thread is
        at work any more."""
        if self._pool is None or len(chunks) == 1:
            return [function(chunk) for chunk in chunks]
        results: list[Any] = [None] * len(chunks)
        places = iter(range(len(chunks)))  # which hands out each place once, whatever thread asks

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
