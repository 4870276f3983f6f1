"""Stopwatches: each worker attributes all of its wall time to named phases.

A lap costs about 0.2 us and stays in the worker. Four times a second the totals are written to the worker's row of the
control block, of which the runner takes differences. Asynchronous work on CUDA counts to the phase that first waits for
it.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, process_time
from typing import Literal, Protocol

import numpy as np

PHASES = (
    "starting",
    "waiting",
    "blocked",
    "environment",
    "copying",
    "forward",
    "sampling",
    "update",
    "weights",
    "queue",
    "reporting",
)
"""Phases of a worker's time.

- starting: making environments, models and buffers; the first resets.
- waiting: waiting for a message, or for the worker's turn in a shared process.
- blocked: all groups of a rollout worker wait for a free slot.
- environment: stepping environments.
- copying: gathering and moving data, bookkeeping.
- forward: forward passes of the model, in the learner those that targets come from.
- sampling: sampling and writing actions.
- update: the learner's updates, each with the passes over its minibatch and Adam's step, and observations' moments.
- weights: publishing or reading weights.
- queue: sending and receiving messages without waiting.
- reporting: statistics and checkpoints.
"""
IDLE = ("waiting", "blocked")
WORKING = ("starting", "environment", "forward", "update")
"""Phases that show progress: no process is in them while all processes wait for one another."""
SIZE_CLASSES = 24
"""Classes of batch sizes; class c counts batches of 2^(c-1) to 2^c - 1 rows."""
COLUMNS = (
    "heartbeat",
    "cpu_s",
    "crowded_s",
    "counted",
    "batches",
    "rows",
    "full_waits",
    "env_faults",
    *PHASES,
    *(f"size_{c}" for c in range(SIZE_CLASSES)),
)
FLUSH_EVERY_S = 0.25
_COLUMN = {name: i for i, name in enumerate(COLUMNS)}
_PHASES = slice(_COLUMN[PHASES[0]], _COLUMN[PHASES[0]] + len(PHASES))
_SIZES = slice(_COLUMN["size_0"], _COLUMN["size_0"] + SIZE_CLASSES)


def processor_wait_s(thread: int | Literal["thread-self"] = "thread-self") -> float:
    """Seconds for which this thread, or that of a number, has waited while others had the processor; 0 where the system
    does not tell."""
    try:
        return int(Path(f"/proc/{thread}/schedstat").read_text().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


@dataclass
class ProcessBusyTime:
    """Busy time of all workers of one process together, by which its CPU time is divided among them.

    Attributes:
        busy_s: Seconds in which any of the workers did not wait.
    """

    busy_s: float = 0.0


class CountingQueue(Protocol):
    """A queue that counts how often this process found it full."""

    full_waits: int


class Stopwatch:
    """Measures the time and the work of one worker. Time runs from the construction; totals continue from the row.

    Args:
        row: float64 ``[len(COLUMNS)]``, the worker's row of the control block: ``heartbeat`` (time of the last update
            in monotonic seconds), ``cpu_s`` (CPU time of all threads of the process, divided among its workers by their
            busy time), ``crowded_s`` (seconds in which others had the core that the worker's thread waited for, divided
            likewise), ``counted`` (time of the last finished batch in monotonic seconds), ``batches`` and ``rows``
            (batches finished and their rows), ``full_waits`` (puts that found a queue full), ``env_faults`` (faults of
            environments that were survived), seconds of every phase, and batches of every size class. All but the times
            are running totals.
        busy_time: Busy time of the process, if other workers share it.

    Attributes:
        queues: Where the worker sends messages.
    """

    def __init__(self, row: np.ndarray, busy_time: ProcessBusyTime | None = None) -> None:
        self._row, self._busy_time = row, busy_time or ProcessBusyTime()
        self._seconds = dict(zip(PHASES, row[_PHASES].tolist(), strict=True))
        self._sizes = [int(count) for count in row[_SIZES]]
        self._batches, self._rows = (int(row[_COLUMN[name]]) for name in ("batches", "rows"))
        self._full_waits, self.env_faults = (int(row[_COLUMN[name]]) for name in ("full_waits", "env_faults"))
        self._counted, self._due = float(row[_COLUMN["counted"]]), 0.0
        self._cpu_s, self._crowded_s = float(row[_COLUMN["cpu_s"]]), float(row[_COLUMN["crowded_s"]])
        self.queues: Collection[CountingQueue] = ()
        self._cpu_before = self._cpu_now()
        self._last = monotonic()

    def lap(self, phase: str) -> None:
        """Attribute the time since the last lap to a phase, and update the row four times a second."""
        now = monotonic()
        passed = now - self._last
        self._seconds[phase] += passed
        if phase not in IDLE:
            self._busy_time.busy_s += passed
        self._last = now
        if now >= self._due:
            self.flush()

    def count(self, rows: int) -> None:
        """Count a batch of `rows` rows, finished at the last lap."""
        self._batches += 1
        self._rows += rows
        self._counted = self._last
        self._sizes[min(rows.bit_length(), SIZE_CLASSES - 1)] += 1
        # The first batch is written at once: from it the runner knows that there is something to save. If the last lap
        # has just written the row, it is written again, to include this batch.
        if self._batches == 1 or self._due == self._last + FLUSH_EVERY_S:
            self.flush()

    def _busy_s(self) -> float:
        return sum(seconds for phase, seconds in self._seconds.items() if phase not in IDLE)

    def _cpu_now(self) -> tuple[float, float, float, float]:
        return process_time(), processor_wait_s(), self._busy_s(), self._busy_time.busy_s

    def _count_cpu(self) -> None:
        """Add this worker's share of the time that the process has had a core, or waited for one, since the last
        call."""
        now = self._cpu_now()
        cpu_s, crowded_s, own, together = (a - b for a, b in zip(now, self._cpu_before, strict=True))
        self._cpu_before = now
        share = own / together if together > 0 else 1.0
        self._cpu_s += share * cpu_s
        self._crowded_s += share * crowded_s

    def flush(self) -> None:
        """Update the row of the control block."""
        self._count_cpu()
        full_waits = self._full_waits + sum(queue.full_waits for queue in self.queues)
        times, counts = (self._last, self._cpu_s, self._crowded_s, self._counted), (self._batches, self._rows)
        self._row[:] = (*times, *counts, full_waits, self.env_faults, *self._seconds.values(), *self._sizes)
        self._due = self._last + FLUSH_EVERY_S

    def close(self) -> None:
        """Update the row for the last time, at the end of the worker."""
        self.lap("reporting")
        self.flush()


@dataclass(frozen=True)
class Interval:
    """Differences between two snapshots of the control block.

    Attributes:
        names: Names of the workers: a kind (learner, policy, rollout), and a number where there are several.
        before, after: The snapshots, float64 ``[workers, len(COLUMNS)]``.
    """

    names: list[str]
    before: np.ndarray
    after: np.ndarray

    def column(self, kind: str, name: str) -> np.ndarray:
        """float64 ``[workers of that kind]``, increase of a column."""
        return self._change(kind)[:, _COLUMN[name]]

    def phases(self, kind: str) -> dict[str, float]:
        """Share of every phase in the time of all workers of a kind, 0 to 1; empty if no time is accounted for."""
        seconds = self._change(kind)[:, _PHASES].sum(0)
        return dict(zip(PHASES, (seconds / seconds.sum()).tolist(), strict=True)) if seconds.sum() > 0 else {}

    def accounted_s(self, kind: str) -> float:
        """Mean over the workers of a kind of the sum of their phases, in seconds of wall time."""
        return float(self._change(kind)[:, _PHASES].sum(1).mean())

    def busy(self, kind: str) -> float:
        """Share of time, 0 to 1, in which workers of a kind did not wait; NaN if no time is accounted for."""
        shares = self.phases(kind)
        return 1.0 - sum(shares[phase] for phase in IDLE) if shares else math.nan

    def batch_sizes(self, kind: str) -> dict[int, int]:
        """Number of batches by size class, whose key is the largest number of rows of the class."""
        counts = self._change(kind)[:, _SIZES].sum(0)
        return {2**c - 1: int(count) for c, count in enumerate(counts) if count}

    def rate(self, kind: str) -> float:
        """Rows per second of all workers of a kind together, each measured from the end of one batch to the end of
        another; NaN without batches."""
        rows, seconds = self.column(kind, "rows"), self.column(kind, "counted")
        return float((rows[seconds > 0] / seconds[seconds > 0]).sum()) if (seconds > 0).any() else math.nan

    def _change(self, kind: str) -> np.ndarray:
        mask = [name.split("-")[0] == kind for name in self.names]
        return (self.after - self.before)[mask]
