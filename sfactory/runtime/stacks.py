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

_FILE, _REASON = "stacks", "reason"
_ANSWER_S, _POLL_S = 2.0, 0.05
"""Seconds that processes have to write their stacks, and seconds between two looks at them."""
_files: list[TextIO] = []
"""Files that stay open as long as the process lives."""


def keep_stacks(folder: str | Path) -> None:
    """Make this process write its stacks to a file in a folder when it crashes, and at SIGUSR2, even while it hangs in
    C code."""
    file = (Path(folder) / _FILE).open("a")
    _files.append(file)
    faulthandler.enable(file, all_threads=True)
    faulthandler.register(signal.SIGUSR2, file, all_threads=True)


def stacks_in(folder: Path) -> str:
    """All stacks that a process has written to its folder."""
    with contextlib.suppress(OSError):
        return (folder / _FILE).read_text()
    return ""


def explain_exit(folder: str | Path, reason: str) -> None:
    """Leave in the folder of this process why it ends itself."""
    with contextlib.suppress(OSError):
        (Path(folder) / _REASON).write_text(reason)


def crash_in(folder: Path) -> str:
    """What a process has written to its folder of its end: its own reason, or the stack of a crash; else empty."""
    with contextlib.suppress(OSError):
        return (folder / _REASON).read_text()
    _, head, stacks = stacks_in(folder).rpartition("Fatal Python error")
    return f"{head}{stacks}".partition("\nExtension modules:")[0].rstrip() if head else ""


def ask_for_stacks(pids: Mapping[str, int], folders: Mapping[str, Path]) -> dict[str, str]:
    """The current stacks of living processes, by name; empty for one that does not answer."""
    before = {name: len(stacks_in(folders[name])) for name in pids}
    for name, pid in pids.items():
        if (folders[name] / _FILE).exists():  # else it has no handler yet, and the signal would end it
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGUSR2)
    answers, deadline = dict.fromkeys(pids, ""), time.monotonic() + _ANSWER_S
    while time.monotonic() < deadline:
        time.sleep(_POLL_S)
        earlier, answers = answers, {name: stacks_in(folders[name])[length:] for name, length in before.items()}
        if all(answers.values()) and answers == earlier:  # all have finished writing
            break
    return answers


def own_stacks() -> str:
    """The stacks of this process. Works with a full disk."""
    with open(os.memfd_create("stacks"), "w+") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return file.read()
