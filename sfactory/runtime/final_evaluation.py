"""The final evaluation: after training, the last policy plays episodes for the run's page, in a process of its own."""

from __future__ import annotations

import functools
import time

from sfactory.config import to_dict
from sfactory.errors import said
from sfactory.runs.checkpoint import CheckpointStore
from sfactory.runs.report_page import evaluating_command
from sfactory.runs.run_files import EVALUATION, OUTPUT, read_json
from sfactory.runs.run_folder import RunFolder
from sfactory.runtime import worker_process, workers
from sfactory.runtime.monitor import Monitor
from sfactory.runtime.output import PrintedLines
from sfactory.runtime.plan import EVALUATOR, PickledPlan, Plan
from sfactory.runtime.processes import WorkerProcesses
from sfactory.runtime.reporting import Result
from sfactory.runtime.supervisor import EVENT_POLL_S
from sfactory.runtime.training import LAST_EVALUATION_S, TOLD_S

TRAINED_S = 5.0
"""A run that has trained for less ends without."""
MOST_SHARE, AT_LEAST_S = 0.1, 5.0
"""It may take this share of the time that was trained, always so many seconds, and never more than
:data:`LAST_EVALUATION_S`."""


def evaluate_at_end(plan: Plan, folder: RunFolder, store: CheckpointStore, monitor: Monitor, result: Result) -> None:
    """Evaluate the policy that a run has ended with, and record an episode, unless the run is short or has evaluated
    beside training. Whatever goes wrong with it, the run has ended as it has.

    Args:
        plan: Plan of the run.
        folder: Run folder, which the figures and the video belong to.
        store: Its checkpoints.
        monitor: Shows what comes of it; a signal ends it.
        result: Result of the run.
    """
    config = plan.config
    wanted = config.eval.at_end and not (plan.evaluates or plan.sample_only or config.serial)
    if not wanted or result.status != "completed" or result.wall_s < TRAINED_S:
        return
    try:
        monitor.note(_evaluate(plan, folder, store, monitor, result))
    except Exception as error:
        monitor.note(f"no final evaluation: {said(error)}")


def _evaluate(plan: Plan, folder: RunFolder, store: CheckpointStore, monitor: Monitor, result: Result) -> str:
    """Have the process play for as long as it may, and say what came of it."""
    most_s = min(max(AT_LEAST_S, MOST_SHARE * result.wall_s), LAST_EVALUATION_S)
    begin, told = time.monotonic(), False
    with (
        PrintedLines(folder.path / OUTPUT if monitor.reporter.live else None, monitor.note) as printed,
        WorkerProcesses() as processes,
    ):
        main = functools.partial(worker_process.process_main, output=printed.path)
        target = workers.final_evaluation_main
        processes.start(EVALUATOR, main, target, PickledPlan(plan), monitor.wires, folder.path, store)
        while (alive := processes.alive()) and monitor.signal is None and time.monotonic() - begin < most_s:
            monitor.watch(processes.take(EVENT_POLL_S), report=False)
            if not told and time.monotonic() - begin > TOLD_S:
                told = True
                monitor.note(f"waits for the final evaluation, {most_s:.0f} s at most; Ctrl-C ends the run without it")
    found = read_json(folder.path / EVALUATION)
    if found.get("env_steps") == result.env_steps:
        low, mean, high = (f"{found[f'return_{name}']:.4g}" for name in ("min", "mean", "max"))
        return f"final evaluation: return {mean} ({low} to {high}) in {found['episodes']} episodes"
    if monitor.signal is not None:
        return "no final evaluation: interrupted"
    late = f"it was not done within {most_s:.0f} s" if alive else "its process has died"
    reason = monitor.evaluator_failure.strip().partition("\n")[0] or late
    config = plan.config
    command = evaluating_command(config.run_dir, to_dict(config), config.eval.episodes, endless=bool(alive))
    return f"no final evaluation: {reason}; {command} makes one"
