"""Files that are whole or absent: written under a temporary name, synced to the disk, then renamed; and whole additions
to others. Temporary folders of this process, which are removed even if an interrupt ends it at once. Compiled code that
is older than its source. Values as JSON has them. The names of runs."""

from __future__ import annotations

import contextlib
import hashlib
import math
import numbers
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

METRICS_FILE, EVENTS, LOGGER_ID = "metrics.csv", "events.out.tfevents", "logger-{}.id"
"""In a run folder: the file of reports, the beginning of TensorBoard's files, and the name under which a logger's id is
kept. :mod:`sfactory.runs.run_files` has all names; these are here because telemetry writes them."""
TEMPORARY = ".tmp-"
"""Prefix of temporary names; no pattern for finished files matches it."""
ELSEWHERE = "elsewhere"
"""Name of a file in a temporary folder that lists files outside of it, a path a line, which are removed with it."""
TRIALS, TRIAL = "trials", "trial.yaml"
"""Of a sweep: the folder of its trials, and the configuration in each of their folders, which are no run folders."""
_temporary: set[Path] = set()


def user_caches() -> Path | None:
    """The user's folder of caches; None for a user without a home, as a container's may be."""
    if named := os.environ.get("XDG_CACHE_HOME"):
        return Path(named)
    with contextlib.suppress(RuntimeError):
        return Path.home() / ".cache"
    return None


def is_writable(folder: str | os.PathLike[str]) -> bool:
    """Whether files can be made in a folder."""
    return os.access(folder, os.W_OK | os.X_OK)


def temporary_for(path: Path) -> Path:
    """The name under which this process writes a file that will be renamed to `path`."""
    return path.with_name(f"{TEMPORARY}{os.getpid()}-{path.name}")


def write_synced(path: Path, data: bytes) -> None:
    """Write a file and wait until its contents are on the disk.

    Raises:
        OSError: For example if the disk is full.
    """
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Wait until the renames and removals in a folder are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomically(path: Path, data: bytes) -> None:
    """Replace a file as one step: a reader, also one after a crash, finds the old or the new contents.

    Raises:
        OSError: For example if the disk is full; the old file is then unchanged and no temporary one is left.
    """
    temporary = temporary_for(path)
    try:
        write_synced(temporary, data)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def move_whole(source: Path, target: Path) -> None:
    """Move a file, also to another disk: it is there once it is whole.

    Raises:
        OSError: For example if the disk is full; nothing of it is left at the target then.
    """
    temporary = temporary_for(target).with_suffix("")  # no pattern for finished files matches it
    try:
        shutil.move(source, temporary)
        os.replace(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def json_values(value: Any) -> Any:
    """A nested value with None in place of numbers that are not finite, which JSON lacks."""
    if isinstance(value, Mapping):
        return {key: json_values(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [json_values(entry) for entry in value]
    if isinstance(value, numbers.Real) and not isinstance(value, numbers.Integral):
        return float(value) if math.isfinite(value) else None
    return value


def append_whole(path: Path, data: bytes, begin: bytes = b"") -> None:
    """Add to the end of a file, or leave it as it is.

    Args:
        begin: What a new file begins with.

    Raises:
        OSError: For example if the disk is full; nothing has been added then.
    """
    size = path.stat().st_size if path.exists() else 0
    try:
        with path.open("ab") as file:
            file.write(data if size else begin + data)
    except OSError:
        with contextlib.suppress(OSError):
            os.truncate(path, size)
        raise


def make_temporary_folder(purpose: str = "", parent: str | None = None) -> Path:
    """Make a folder among the system's temporary files, or in another one, and register it for removal.

    Args:
        purpose: What its name tells.
        parent: The other one.
    """
    folder = Path(tempfile.mkdtemp(prefix=f"sfactory-{purpose}", dir=parent))
    _temporary.add(folder)
    return folder


def remove_files_elsewhere(folder: Path) -> None:
    """Remove the files that a temporary folder, or a folder in it, lists in a file :data:`ELSEWHERE`."""
    for listing in folder.rglob(ELSEWHERE):
        with contextlib.suppress(OSError):
            for path in listing.read_text().splitlines():
                Path(path).unlink(missing_ok=True)


def remove_temporary_folder(folder: Path) -> None:
    """Remove a folder of :func:`make_temporary_folder` and its files elsewhere."""
    remove_files_elsewhere(folder)
    shutil.rmtree(folder, ignore_errors=True)
    _temporary.discard(folder)


def remove_temporary_folders() -> None:
    """Remove all registered folders."""
    for folder in list(_temporary):
        remove_temporary_folder(folder)


@contextlib.contextmanager
def temporary_folder() -> Iterator[Path]:
    """A temporary folder that is removed on exit, and also if an interrupt ends the process at once."""
    folder = make_temporary_folder()
    try:
        yield folder
    finally:
        remove_temporary_folder(folder)


def kernel_folder(package: Path) -> Path:
    """Where numba keeps a package's functions: the first of three folders that can be written to.

    Raises:
        OSError: If none can, without which numba compiles nothing.
    """
    named, caches = os.environ.get("NUMBA_CACHE_DIR"), user_caches()
    tried = [Path(named)] if named else []
    tried += [package / "__pycache__", *([] if caches is None else [caches / "numba"])]
    for folder in tried:
        if is_writable(next(place for place in (folder, *folder.absolute().parents) if place.exists())):
            return folder
    raise OSError(
        f"compiled code can be kept nowhere: {' and '.join(map(str, tried))} cannot be written to; set NUMBA_CACHE_DIR "
        "to a folder of your own"
    )


def forget_stale_kernels(package: Path) -> None:
    """Remove what numba has kept of a package's functions beside them, if any source of it has changed since. Called
    before these are imported.

    numba itself looks at a function's own file alone, though the functions that it calls are compiled into it.

    Raises:
        OSError: As :func:`kernel_folder`.
    """
    kernel_folder(package)
    digest = hashlib.sha256()
    for source in sorted(package.rglob("*.py")):
        digest.update(source.read_bytes())
    stamp = package / "__pycache__" / "kernels.sha256"
    with contextlib.suppress(OSError):  # who cannot write there has nothing kept there
        if not stamp.exists() or stamp.read_text() != digest.hexdigest():
            for kept in package.rglob("*.nb[ic]"):
                kept.unlink(missing_ok=True)
            stamp.parent.mkdir(exist_ok=True)
            stamp.write_text(digest.hexdigest())


def run_name(folder: str | os.PathLike[str]) -> str:
    """What tells a run from others: the name of its folder; of a sweep's runs, which are all named after their seeds,
    also the names of sweep and trial, as in sweep-x/0003/seed-0."""
    path = Path(folder).resolve()
    trial = path.parent
    if trial.parent.name == TRIALS and (trial / TRIAL).exists():
        return f"{trial.parent.parent.name}/{trial.name}/{path.name}"
    return path.name
