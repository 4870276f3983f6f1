"""The state of a living run, for `python -m sfactory.status` and for the report that is written when a process
hangs."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import psutil

from sfactory.data.arena import FILLING, FINISHED, FREE
from sfactory.files import temporary_for
from sfactory.runs.run_folder import REPORTS, STATUS
from sfactory.runtime.processes import WorkerProcesses
from sfactory.runtime.stacks import ask_for_stacks, own_stacks
from sfactory.runtime.wires import Wires
from sfactory.telemetry.stopwatch import COLUMNS, Interval

KEPT_REPORTS = 10
SILENT_S = 2.0
"""Seconds without a heartbeat from which a process counts as silent. Working processes write four a second."""


@dataclass(frozen=True)
class ProcessState:
    """State of one worker and its process.

    Attributes:
        name: Name of the worker.
        pid: Id of its process, if it is alive.
        alive: Whether the process is alive.
        silent_s: Seconds since its last heartbeat.
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
        slots: Number of slots by state: free, filling, finished.
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


def observe(
    wires: Wires, processes: WorkerProcesses, before: np.ndarray, figures: dict[str, float] | None = None
) -> RunState:
    """Observe the state of a run.

    Args:
        wires: Wires of the run.
        processes: Processes of the workers; without any, all workers live in this one.
        before: An earlier snapshot of the control block, at which the observed interval begins.
        figures: Selected fields of the last report.
    """
    now, control = wires.control.snapshot(), wires.control
    pids, alive, slots = processes.pids(), processes.alive(), wires.arena.state
    if not processes.names:  # a serial run
        pids, alive = dict.fromkeys(control.names, os.getpid()), set(control.names)
    states = []
    for i, name in enumerate(control.names):
        row = dict(zip(COLUMNS, now[i].tolist(), strict=True))
        phases = Interval([name], before[i : i + 1], now[i : i + 1]).phases(name.split("-")[0])
        doing = max(phases, key=phases.__getitem__) if phases else "" if row["counted"] else "starting"
        # Without shared requests inference is inline.
        process = name if wires.requests else name.replace("policy", "rollout")
        rss = 0.0
        with contextlib.suppress(psutil.Error):
            rss = psutil.Process(pids[process]).memory_info().rss / 2**20 if process in pids else 0.0
        silent = max(0.0, time.monotonic() - row["heartbeat"])
        idle = time.monotonic() - row["counted"] if row["counted"] else None
        states.append(ProcessState(name, pids.get(process), process in alive, silent, doing, idle, row["cpu_s"], rss))
    queues = {f"requests of policy-{i}": len(queue) for i, queue in enumerate(wires.requests)}
    queues |= {f"ready of rollout-{i}": len(queue) for i, queue in enumerate(wires.ready)}
    queues |= {"free": len(wires.free), "finished": len(wires.finished)}
    counts = {
        name: int((slots == kind).sum())
        for name, kind in (("free", FREE), ("filling", FILLING), ("finished", FINISHED))
    }
    return RunState(time.time(), os.getpid(), states, counts, queues, figures or {})


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
    except (OSError, ValueError, TypeError, KeyError):
        return None


def write_report(folder: Path, reason: str, state: RunState, processes: WorkerProcesses) -> Path | None:
    """Write a report of the state of every process with its Python stacks.

    Args:
        folder: Run folder. Its newest ten reports are kept.
        reason: Why the report is written.
        state: State of the run.
        processes: Processes of the workers.

    Returns:
        The path of the report; None if it could not be written.
    """
    path = folder / REPORTS.replace("*", datetime.now(UTC).strftime("%Y%m%d-%H%M%S-%f"))
    lines = [f"{datetime.now(UTC).isoformat(timespec='seconds')}  {reason}", ""]
    lines += [f"{name} {value:,.6g}" for name, value in state.figures.items()] + [""]
    for process in state.processes:
        lines.append(
            f"{process.name:<12} pid {process.pid}  {process.sentence}  cpu {process.cpu_s:.1f} s  "
            f"{process.rss_mb:.0f} MiB"
        )
    lines += ["", f"slots: {_counts(state.slots.items())}", f"queues: {_counts(state.queues.items())}"]
    for name, stacks in {**ask_for_stacks(processes.pids(), processes.folders), "runner": own_stacks()}.items():
        lines += ["", f"=== {name}", stacks.rstrip() or "(no answer)"]
    try:
        path.write_text("\n".join(lines) + "\n")
        for old in sorted(folder.glob(REPORTS))[:-KEPT_REPORTS]:
            old.unlink()
    except OSError:
        return None
    return path


def _counts(items: Iterable[tuple[str, int]]) -> str:
    return ", ".join(f"{name} {count}" for name, count in items)
