"""The control block: shared memory by which the processes of a run are controlled and observed.

It holds one row of statistics per worker, written by that worker alone and read by the runner, and a few flags.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from sfactory.telemetry.stopwatch import COLUMNS, ProcessBusyTime, Stopwatch
from sfactory.telemetry.trace import TracingStopwatch

STARTING_S = 30.0
"""Seconds that a process has for its start before its silence begins to count."""
_HEARTBEAT = COLUMNS.index("heartbeat")
_STOP, _SAVES, _RECLAIMS_REQUESTED, _RECLAIMS_DONE = range(4)


class _SharedArray(Protocol):
    array: np.ndarray


class ControlBlock:
    """Statistics of all workers, the stop flag, requests to save, and the reclaim of slots after a restart.

    Args:
        names: Names of the workers, in the order of their rows.
        allocate: Makes a zeroed array of a shape and dtype that all processes share
            (:class:`sfactory.data.shared_memory.SharedArray`).
        trace: Folder in which every worker leaves its trace, or None.
        wall_before_s: Seconds that the run has taken before.

    Attributes:
        created_s: Time of construction in monotonic seconds. The run's wall time counts from here in all processes.
    """

    def __init__(
        self,
        names: list[str],
        allocate: Callable[[tuple[int, ...], npt.DTypeLike], _SharedArray],
        trace: Path | None = None,
        wall_before_s: float = 0.0,
    ) -> None:
        self.names, self._wall_before_s = names, wall_before_s
        self._trace = trace
        self._watches: list[Stopwatch] = []
        self._busy_time = ProcessBusyTime()
        self._table = allocate((len(names), len(COLUMNS)), np.float64)
        self._flags = allocate((4,), np.int64)
        self._episode_return = allocate((1,), np.float64)
        self._episode_return.array[0] = np.nan
        self.created_s = time.monotonic()
        self._table.array[:, _HEARTBEAT] = self.created_s + STARTING_S

    def stopwatch(self, name: str) -> Stopwatch:
        """The stopwatch that keeps a worker's row. Time runs from this call."""
        row = self._table.array[self.names.index(name)]
        if self._trace is None:
            watch = Stopwatch(row, self._busy_time)
        else:
            watch = TracingStopwatch(row, self._trace / f"{name}.npz", self._busy_time)
        self._watches.append(watch)
        return watch

    def rest(self) -> None:
        """Show that the workers of this process live, and wait."""
        for watch in self._watches:
            watch.lap("waiting")

    def close(self) -> None:
        """Close the stopwatches of this process, at its end."""
        for watch in self._watches:
            watch.close()

    def total(self, name: str, column: str) -> float:
        """A column of a worker's row, as of the row's last update."""
        return float(self._table.array[self.names.index(name), COLUMNS.index(column)])

    def snapshot(self) -> np.ndarray:
        """float64 ``[workers, len(COLUMNS)]``, a copy."""
        return self._table.array.copy()

    @property
    def wall_s(self) -> float:
        """Seconds that the run has taken so far, over all resumes."""
        return self._wall_before_s + time.monotonic() - self.created_s

    @property
    def stopping(self) -> bool:
        """Whether all processes must end."""
        return bool(self._flags.array[_STOP])

    def stop(self) -> None:
        """Tell all processes to end."""
        self._flags.array[_STOP] = 1

    @property
    def saves_requested(self) -> int:
        """Number of checkpoints requested so far besides the regular ones."""
        return int(self._flags.array[_SAVES])

    def request_save(self) -> None:
        """Request a checkpoint."""
        self._flags.array[_SAVES] += 1

    def restart_sampling(self) -> None:
        """Request that the learner reclaims all slots, and give new sampling processes time for their start.

        All sampling processes must be dead.
        """
        self._flags.array[_RECLAIMS_REQUESTED] += 1
        sampling = [i for i, name in enumerate(self.names) if name.startswith(("policy", "rollout"))]
        self._table.array[sampling, _HEARTBEAT] = time.monotonic() + STARTING_S

    def expect(self, name: str) -> None:
        """Give a worker's new process time for its start."""
        self._table.array[self.names.index(name), _HEARTBEAT] = time.monotonic() + STARTING_S

    def forget(self, name: str) -> None:
        """Show that a worker will not come back."""
        self._table.array[self.names.index(name), _HEARTBEAT] = 0.0

    @property
    def slots_reclaimed(self) -> bool:
        """Whether the learner has reclaimed the slots of dead sampling processes. New ones may take slots only then."""
        return bool(self._flags.array[_RECLAIMS_DONE] == self._flags.array[_RECLAIMS_REQUESTED])

    def reclaim_slots_if_requested(self, reclaim_slots: Callable[[], None]) -> None:
        """Call `reclaim_slots` once for every request. Only the learner's process calls this."""
        if (requested := self._flags.array[_RECLAIMS_REQUESTED]) != self._flags.array[_RECLAIMS_DONE]:
            reclaim_slots()
            self._flags.array[_RECLAIMS_DONE] = requested

    @property
    def episode_return(self) -> float:
        """Mean return of recent episodes, as last reported by the runner; NaN before the first report."""
        return float(self._episode_return.array[0])

    @episode_return.setter
    def episode_return(self, value: float) -> None:
        self._episode_return.array[0] = value
