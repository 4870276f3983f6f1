"""The cgroups that hold this process, which limit a container."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUPS = Path("/proc/self/cgroup")


def cgroups(controller: str) -> Iterator[Path]:
    """The folders of the cgroups that hold this process, of version 1 and 2, from its own up to the root."""
    try:
        lines = OWN_CGROUPS.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        root = CGROUPS / controller if controllers else CGROUPS
        own = root / path.strip("/")
        # Inside a container the path may be the one outside, which is not mounted; the root is then the container's
        # own.
        for folder in (own, *own.parents):
            if not folder.is_relative_to(root):
                break
            if folder.is_dir():
                yield folder


def cpu_quota() -> float:
    """Cores' worth of time that this process and its like may take; infinite without a limit."""
    quotas = [math.inf]
    for folder in cgroups("cpu"):
        for files in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
            with contextlib.suppress(OSError, ValueError):  # not there, or max
                quota, period = map(int, " ".join((folder / file).read_text() for file in files).split())
                quotas += [quota / period] if quota > 0 and period > 0 else []  # -1: no limit
    return min(quotas)
