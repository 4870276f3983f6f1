"""What a run was made on: the processor, memory, GPUs and versions."""

from __future__ import annotations

import contextlib
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil

import sfactory
from sfactory.config import devices

PACKAGES = ("torch", "numpy", "numba", "gymnasium")


def describe_machine() -> dict[str, str]:
    """Facts about this machine by name, for a reader. Asks no driver, which would take memory on a GPU."""
    cores, threads, usable = psutil.cpu_count(logical=False), psutil.cpu_count(), devices.cores()
    facts = {
        "processor": _stated("/proc/cpuinfo", "model name") or platform.processor() or platform.machine(),
        "cores": f"{cores or threads} ({threads} threads{f', {usable} usable' if usable != threads else ''})",
        "memory": f"{psutil.virtual_memory().total / 2**30:.0f} GiB",
        "GPUs": ", ".join(_gpus()) or "none",
        "system": f"{platform.system()} {platform.release()}",
        "Python": platform.python_version(),
        "sfactory": sfactory.__version__,
    }
    for package in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            facts[package] = version(package)
    return facts


def _gpus() -> list[str]:
    return [_stated(file, "Model") for file in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))]


def _stated(file: str | Path, name: str) -> str:
    """The first value of a name in a file of ``name: value`` lines; empty if there is none."""
    with contextlib.suppress(OSError):
        for line in Path(file).read_text(errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == name:
                return value.strip()
    return ""
