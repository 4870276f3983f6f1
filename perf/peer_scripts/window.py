"""How every driver counts: env steps that have been trained on, over a window after a warm-up, a learning curve, or
the episodes of a score."""

from __future__ import annotations

import itertools
import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

RECENT, EARLIEST = 20, 100
"""Episodes of training whose mean return is a score, and how many must have ended before them. Of many games that begin
at once the shortest end first: in VizdoomBasic those that luck has won."""
KEPT = EARLIEST + RECENT
"""Returns that a trainer keeps for :func:`recent_mean` and :func:`score_of`."""


def request() -> dict[str, Any]:
    """What perf/peers.py asks of a driver: one JSON object as its first argument."""
    return json.loads(sys.argv[1])


def answer(**values: float) -> None:
    """The driver's result: one JSON object as a line of its own."""
    print("RESULT " + json.dumps(values), flush=True)


def recent_mean(returns: Sequence[float]) -> float:
    """The mean of the newest returns, of which there is at least one."""
    return float(statistics.fmean(itertools.islice(reversed(returns), RECENT)))


def score_of(returns: Sequence[float]) -> float | None:
    """The mean of the newest returns, once enough of the :data:`KEPT` ones are there."""
    return recent_mean(returns) if len(returns) >= KEPT else None


class Window:
    """Env steps per second between two reports.

    The window opens with the first report at least `warmup` seconds after the very first one, and closes with the first
    report at least `seconds` later.
    """

    def __init__(self, warmup: float, seconds: float) -> None:
        self._warmup, self._seconds = warmup, seconds
        self._first: float | None = None
        self._opened: tuple[float, int] | None = None
        self.closed = False

    def report(self, env_steps: int) -> bool:
        """Take the number of env steps trained on so far; True once the window has closed, and then the result is
        printed."""
        now = time.monotonic()
        if self._first is None:
            self._first = now
        if self._opened is None:
            if now - self._first >= self._warmup:
                self._opened = now, env_steps
        elif not self.closed and now - self._opened[0] >= self._seconds:
            self.closed = True
            answer(fps=(env_steps - self._opened[1]) / (now - self._opened[0]))
        return self.closed


class Curve:
    """A learning curve in a CSV file, at most one row a second.

    Args:
        path: Of the file, which is made anew.
        begun: The time at which the trainer was started, as :func:`time.time` has it.
    """

    def __init__(self, path: str, begun: float) -> None:
        self._path, self._begun, self._last = Path(path), begun, 0.0
        self._path.write_text("env_steps,wall_s,episode_return_mean\n")

    def report(self, env_steps: int, return_mean: float) -> None:
        """Take the mean return of the last episodes."""
        now = time.time()
        if now - self._last < 1.0:
            return
        self._last = now
        with self._path.open("a") as file:
            file.write(f"{env_steps},{now - self._begun:.2f},{return_mean:.6g}\n")
