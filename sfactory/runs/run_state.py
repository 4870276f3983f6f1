"""The state of a living run as data, and ``status.json`` in its folder, which keeps it.

:mod:`sfactory.runtime.observed_state` observes it within the run; :mod:`sfactory.status` reads it from outside.
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

from sfactory.files import temporary_for
from sfactory.runs.run_files import STATUS

SILENT_S = 2.0
"""Seconds without a heartbeat from which a process counts as silent. Working processes write four a second."""


@dataclass(frozen=True)
class ProcessState:
    """State of one worker and its process.

    Attributes:
        name: Name of the worker.
        pid: Id of its process, if it is alive.
        alive: Whether the process is alive.
        silent_s: Seconds since its last heartbeat; 0 for inference in a rollout worker, whose own row tells of both.
        doing: Phase of :data:`sfactory.telemetry.stopwatch.PHASES` that took most of its time in the last second; empty
            without a heartbeat in it.
        idle_s: Seconds since it last finished a batch; None before the first.
        cpu_s: CPU seconds of all its threads so far.
        rss_mb: Resident memory in MiB.
    """

    name: str
    pid: int | None
    alive: bool
    silent_s: float
    doing: str
    idle_s: float | None
    cpu_s: float
    rss_mb: float

    @property
    def sentence(self) -> str:
        """Description of the state in a few words."""
        if not self.alive:
            return "gone"
        if self.silent_s >= SILENT_S:
            return f"silent for {self.silent_s:.0f} s" + (f"; before: {self.doing}" if self.doing else "")
        return (self.doing or "alive") + (
            f"; last work {self.idle_s:.0f} s ago" if (self.idle_s or 0.0) >= SILENT_S else ""
        )


@dataclass(frozen=True)
class RunState:
    """State of a run at one moment.

    Attributes:
        time: Seconds since the epoch.
        pid: Process id of the runner.
        processes: States of all workers.
        slots: Number of slots by state: free, held (by the learner, for a while), filling, finished.
        queues: Number of waiting messages, by queue.
        figures: Selected fields of the last report: env steps, speed, return, faults and so on.
        returns: Mean returns of the reports so far, thinned out.
    """

    time: float
    pid: int
    processes: list[ProcessState]
    slots: dict[str, int]
    queues: dict[str, int]
    figures: dict[str, float] = field(default_factory=dict)
    returns: list[float] = field(default_factory=list)


def write_status(folder: Path, state: RunState) -> None:
    """Write the state to the run folder atomically. A failure to write is ignored, since the state is written every
    second."""
    temporary = temporary_for(folder / STATUS)
    with contextlib.suppress(OSError):
        temporary.write_text(json.dumps(asdict(state)))
        temporary.replace(folder / STATUS)


def remove_status(folder: Path) -> None:
    """Remove the state from the run folder, at the end of a run."""
    with contextlib.suppress(OSError):
        (folder / STATUS).unlink(missing_ok=True)


def read_status(folder: Path) -> RunState | None:
    """The state that :func:`write_status` wrote, or None."""
    try:
        values = json.loads((folder / STATUS).read_text())
        return RunState(**values | {"processes": [ProcessState(**process) for process in values["processes"]]})
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None
