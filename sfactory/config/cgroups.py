"""The cgroups that hold this process, which limit a container: what they leave of memory, processes and CPU time."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUPS = Path("/proc/self/cgroup")


class Limit(NamedTuple):
    """An amount that is left, and the name of its limit."""

    left: float
    by: str


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


def memory_limits() -> Iterator[Limit]:
    """Bytes that each cgroup with a limit leaves this process and its children."""
    for folder in cgroups("memory"):
        for most, used, cache in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            if (limit := _number(folder / most)) is not None and (usage := _number(folder / used)) is not None:
                left = limit - usage + _statistic(folder / "memory.stat", cache)
                yield Limit(left, f"the memory limit of {folder}")


def process_limits() -> Iterator[Limit]:
    """Processes and threads that each cgroup with a limit leaves this process and its children."""
    for folder in cgroups("pids"):
        if (most := _number(folder / "pids.max")) is not None:
            yield Limit(most - (_number(folder / "pids.current") or 0), f"{folder}/pids.max")


def _number(file: Path) -> int | None:
    """The number in a file; None where it says max, or is not there."""
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return None


def _statistic(file: Path, name: str) -> int:
    """One line of a file of names and numbers."""
    try:
        return next(int(line.split()[1]) for line in file.read_text().splitlines() if line.split()[:1] == [name])
    except (OSError, StopIteration):
        return 0
