"""Anonymous shared memory, which exists exactly as long as processes map it."""

from __future__ import annotations

import mmap
import os
from multiprocessing import reduction
from typing import Any

import numpy as np
import numpy.typing as npt


class SharedBlock:
    """A block of zeroed memory that is passed to child processes as a file descriptor.

    The block has no name (``memfd_create``): nothing appears in /dev/shm, the size limit of /dev/shm does not apply,
    and the kernel frees the memory when the last process that maps it has ended, however it ended. It can be pickled
    only as an argument of a starting process.

    Args:
        size: Size in bytes.
    """

    def __init__(self, size: int) -> None:
        self._attach(os.memfd_create("sfactory"), size, create=True)

    def _attach(self, descriptor: int, size: int, create: bool = False) -> None:
        try:
            if create:
                os.ftruncate(descriptor, max(size, 1))
            self._map = mmap.mmap(descriptor, max(size, 1))
        except BaseException:
            os.close(descriptor)
            raise
        self._descriptor, self.size = descriptor, size

    def __getstate__(self) -> dict[str, Any]:
        return {"descriptor": reduction.DupFd(self._descriptor), "size": self.size}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._attach(state["descriptor"].detach(), state["size"])

    def __del__(self) -> None:
        if (descriptor := getattr(self, "_descriptor", None)) is not None:
            os.close(descriptor)

    def array(self, shape: tuple[int, ...], dtype: npt.DTypeLike, offset: int = 0) -> np.ndarray:
        """A writable view of the block from a byte offset. It keeps the mapping alive."""
        count = int(np.prod(shape, dtype=np.int64))
        if count == 0:
            return np.empty(shape, dtype)
        return np.frombuffer(self._map, dtype, count, offset).reshape(shape)


class SharedArray:
    """One array in a shared block of its own, zero at first.

    Args:
        shape: Shape of the array.
        dtype: NumPy dtype.

    Attributes:
        array: The view in this process.
    """

    def __init__(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> None:
        dtype = np.dtype(dtype)
        self._block = SharedBlock(int(np.prod(shape, dtype=np.int64)) * dtype.itemsize)
        self._shape, self._dtype = shape, dtype
        self.array = self._block.array(shape, dtype)

    def __getstate__(self) -> tuple[SharedBlock, tuple[int, ...], np.dtype]:
        return self._block, self._shape, self._dtype

    def __setstate__(self, state: tuple[SharedBlock, tuple[int, ...], np.dtype]) -> None:
        self._block, self._shape, self._dtype = state
        self.array = self._block.array(self._shape, self._dtype)
