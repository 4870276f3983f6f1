"""The state of a living run as a whole: for `python -m sfactory.status`, and for the report that is written when
something hangs."""

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
"""Age of a process's last sign of life from which it counts as silent: working processes give four a second."""


@dataclass(frozen=True)
class ProcessState:
    """What one worker and its process do.

    Attributes:
        silent_s: Seconds since its last sign of life.
        doing: What it mostly did in the second before that, a phase of :data:`sfactory.telemetry.stopwatch.PHASES`;
            empty if it gave none.
        idle_s: Seconds since it last finished a piece of work; None before the first.
        cpu_s: Of all its threads, so far.
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
        """Its state in a few words."""
        if not self.alive:
            return "gone"
        if self.silent_s >= SILENT_S:
            return f"silent for {self.silent_s:.0f} s" + (f"; before: {self.doing}" if self.doing else "")
        return (self.doing or "alive") + (
            f"; last work {self.idle_s:.0f} s ago" if (self.idle_s or 0.0) >= SILENT_S else ""
        )


@dataclass(frozen=True)
class RunState:
    """What a run does at a moment.

    Attributes:
        time: Seconds since the epoch.
        pid: Of the runner.
        slots: How many are free, being filled, and finished.
        queues: Messages waiting, by queue.
        figures: Of the last report: env steps, speed, return, faults and so on.
    """

    time: float
    pid: int
    processes: list[ProcessState]
    slots: dict[str, int]
    queues: dict[str, int]
    figures: dict[str, float] = field(default_factory=dict)


def observe(
    wires: Wires, processes: WorkerProcesses, before: np.ndarray, figures: dict[str, float] | None = None
) -> RunState:
    """The state of the run that these wires and processes belong to.

    Args:
        processes: The workers' processes; without any, all workers live in this one.
        before: An earlier snapshot of the board, since when the processes are looked at.
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
        # With inline inference nobody shares requests.
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
    """Keep the state in a run folder, whole at every moment. What cannot be written is left out: it is renewed every
    second."""
    temporary = temporary_for(folder / STATUS)
    with contextlib.suppress(OSError):
        temporary.write_text(json.dumps(asdict(state)))
        temporary.replace(folder / STATUS)


def remove_status(folder: Path) -> None:
    """For the end of a run."""
    with contextlib.suppress(OSError):
        (folder / STATUS).unlink(missing_ok=True)


def read_status(folder: Path) -> RunState | None:
    """What :func:`write_status` wrote, or None."""
    try:
        values = json.loads((folder / STATUS).read_text())
        return RunState(**values | {"processes": [ProcessState(**process) for process in values["processes"]]})
    except (OSError, ValueError, TypeError, KeyError):
        return None


def write_report(folder: Path, reason: str, state: RunState, processes: WorkerProcesses) -> Path | None:
    """Write down what every process does, with its Python stack.

    Returns:
        The file, in the run folder, of which the newest ten are kept; None if it could not be written.
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
