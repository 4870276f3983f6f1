"""The processes of a command that was started in a session of its own."""

from __future__ import annotations

import contextlib
import os
import time

import psutil


def members(session: int) -> list[psutil.Process]:
    """Living processes of a session."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, ProcessLookupError):
            if os.getsid(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def end(session: int) -> set[int]:
    """Kill all processes of a session, also what they start meanwhile; gives their numbers."""
    ended: set[int] = set()
    while living := members(session):
        for process in living:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        ended |= {process.pid for process in living}
        time.sleep(0.01)
    return ended
