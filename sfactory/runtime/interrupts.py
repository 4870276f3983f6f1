"""Handling of Ctrl-C, SIGTERM and SIGHUP before and after a run, when there is nothing to save."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.util import get_temp_dir
from pathlib import Path
from types import FrameType
from typing import NoReturn

from sfactory.files import remove_temporary_folder, remove_temporary_folders
from sfactory.runtime.processes import kill_tree


def interrupting_signals() -> tuple[signal.Signals, ...]:
    """SIGINT, SIGTERM, and SIGHUP, which tells that the terminal was closed, unless that is ignored, as under nohup, or
    the user's program handles it."""
    free = signal.getsignal(signal.SIGHUP) in (signal.SIG_DFL, end_at_once)
    return (signal.SIGINT, signal.SIGTERM, *((signal.SIGHUP,) if free else ()))


@contextlib.contextmanager
def handling(handlers: Mapping[signal.Signals, Callable[[int, FrameType | None], object]]) -> Iterator[None]:
    """Handle signals by these functions, and afterwards as before. Only a main thread can."""
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


@contextlib.contextmanager
def stopping(stop: Callable[[], object]) -> Iterator[list[int]]:
    """Let the first SIGINT or SIGTERM call a function that ends the work in an orderly way; the next one does what it
    did before.

    Yields:
        The first one's number, once it has come.
    """
    came: list[int] = []
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def first(number: int, frame: FrameType | None) -> None:
        for each, handler in before.items():
            signal.signal(each, handler)
        came.append(number)
        stop()

    is_main = threading.current_thread() is threading.main_thread()
    with handling(dict.fromkeys(before, first)) if is_main else contextlib.nullcontext():
        yield came


def end_at_once(number: int, frame: FrameType | None = None) -> NoReturn:
    """End this process and all its descendants now, with exit status 128 + `number`."""
    kill_tree(os.getpid(), spare_root=True)
    remove_temporary_folders()
    remove_temporary_folder(Path(get_temp_dir()))  # of the fork server
    os._exit(128 + number)


def ignore_interrupts() -> None:
    """Ignore interrupts at the end of a command, once its exit status is determined."""
    for number in interrupting_signals():
        signal.signal(number, signal.SIG_IGN)


def end_at_once_when_interrupted() -> None:
    """End the process without a traceback at an interrupt, and ignore SIGUSR1 and SIGUSR2, until a run installs its
    own handlers. SIGINT is handled even in a background command of a script, which starts with it ignored."""
    for number in interrupting_signals():
        signal.signal(number, end_at_once)
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)


@contextlib.contextmanager
def as_program() -> Iterator[None]:
    """Around a command that is all that its process does: an interrupt before or after its run ends it at once, a
    crash shows the Python stacks, and the interpreter's end is quick."""
    end_at_once_when_interrupted()
    if sys.stderr is not None:
        faulthandler.enable()  # with --serial, environments can crash this process
    yield
    ignore_interrupts()
    gc.freeze()  # the interpreter's teardown would collect everything, modules and all: 0.3 s
