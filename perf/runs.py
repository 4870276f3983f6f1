"""Runs of sfactory that are measured from outside: by their command, and by the reports in their metrics.csv."""

from __future__ import annotations

import contextlib
import csv
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType

ROOT = Path(__file__).resolve().parent.parent
POLL_S = 0.2
"""Seconds between two looks at the reports."""
END_S = 60.0
"""How long a run may take to end."""

Report = dict[str, float]
"""The columns of a row of metrics.csv that have a value."""


class Run:
    """A run that goes on.

    Attributes:
        folder: Its run folder.
        process: That of its command.
    """

    def __init__(self, folder: Path, process: subprocess.Popen[bytes]) -> None:
        self.folder, self.process = folder, process

    def reports(self) -> list[Report]:
        """Its reports so far."""
        return read_reports(self.folder)

    def wait_until(self, enough: Callable[[list[Report]], object], limit_s: float) -> bool:
        """Wait until its reports are enough. False if it has ended or `limit_s` seconds have gone by without."""
        begin = time.monotonic()
        while not enough(self.reports()):
            if self.process.poll() is not None or time.monotonic() - begin > limit_s:
                return bool(enough(self.reports()))
            time.sleep(POLL_S)
        return True


@contextlib.contextmanager
def training(flags: Sequence[str], folder: str) -> Iterator[Run]:
    """A run in a folder that nobody else has, ended by SIGTERM: what a script starts in the background ignores SIGINT,
    and so does what that starts."""
    quiet = ["--log.display", "none", "--log.no-tensorboard", "--eval.no-at-end"]
    command = [sys.executable, "-m", "sfactory.train", *quiet, *flags, "--run", f"{folder}/run"]
    process = subprocess.Popen(command, cwd=ROOT)
    try:
        yield Run(Path(folder) / "run", process)
    finally:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.terminate()
            process.wait(END_S)
        if process.poll() is None:
            process.kill()
            process.wait()


def exit_at_signals() -> None:
    """Let SIGTERM and SIGHUP raise SystemExit, so that what this program has started is ended with it. Under nohup
    SIGHUP stays ignored. Further signals are ignored while the first is obeyed."""
    numbers = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) is not signal.SIG_IGN]

    def leave(number: int, frame: FrameType | None) -> None:
        for each in numbers:
            signal.signal(each, signal.SIG_IGN)
        sys.exit(128 + number)

    for number in numbers:
        signal.signal(number, leave)


def read_reports(run: Path) -> list[Report]:
    """The complete rows of a run's metrics.csv so far."""
    path = run / "metrics.csv"
    if not path.exists():
        return []
    lines = [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
    return [{name: float(value) for name, value in row.items() if value} for row in csv.DictReader(lines)]
