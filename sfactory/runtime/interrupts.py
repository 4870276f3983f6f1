"""Ctrl-C and SIGTERM before and after there is something to save."""

from __future__ import annotations

import os
import shutil
import signal
from multiprocessing.util import get_temp_dir
from types import FrameType
from typing import NoReturn

from sfactory.runtime.processes import kill_tree
from sfactory.runtime.temporary import remove_temporary_folders


def end_at_once(number: int, frame: FrameType | None = None) -> NoReturn:
    """End this process and all its descendants now, with exit status 128 + `number`."""
    kill_tree(os.getpid(), spare_root=True)
    remove_temporary_folders()
    shutil.rmtree(get_temp_dir(), ignore_errors=True)  # the fork server's
    os._exit(128 + number)


def ignore_interrupts() -> None:
    """For the last moments of a command, when all is done and its exit status stands."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


def end_at_once_when_interrupted() -> None:
    """Let the signals that interrupt a command end it without a traceback, and those that ask for something do nothing,
    from here until something is there to be saved. A script's background command, which begins with SIGINT ignored, is
    interrupted all the same."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, end_at_once)
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
