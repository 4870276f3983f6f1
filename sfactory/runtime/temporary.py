"""Temporary folders of this process, which are removed even if an interrupt ends it at once."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

_temporary: set[Path] = set()


def make_temporary_folder() -> Path:
    """Make a folder among the system's temporary files and register it for removal."""
    folder = Path(tempfile.mkdtemp(prefix="sfactory-"))
    _temporary.add(folder)
    return folder


def remove_temporary_folder(folder: Path) -> None:
    """Remove a folder of :func:`make_temporary_folder`."""
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
