"""Where the workers' time goes: each worker's stopwatch attributes all of its wall time to named phases.

A lap costs about 0.2 us and stays in the worker; four times a second the totals go to the worker's row of the board,
where the runner takes differences. On CUDA, work that runs by itself shows up in the phase that first waits for it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from time import monotonic, process_time

import numpy as np

PHASES = (
    "starting",
    "waiting",
    "blocked",
    "environment",
    "copying",
    "forward",
    "sampling",
    "backward",
    "optimizer",
    "weights",
    "queue",
    "reporting",
)
"""What a worker can be doing.

- starting: making environments, models and buffers; the first resets.
- waiting: for a message, or for its turn in a shared process; blocked: a rollout worker all of whose groups wait for a
  free slot.
- environment: stepping. copying: gathering and moving data, bookkeeping.
- forward: the model, in the learner with targets and loss; sampling: drawing and writing actions. backward, optimizer:
  the learner's.
- weights: publishing or fetching them. queue: sending and fetching messages without a wait.
- reporting: statistics and checkpoints.
"""
IDLE = ("waiting", "blocked")
WORKING = ("starting", "environment", "forward", "backward")
"""Phases that no process is ever in while all of them wait for one another."""
SIZES = 24
"""Classes of the size of a piece of work; class c counts those of 2^(c-1) up to 2^c - 1 rows."""
COLUMNS = (
    "heartbeat",
    "cpu_s",
    "counted",
    "batches",
    "rows",
    "full_waits",
    "env_faults",
    *PHASES,
    *(f"size_{c}" for c in range(SIZES)),
)
FLUSH_EVERY_S = 0.25
_COLUMN = {name: i for i, name in enumerate(COLUMNS)}
_PHASES = slice(_COLUMN[PHASES[0]], _COLUMN[PHASES[0]] + len(PHASES))
_SIZES = slice(_COLUMN["size_0"], _COLUMN["size_0"] + SIZES)


@dataclass
class ProcessBusyTime:
    """What the workers of one process share.

    Attributes:
        busy_s: Seconds in which one of them or another did not wait.
    """

    busy_s: float = 0.0


class Stopwatch:
    """One worker's account of its time and its work. Time runs from the construction; totals go on from those in the
    row.

    Args:
        row: float64 ``[len(COLUMNS)]`` of the board: ``heartbeat`` (monotonic seconds), ``cpu_s`` (of all threads of
            the process, divided among its workers by the time in which each was busy), ``counted`` (when work was last
            counted, monotonic seconds), ``batches`` and ``rows`` (of work done), ``full_waits`` (puts that found a
            queue full), ``env_faults`` (of environments, survived), seconds of every phase, and pieces of work of every
            size. All are running totals.
        busy_time: Of the process, if other workers live in it.
    """

    def __init__(self, row: np.ndarray, busy_time: ProcessBusyTime | None = None) -> None:
        self._row, self._busy_time = row, busy_time or ProcessBusyTime()
        self._seconds = dict(zip(PHASES, row[_PHASES].tolist(), strict=True))
        self._sizes = [int(count) for count in row[_SIZES]]
        self._batches, self._rows = (int(row[_COLUMN[name]]) for name in ("batches", "rows"))
        self._full_waits, self.env_faults = (int(row[_COLUMN[name]]) for name in ("full_waits", "env_faults"))
        self._counted, self._cpu_s, self._due = float(row[_COLUMN["counted"]]), float(row[_COLUMN["cpu_s"]]), 0.0
        self.full_waits = 0
        self._cpu_before = process_time(), self._busy_s(), self._busy_time.busy_s
        self._last = monotonic()

    def lap(self, phase: str) -> None:
        """All that has passed since the last lap was `phase`. Now and then this shows the runner a sign of life."""
        now = monotonic()
        passed = now - self._last
        self._seconds[phase] += passed
        if phase not in IDLE:
            self._busy_time.busy_s += passed
        self._last = now
        if now >= self._due:
            self.flush()

    def count(self, rows: int) -> None:
        """A piece of work of so many rows was done by the last lap."""
        self._batches += 1
        self._rows += rows
        self._counted = self._last
        self._sizes[min(rows.bit_length(), SIZES - 1)] += 1
        if self._batches == 1:  # the runner asks whether there is anything to save
            self.flush()

    def _busy_s(self) -> float:
        return sum(seconds for phase, seconds in self._seconds.items() if phase not in IDLE)

    def _cpu_since_last(self) -> float:
        """This worker's share of the process's CPU seconds since the last call."""
        now = process_time(), self._busy_s(), self._busy_time.busy_s
        cpu_s, own, together = (a - b for a, b in zip(now, self._cpu_before, strict=True))
        self._cpu_before = now
        return cpu_s * (own / together if together > 0 else 1.0)

    def flush(self) -> None:
        """Bring the board's row up to date."""
        self._cpu_s += self._cpu_since_last()
        full_waits = self._full_waits + self.full_waits
        totals = (self._last, self._cpu_s, self._counted, self._batches, self._rows, full_waits, self.env_faults)
        self._row[:] = (*totals, *self._seconds.values(), *self._sizes)
        self._due = self._last + FLUSH_EVERY_S

    def close(self) -> None:
        """The worker is at its end."""
        self.lap("reporting")
        self.flush()


@dataclass(frozen=True)
class Interval:
    """What the workers of a run did between two snapshots of the board.

    Attributes:
        names: Of the workers: a kind (learner, policy, rollout), and a number where there are several.
        before, after: float64 ``[workers, len(COLUMNS)]``.
    """

    names: list[str]
    before: np.ndarray
    after: np.ndarray

    def column(self, kind: str, name: str) -> np.ndarray:
        """float64 ``[processes of that kind]``: by how much a column grew."""
        return self._change(kind)[:, _COLUMN[name]]

    def phases(self, kind: str) -> dict[str, float]:
        """Share of every phase in the accounted time of all processes of a kind, 0 to 1; empty if there is none."""
        seconds = self._change(kind)[:, _PHASES].sum(0)
        return dict(zip(PHASES, (seconds / seconds.sum()).tolist(), strict=True)) if seconds.sum() > 0 else {}

    def accounted_s(self, kind: str) -> float:
        """Mean seconds of wall time that the phases of a process of that kind add up to."""
        return float(self._change(kind)[:, _PHASES].sum(1).mean())

    def busy(self, kind: str) -> float:
        """Share of their time, 0 to 1, that the processes of a kind did not wait; NaN if none has accounted for any."""
        shares = self.phases(kind)
        return 1.0 - sum(shares[phase] for phase in IDLE) if shares else math.nan

    def sizes(self, kind: str) -> dict[int, int]:
        """Pieces of work by their size: the largest number of rows of a class, and how many fell into it."""
        counts = self._change(kind)[:, _SIZES].sum(0)
        return {2**c - 1: int(count) for c, count in enumerate(counts) if count}

    def rate(self, kind: str) -> float:
        """Rows per second of all processes of a kind, each from the end of one piece of work to the end of another; NaN
        without one."""
        rows, seconds = self.column(kind, "rows"), self.column(kind, "counted")
        return float((rows[seconds > 0] / seconds[seconds > 0]).sum()) if (seconds > 0).any() else math.nan

    def _change(self, kind: str) -> np.ndarray:
        mask = [name.split("-")[0] == kind for name in self.names]
        return (self.after - self.before)[mask]
