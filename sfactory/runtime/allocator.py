"""Settings of the memory allocator for compute processes."""

from __future__ import annotations

import ctypes

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4
_NEVER = 2**31 - 1


def keep_freed_memory() -> bool:
    """Keep the memory of freed arrays in this process for reuse instead of returning it to the system.

    By default glibc maps every large block anew and unmaps it when it is freed, so each training batch pays a page
    fault for every 4 KiB of its activations. With this setting the process keeps its peak size.

    Returns:
        Whether the C library accepted the settings (glibc only).
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):
        return False
    return bool(mallopt(_M_MMAP_MAX, 0)) and bool(mallopt(_M_TRIM_THRESHOLD, _NEVER))
