"""The runner: makes the run of a plan, in this process or in worker processes, and ends it in an orderly way."""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import signal
import threading
import types
from collections.abc import Sequence

from sfactory.config import Config, resolve
from sfactory.envs.globals import globals_kept
from sfactory.errors import ConfigError, check_platform
from sfactory.runs.checkpoint import CheckpointStore, Snapshot
from sfactory.runs.run_folder import RunFolder, open_run
from sfactory.runs.run_state import remove_status
from sfactory.runtime.final_evaluation import evaluate_at_end
from sfactory.runtime.interrupts import end_at_once, handling, interrupting_signals
from sfactory.runtime.monitor import Callback, Monitor, Observer
from sfactory.runtime.plan import Plan
from sfactory.runtime.planning import check_fit, make_plan, notes_on
from sfactory.runtime.processes import fork_server
from sfactory.runtime.reporting import Result
from sfactory.runtime.serial import run_serial
from sfactory.runtime.supervisor import Supervisor


def train(config: Config, callbacks: Sequence[Callback] = ()) -> Result:
    """Train an agent, or resume the run in the config's folder.

    Args:
        config: Configuration of the run. The preset of the environment fills the fields that are not set.
        callbacks: Called with every :class:`sfactory.telemetry.metrics.Report`. Returning False interrupts the run.

    Returns:
        The result of the run. After Ctrl-C, SIGTERM, SIGHUP or a callback's False its status is interrupted, and the
        run is saved.

    Raises:
        ConfigError: If the configuration cannot work, before anything has started; names every problem.
        EnvironmentFault: If environments raise or break their API more often than a run survives. The run is saved.
        RunFailed: If a worker fails, or processes are lost too often. The run is saved if the learner still can.
        BaseException: Whatever a callback raises. The run is saved.
    """
    return run_resolved(resolve(config), callbacks)


def run_resolved(config: Config, callbacks: Sequence[Callback] = ()) -> Result:
    """Train with a config whose preset has been applied. Otherwise as :func:`train`."""
    check_platform()
    if not config.serial and multiprocessing.current_process().daemon:
        raise ConfigError(
            "a daemonic process, as those of multiprocessing.Pool, may not start the processes of a run; use serial "
            "(--serial), or a process that is not daemonic"
        )
    with contextlib.nullcontext() if config.serial else fork_server():
        return run_plan(make_plan(config), callbacks)


def run_plan(plan: Plan, callbacks: Sequence[Callback] = (), observer: Observer | None = None) -> Result:
    """Train by a plan. Otherwise as :func:`train`.

    Args:
        plan: From :func:`sfactory.runtime.planning.make_plan`.
        callbacks: As for :func:`train`.
        observer: Called about ten times a second with the wires of the run. It must not write to them. Returning False
            interrupts the run.
    """
    with open_run(plan.config, plan.env) as folder:
        store = CheckpointStore(folder.checkpoints, plan.config.log.keep, plan.config.log.milestone_every)
        snapshot = store.load_latest() if folder.resumed else None
        if snapshot is not None:
            check_fit(plan, snapshot, plan.config.run_dir)
            counted = {"skipped": snapshot.trainer.get("skipped", 0)}
            snapshot = dataclasses.replace(snapshot, model={}, trainer=counted)  # the learner loads its own
        return _run(plan, folder, store, snapshot, Monitor(plan, folder, callbacks, observer))


def _run(plan: Plan, folder: RunFolder, store: CheckpointStore, snapshot: Snapshot | None, monitor: Monitor) -> Result:
    """Run until the end, successful or not.

    Raises:
        EnvironmentFault, RunFailed, BaseException: As :func:`train`, after saving and writing the summary.
    """
    remove_status(folder.path)
    if snapshot is not None and snapshot.env_steps >= plan.config.steps:
        folder.describe_policy()  # which may be lost, or of an earlier sfactory
        return monitor.reporter.nothing_to_do(snapshot)
    folder.begin()
    monitor.begin(snapshot, 0.0 if snapshot is None else snapshot.wall_s)
    for note in _first_notes(plan, folder, snapshot):
        monitor.note(note)
    with _signals(monitor):
        try:
            if plan.config.serial:
                with globals_kept():
                    run_serial(plan, folder, store, monitor)
            else:
                Supervisor(plan, folder, store, monitor).run()
            monitor.report_rest()
        except BaseException as error:
            monitor.fail_with(error)
        result = monitor.summarize()
        evaluate_at_end(plan, folder, store, monitor, result)
        if result.status != "failed":  # an exception tells of that
            monitor.note(_last_note(plan, result))
        monitor.reporter.close()
        remove_status(folder.path)
    failure = monitor.exception
    if failure is not None:
        raise failure
    return result


def _first_notes(plan: Plan, folder: RunFolder, snapshot: Snapshot | None) -> list[str]:
    """What the user is told before the run begins: where it goes on, and what the plan has to say."""
    notes = [] if plan.sample_only else list(notes_on(plan))
    if snapshot is not None:
        return [f"going on at {snapshot.env_steps:,} env steps", *notes]
    if folder.resumed:
        return [f"{plan.config.run_dir} holds no checkpoint: its run begins anew at 0 env steps", *notes]
    return notes


def _last_note(plan: Plan, result: Result) -> str:
    """What the user is told at the end of a run that has not failed: how it has ended, and where it is."""
    said = f"{result.status} at {result.env_steps:,} env steps"
    if result.env_steps:
        said += f"; saved in {plan.config.run_dir}"
    if result.status == "completed":
        return said
    return f"{said}; the same command{' without --overwrite' if plan.config.overwrite else ''} goes on"


def _signals(monitor: Monitor) -> contextlib.AbstractContextManager[None]:
    """Handle signals: the first interrupt saves and ends the run, the second ends it at once, unless it is a SIGHUP,
    which comes twice where a shell ends with its terminal; SIGUSR1 requests a checkpoint, SIGUSR2 a file of the
    stacks of all processes."""
    if threading.current_thread() is not threading.main_thread():
        return contextlib.nullcontext()

    def interrupt(number: int, frame: types.FrameType | None) -> None:
        if monitor.signal is None:
            monitor.interrupt(number)
        elif number != signal.SIGHUP:
            end_at_once(number)

    def ask_for_stacks(number: int, frame: types.FrameType | None) -> None:
        monitor.stacks_asked = True

    return handling(
        {
            **dict.fromkeys(interrupting_signals(), interrupt),
            signal.SIGUSR1: lambda *_: monitor.wires.control.request_save(),
            signal.SIGUSR2: ask_for_stacks,
        }
    )
