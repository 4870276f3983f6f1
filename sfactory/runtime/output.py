"""What environments and models print while a live display has the terminal: it goes to a file of the run folder."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sfactory.errors import shown

MOST_BYTES = 16 << 20
"""Size from which the file begins anew, so that a run that prints for days does not fill the disk."""
_FLAGS = os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
_FIRST_BYTES = 4096


class PrintedLines:
    """The runner's view of the file, which is open while this is entered; it says once that something is printed.

    Args:
        path: The file; what it holds already is kept. None: nothing is.
        note: Shows the user a line.

    Attributes:
        path: The file while it is open, else None.
    """

    def __init__(self, path: Path | None, note: Callable[[str], None]) -> None:
        self.path: Path | None = None
        self._wanted, self._note, self._told = path, note, False

    def __enter__(self) -> PrintedLines:
        if self._wanted is not None:
            with contextlib.suppress(OSError):
                self._descriptor = os.open(self._wanted, os.O_RDWR | _FLAGS, 0o644)
                self._begin = os.fstat(self._descriptor).st_size
                self.path = self._wanted.absolute()
        return self

    def look(self) -> None:
        """Tell of the first line, and bound the size of the file. Called from time to time."""
        if self.path is None:
            return
        size = os.fstat(self._descriptor).st_size
        if not self._told and size > self._begin:
            self._told = True
            text = os.pread(self._descriptor, _FIRST_BYTES, self._begin).decode(errors="replace")
            self._note(
                f"an environment or a model prints, first: {shown(text.strip().partition(chr(10))[0], 60)}; its lines "
                f"go to {self._wanted}, and with --log.display plain to the terminal"
            )
        if size > MOST_BYTES:
            with contextlib.suppress(OSError):
                os.ftruncate(self._descriptor, 0)

    def __exit__(self, *exc: object) -> None:
        self.look()
        if self.path is not None:
            with contextlib.suppress(OSError):
                if not os.fstat(self._descriptor).st_size:
                    self.path.unlink()
            os.close(self._descriptor)
            self.path = None


def print_into(path: str | os.PathLike[str]) -> None:
    """Append what this process and its children write to standard output to a file, line by line. A full disk loses
    lines, and is no error of whoever prints. Where there is no such file, all stays as it is."""
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_WRONLY | _FLAGS, 0o644)
        os.dup2(descriptor, 1)
        os.close(descriptor)
        sys.stdout = io.TextIOWrapper(
            io.BufferedWriter(_Forgiving(1, "w", closefd=False)),
            encoding="utf-8", errors="backslashreplace", line_buffering=True,
        )  # fmt: skip


class _Forgiving(io.FileIO):
    """Drops what cannot be written."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError:
            return len(data)
