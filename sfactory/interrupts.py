"""Ctrl-C and SIGTERM before and after there is something to save."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from multiprocessing import util
from pathlib import Path
from types import FrameType
from typing import NoReturn

from sfactory.processes import kill_tree

_temporary: set[Path] = set()


def end_at_once(number: int, frame: FrameType | None = None) -> NoReturn:
    """End this process and all its descendants now, with exit status 128 + `number`."""
    kill_tree(os.getpid(), spare_root=True)
    for folder in (*_temporary, util.get_temp_dir()):  # the latter holds the socket over which worker processes are started
        shutil.rmtree(folder, ignore_errors=True)
    os._exit(128 + number)


def ignore_interrupts() -> None:
    """For the last moments of a command, when all is done and its exit status stands."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


def end_at_once_when_interrupted() -> None:
    """Let the signals that interrupt a command end it without a traceback, from here until something is there to be saved."""
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, end_at_once)


@contextlib.contextmanager
def temporary_folder() -> Iterator[Path]:
    """A folder that is gone afterwards, also after :func:`end_at_once`."""
    folder = Path(tempfile.mkdtemp(prefix="sfactory-"))
    _temporary.add(folder)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        _temporary.discard(folder)
