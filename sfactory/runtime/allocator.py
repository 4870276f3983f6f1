"""Memory that a compute process keeps."""

from __future__ import annotations

import ctypes

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4
_NEVER = 2**31 - 1


def keep_freed_memory() -> bool:
    """Let this process keep the memory of freed arrays for its next ones instead of handing it back to the system.

    By default glibc maps every large block afresh and returns it when it is freed, so each training batch pays a page
    fault for every 4 KiB of its activations. The process then keeps its peak size.

    Returns:
        Whether the C library could be told (glibc only).
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):
        return False
    return bool(mallopt(_M_MMAP_MAX, 0)) and bool(mallopt(_M_TRIM_THRESHOLD, _NEVER))
