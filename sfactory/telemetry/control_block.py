"""What the processes of a run tell one another besides data: a stop flag, counters, and events.

The board is a small table in shared memory: one row per worker, written by it alone, read by the runner. Events are
    rare and
typed: finished episodes, the learner's statistics, and faults.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from sfactory.data.shared_memory import SharedArray
from sfactory.envs.interface import SurvivedFault
from sfactory.telemetry.stopwatch import COLUMNS, Household, Stopwatch
from sfactory.telemetry.trace import TracingStopwatch

PROGRESS_EVERY_S = 0.25
"""Seconds between two events of a worker about its progress."""
STARTING_S = 30.0
"""How much later than the run's beginning a process's silence begins to count, if it has not shown itself by then."""


class Board:
    """The table, the stop flag, the request to save, and the agreement on who samples.

    Args:
        names: Of the workers, one row each.
        trace: Folder in which every worker leaves its trace, or None.

    Attributes:
        made: When, in monotonic seconds; the run's time counts from here in all processes.
    """

    def __init__(self, names: list[str], trace: Path | None = None) -> None:
        self.names = names
        self._trace = trace
        self._watches: list[Stopwatch] = []
        self._household = Household()
        self._table = SharedArray((len(names), len(COLUMNS)), np.float64)
        self._flags = SharedArray((4,), np.int64)
        self._episode_return = SharedArray((1,), np.float64)
        self._episode_return.array[0] = np.nan
        self.made = time.monotonic()
        self._table.array[:, 0] = self.made + STARTING_S

    def stopwatch(self, name: str) -> Stopwatch:
        """A worker's own stopwatch, which keeps its row; time runs from here."""
        row = self._table.array[self.names.index(name)]
        if self._trace is None:
            watch = Stopwatch(row, self._household)
        else:
            watch = TracingStopwatch(row, self._trace / f"{name}.npz", self._household)
        self._watches.append(watch)
        return watch

    def close(self) -> None:
        """Close the stopwatches of this process, at its end."""
        for watch in self._watches:
            watch.close()

    def total(self, name: str, column: str) -> float:
        """A column of a worker's row, as it was last brought up to date."""
        return float(self._table.array[self.names.index(name), COLUMNS.index(column)])

    def snapshot(self) -> np.ndarray:
        """float64 ``[workers, len(COLUMNS)]``, a copy."""
        return self._table.array.copy()

    @property
    def stopping(self) -> bool:
        """Whether all processes shall come to an end."""
        return bool(self._flags.array[0])

    def stop(self) -> None:
        self._flags.array[0] = 1

    @property
    def saves_requested(self) -> int:
        """How many checkpoints have been asked for besides the regular ones."""
        return int(self._flags.array[1])

    def request_save(self) -> None:
        self._flags.array[1] += 1

    def begin_sampling(self) -> None:
        """New sampling processes are about to start, and all the old ones are dead: the learner has to take their slots
        back first."""
        self._flags.array[2] += 1
        sampling = [i for i, name in enumerate(self.names) if name != "learner"]
        self._table.array[sampling, 0] = time.monotonic() + STARTING_S

    @property
    def settled(self) -> bool:
        """Whether the learner has taken back the slots of dead sampling processes, so that new ones may ask for
        slots."""
        return bool(self._flags.array[3] == self._flags.array[2])

    def settle(self, take_back: Callable[[], None]) -> None:
        """Call `take_back` if slots have to be taken back. Only the learner calls this."""
        if (asked := self._flags.array[2]) != self._flags.array[3]:
            take_back()
            self._flags.array[3] = asked

    @property
    def episode_return(self) -> float:
        """Mean return of the last episodes, as the runner last reported it; NaN before the first."""
        return float(self._episode_return.array[0])

    @episode_return.setter
    def episode_return(self, value: float) -> None:
        self._episode_return.array[0] = value


@dataclass(frozen=True)
class Episodes:
    """Episodes that ended in a rollout worker.

    Attributes:
        returns: float32 ``[n]``, undiscounted sums of the environment's own rewards.
        lengths: int32 ``[n]``, env steps.
        extras: Numeric entries of ``info`` at the episodes' ends.
    """

    returns: np.ndarray
    lengths: np.ndarray
    extras: list[dict[str, float]] = field(default_factory=list)


@dataclass(frozen=True)
class SurvivedFaults:
    """Faults of environments that a rollout worker has survived since its last message.

    Attributes:
        counts: How many, by the environment's name.
        first: The first of them.
    """

    counts: dict[str, int]
    first: SurvivedFault


@dataclass(frozen=True)
class Progress:
    """The learner's state and its statistics since its last message.

    Attributes:
        env_steps: Samples learned from, over the whole run.
        updates: Optimizer steps, over the whole run.
        lag_mean, lag_max: Of the samples since the last message, in updates.
        losses: Means since the last message, by name, without those of skipped updates.
        skipped: Updates so far whose gradient was not finite.
    """

    env_steps: int
    updates: int
    lag_mean: float
    lag_max: float
    losses: dict[str, float]
    lr: float
    skipped: int = 0


@dataclass(frozen=True)
class Saved:
    """A checkpoint was written, or could not be (``error``)."""

    env_steps: int
    error: str | None = None


@dataclass(frozen=True)
class Finished:
    """The learner has reached the run's number of steps, or has stopped as told.

    Attributes:
        unsaved: Why its last checkpoint could not be written, if so.
    """

    env_steps: int
    completed: bool
    unsaved: str | None = None


@dataclass(frozen=True)
class Fault:
    """A worker cannot go on.

    Attributes:
        process: Its name.
        message: What went wrong, for the user.
        traceback: Where.
        bad_environment: Whether the environment is at fault, not sfactory.
    """

    process: str
    message: str
    traceback: str
    bad_environment: bool = False


Event = Episodes | SurvivedFaults | Progress | Saved | Finished | Fault
