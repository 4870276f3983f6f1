"""Python stacks of processes that hang or crash."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TextIO

_FILE = "stacks"
_ANSWER_S = 0.5
"""How long processes have to write their stacks."""
_files: list[TextIO] = []
"""Kept open as long as the process lives."""


def keep_stacks(folder: str | Path) -> None:
    """Let this process write its stacks to a file in a folder: at SIGUSR2, also while it hangs in C code, and when it crashes."""
    file = (Path(folder) / _FILE).open("a")
    _files.append(file)
    faulthandler.enable(file, all_threads=True)
    faulthandler.register(signal.SIGUSR2, file, all_threads=True)


def stacks_in(folder: Path) -> str:
    """What a process has written to its folder."""
    with contextlib.suppress(OSError):
        return (folder / _FILE).read_text()
    return ""


def ask_for_stacks(pids: Mapping[str, int], folders: Mapping[str, Path]) -> dict[str, str]:
    """The present stacks of living processes, by name; empty for one that does not answer."""
    before = {name: len(stacks_in(folders[name])) for name in pids}
    for name, pid in pids.items():
        if (folders[name] / _FILE).exists():  # else it is not ready for the signal, which would end it
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGUSR2)
    time.sleep(_ANSWER_S)
    return {name: stacks_in(folders[name])[length:] for name, length in before.items()}


def own_stacks() -> str:
    """The stacks of this process."""
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return file.read()
