"""Commands run as a terminal runs them, with what they leave behind."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import select
import signal
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parent.parent
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), str(Path(__file__).parent)))}


class Command:
    """A Python process in a session of its own. Whatever is left of the session at the end is killed.

    Args:
        args: Of the Python interpreter.
        stdin: A script to feed it.
        popen: Further arguments of `subprocess.Popen`, instead of pipes for its streams.
    """

    def __init__(self, *args: str, stdin: str | None = None, **popen: Any) -> None:
        pipes = {
            "stdin": subprocess.PIPE if stdin is not None else subprocess.DEVNULL,
            "stdout": subprocess.PIPE,
            "stderr": subprocess.PIPE,
        }
        self._process = subprocess.Popen(
            [sys.executable, *args], text=True, start_new_session=True, cwd=ROOT, env=ENVIRONMENT, **(popen or pipes)
        )
        self.pid, self._script = self._process.pid, stdin
        self.output = self.errors = ""

    def __enter__(self) -> Command:
        return self

    def __exit__(self, *exc: object) -> None:
        for process in self.left():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._process.wait()

    def interrupt(self, number: int = signal.SIGINT) -> None:
        """Signal every process of the session, as Ctrl-C in a terminal does."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    def wait(self, timeout: float = 60) -> int:
        """The exit status."""
        self.output, self.errors = self._process.communicate(self._script, timeout)
        return self._process.returncode

    def left(self) -> list[psutil.Process]:
        """Living processes of the session."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, ProcessLookupError):
                if os.getsid(process.pid) == self.pid and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def left_after(self, seconds: float) -> list[psutil.Process]:
        """Processes that are still there after so long; returns as soon as there are none."""
        return [] if wait_until(lambda: not self.left(), seconds) else self.left()


class OnTerminal(Command):
    """A command on a terminal of its own, whose output is read and forgotten until it is closed.

    Args:
        hangup: What SIGHUP does at first; SIG_IGN is what nohup makes of it.
    """

    def __init__(self, *args: str, hangup: signal.Handlers = signal.SIG_DFL) -> None:
        self._ours, theirs = pty.openpty()

        def attach() -> None:
            fcntl.ioctl(theirs, termios.TIOCSCTTY, 0)
            signal.signal(signal.SIGHUP, hangup)

        super().__init__(*args, **dict.fromkeys(("stdin", "stdout", "stderr"), theirs), preexec_fn=attach)
        os.close(theirs)
        self._open = True
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __exit__(self, *exc: object) -> None:
        super().__exit__(*exc)
        self.close_terminal()

    def close_terminal(self) -> None:
        """What happens when a window is closed, or a connection is lost."""
        self._open = False
        self._reader.join()

    def _read(self) -> None:
        while self._open:
            with contextlib.suppress(OSError):  # EIO once the command has ended
                if select.select([self._ours], [], [], 0.05)[0]:
                    os.read(self._ours, 65536)
        os.close(self._ours)


def wait_until(condition: Callable[[], bool], seconds: float = 30) -> bool:
    """Whether a condition holds within that time."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.05)
    return False


def abandoned_shared_memory() -> set[str]:
    """Names in /dev/shm of files that no living process has mapped. What is in use may be another program's."""
    inodes = {entry.name: str(entry.inode()) for entry in os.scandir("/dev/shm")}
    used = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            used |= {line.split()[4] for line in maps.read_text().splitlines() if "/dev/shm/" in line}
    return {name for name, inode in inodes.items() if inode not in used and Path("/dev/shm", name).exists()}
