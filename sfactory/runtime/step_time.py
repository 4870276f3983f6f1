"""Step time: an environment that nobody knows is stepped for a moment before its run, in a process of its own that can
do no harm to the run. Steps that wait, for a simulator elsewhere or a network, have room beside one another on a core,
and so the run has more workers."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import time
from dataclasses import dataclass

import numpy as np
import psutil

from sfactory.envs import make_group
from sfactory.envs.interface import EnvRequest
from sfactory.envs.random_play import random_steps
from sfactory.runtime.plan import PickledPlan, Plan
from sfactory.runtime.processes import EventSender, WorkerProcesses, fork_server
from sfactory.runtime.worker_process import settle_process
from sfactory.telemetry.stopwatch import processor_wait_s

PROCESS = "step-time"
FAMILIES = ("gymnasium", "multiagent")
"""Families of environments of which nothing is known but that Python steps them one by one."""
KNOWN = ("gymnasium.envs.", "sfactory.envs.")
"""Where environments come from whose steps are known to compute."""
FIRST_STEPS = 2
"""Steps that are not measured: some compile functions in them."""
FEWEST_STEPS = 5
MEASURED_S = 0.2
"""Seconds for which slow steps are measured."""
LONG_STEP_S = 1e-3
"""Seconds of an env step from which it counts whether it computes or waits for something else."""
WAITING = 0.2
"""Share of their time in which env steps compute, below which they are said to wait. Those that only wait for a core of
a crowded machine compute for more of it."""
PATIENCE_S = 10.0
"""Seconds after which a run is planned without the measurement."""
POLL_S = 0.1


@dataclass(frozen=True)
class StepTime:
    """What the steps of an environment take.

    Attributes:
        seconds: Of an env step.
        computing: Share of them, 0 to 1, in which the process or the programs that the environment has started compute,
            or wait for a core to compute on.
    """

    seconds: float
    computing: float

    @property
    def waits(self) -> bool:
        """Whether steps are long, and for most of it wait for something else than a core."""
        return self.seconds >= LONG_STEP_S and self.computing < WAITING


def measure_step_time(plan: Plan) -> StepTime | None:
    """What the steps of a plan's environment take; None where it is known that they compute, where processes cannot be
    started, and where the environment fails or is not done within `PATIENCE_S`, which the run itself will tell.

    Args:
        plan: Plan of the run, without its sizes.
    """
    known = plan.env.source is not None and plan.env.source.made.startswith(KNOWN)
    if known or plan.env.family not in FAMILIES or multiprocessing.current_process().daemon:
        return None
    with fork_server(), WorkerProcesses() as processes:
        processes.start(PROCESS, _main, PickledPlan(plan))
        deadline = time.monotonic() + PATIENCE_S
        while processes.alive() and time.monotonic() < deadline:
            if measured := processes.take(POLL_S):
                return measured[0]
    return None


def _main(name: str, events: EventSender, folder: str, plan: PickledPlan) -> None:
    """Measure and send it; what the environment prints, or raises, it will again in the run."""
    settle_process(name, folder)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    with contextlib.suppress(Exception, SystemExit):
        events.put(_measure(plan.open()))


def _measure(plan: Plan) -> StepTime:
    group = make_group(EnvRequest.of(plan.config, plan.env_source), plan.env, 1, 0, plan.config.seed)
    try:
        step = random_steps(group, plan.env, np.random.default_rng(0))
        for _ in range(FIRST_STEPS):
            step()
        calls, elapsed, (begun, worked) = 0, 0.0, _now()
        while calls < FEWEST_STEPS or LONG_STEP_S * calls <= elapsed < MEASURED_S:
            step()
            calls += 1
            elapsed = time.monotonic() - begun
        return StepTime(elapsed / calls, min(1.0, (_now()[1] - worked) / elapsed))
    finally:
        group.close()


def programs_s(pid: int) -> float:
    """Seconds in which the programs that a process has started have computed, with those that have ended, or have
    waited for a core; 0 where there is no such process."""
    computed = 0.0
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        ended = process.cpu_times()
        computed += ended.children_user + ended.children_system
        for child in process.children(recursive=True):
            with contextlib.suppress(psutil.Error):
                times = child.cpu_times()
                computed += times.user + times.system + processor_wait_s(child.pid)
    return computed


def _now() -> tuple[float, float]:
    """Monotonic seconds, and seconds in which this process and its programs have computed or waited for a core."""
    return time.monotonic(), time.process_time() + processor_wait_s() + programs_s(os.getpid())
