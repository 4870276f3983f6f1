"""Python stacks of processes that hang or crash."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TextIO

_FILE = "stacks"
_ANSWER_S, _POLL_S = 2.0, 0.05
"""How long processes have to write their stacks, and how often they are looked at."""
_files: list[TextIO] = []
"""Kept open as long as the process lives."""


def keep_stacks(folder: str | Path) -> None:
    """Let this process write its stacks to a file in a folder: at SIGUSR2, also while it hangs in C code, and when it
    crashes."""
    file = (Path(folder) / _FILE).open("a")
    _files.append(file)
    faulthandler.enable(file, all_threads=True)
    faulthandler.register(signal.SIGUSR2, file, all_threads=True)


def stacks_in(folder: Path) -> str:
    """What a process has written to its folder."""
    with contextlib.suppress(OSError):
        return (folder / _FILE).read_text()
    return ""


def crash_in(folder: Path) -> str:
    """Where a process has crashed, as it has written to its folder; empty if it has not."""
    _, head, stacks = stacks_in(folder).rpartition("Fatal Python error")
    return f"{head}{stacks}".partition("\nExtension modules:")[0].rstrip() if head else ""


def ask_for_stacks(pids: Mapping[str, int], folders: Mapping[str, Path]) -> dict[str, str]:
    """The present stacks of living processes, by name; empty for one that does not answer."""
    before = {name: len(stacks_in(folders[name])) for name in pids}
    for name, pid in pids.items():
        if (folders[name] / _FILE).exists():  # else it is not ready for the signal, which would end it
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGUSR2)
    answers, deadline = dict.fromkeys(pids, ""), time.monotonic() + _ANSWER_S
    while time.monotonic() < deadline:
        time.sleep(_POLL_S)
        earlier, answers = answers, {name: stacks_in(folders[name])[length:] for name, length in before.items()}
        if all(answers.values()) and answers == earlier:  # nobody is still writing
            break
    return answers


def own_stacks() -> str:
    """The stacks of this process; a full disk does not matter."""
    with open(os.memfd_create("stacks"), "w+") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return file.read()
