"""Temporary folders of this process, removed at the latest when it is ended at once."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

_temporary: set[Path] = set()


def make_temporary_folder() -> Path:
    """A folder in the system's place for temporary files; it is on this process's list of those to be removed."""
    folder = Path(tempfile.mkdtemp(prefix="sfactory-"))
    _temporary.add(folder)
    return folder


def remove_temporary_folder(folder: Path) -> None:
    """Remove what :func:`make_temporary_folder` gave."""
    shutil.rmtree(folder, ignore_errors=True)
    _temporary.discard(folder)


def remove_temporary_folders() -> None:
    """Remove all that there still are."""
    for folder in list(_temporary):
        remove_temporary_folder(folder)


@contextlib.contextmanager
def temporary_folder() -> Iterator[Path]:
    """A folder that is gone afterwards, also if an interrupt ends the process at once."""
    folder = make_temporary_folder()
    try:
        yield folder
    finally:
        remove_temporary_folder(folder)
