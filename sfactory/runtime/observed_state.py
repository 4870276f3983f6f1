"""Observes the state of a living run from its shared memory and its processes, as a
:class:`sfactory.runs.run_state.RunState`; and the file of stacks that is written when a process hangs."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import psutil

from sfactory.data.arena import FILLING, FINISHED, FREE
from sfactory.runs.run_files import STACKS
from sfactory.runs.run_state import ProcessState, RunState
from sfactory.runtime.processes import WorkerProcesses
from sfactory.runtime.stacks import ask_for_stacks, own_stacks
from sfactory.runtime.wires import Wires
from sfactory.telemetry.stopwatch import COLUMNS, Interval

KEPT_FILES = 10


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
        # Inference in a rollout worker is silent while that steps, of which its own row tells.
        silent = max(0.0, time.monotonic() - row["heartbeat"]) if process == name else 0.0
        idle = time.monotonic() - row["counted"] if row["counted"] else None
        states.append(ProcessState(name, pids.get(process), process in alive, silent, doing, idle, row["cpu_s"], rss))
    queues = {f"requests of policy-{i}": len(queue) for i, queue in enumerate(wires.requests)}
    queues |= {f"ready of rollout-{i}": len(queue) for i, queue in enumerate(wires.ready)}
    free, filling, finished = (int((slots == kind).sum()) for kind in (FREE, FILLING, FINISHED))
    given_back = min(len(wires.free), free)
    counts = {"free": given_back, "held": free - given_back, "filling": filling, "finished": finished}
    return RunState(time.time(), os.getpid(), states, counts, queues, figures or {})


def write_stack_file(folder: Path, reason: str, state: RunState, processes: WorkerProcesses) -> Path | None:
    """Write a file with the state of every process and its Python stacks.

    Args:
        folder: Run folder. Its newest ten such files are kept.
        reason: Why it is written.
        state: State of the run.
        processes: Processes of the workers.

    Returns:
        The path of the file; None if it could not be written.
    """
    path = folder / STACKS.replace("*", datetime.now(UTC).strftime("%Y%m%d-%H%M%S-%f"))
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
        for old in sorted(folder.glob(STACKS))[:-KEPT_FILES]:
            old.unlink()
    except OSError:
        return None
    return path


def _counts(items: Iterable[tuple[str, int]]) -> str:
    return ", ".join(f"{name} {count}" for name, count in items)
