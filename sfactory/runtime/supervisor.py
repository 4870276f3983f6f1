"""The runner: starts the processes of a run, supervises them, reports, and ends the run in an orderly way."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import signal
import threading
import time
import types
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import psutil
import torch

from sfactory.config import Config, devices, resolve
from sfactory.data.arena import FINISHED, FREE
from sfactory.errors import EnvironmentFault, RunFailed, SfactoryError, check_platform, said
from sfactory.runs.checkpoint import CheckpointStore, Snapshot
from sfactory.runs.run_files import OUTPUT, VIDEOS
from sfactory.runs.run_folder import RunFolder, open_run
from sfactory.runs.run_state import remove_status, write_status
from sfactory.runtime import workers
from sfactory.runtime.budgets import FaultBudget, RestartBudget
from sfactory.runtime.interrupts import end_at_once, handling, interrupting_signals
from sfactory.runtime.observed_state import observe, write_report
from sfactory.runtime.output import PrintedLines
from sfactory.runtime.plan import EVALUATOR, PickledPlan, Plan
from sfactory.runtime.planning import check_fit, make_plan, note_on_slow_steps, notes_on
from sfactory.runtime.processes import WorkerProcesses, fork_server
from sfactory.runtime.reporting import Reporter, Result, Status
from sfactory.runtime.stacks import crash_in
from sfactory.runtime.training import make_training
from sfactory.runtime.watchdog import Watchdog
from sfactory.runtime.wires import Wires, make_wires, renew_sampling
from sfactory.telemetry.control_block import STARTING_S
from sfactory.telemetry.events import (
    CheckpointResult,
    Episodes,
    Evaluated,
    Event,
    Failure,
    KernelsChosen,
    Note,
    Progress,
    SurvivedFaults,
    TrainingEnded,
)
from sfactory.telemetry.metrics import Report
from sfactory.telemetry.stopwatch import COLUMNS, WORKING, Interval

if TYPE_CHECKING:
    from sfactory.runtime.evaluator import Evaluator

Callback = Callable[[Report], bool | None]
Observer = Callable[[Wires], bool]
EVENT_POLL_S = 0.1
STATUS_EVERY_S = 1.0
CLOSING_S = 2.0
"""Seconds that workers have to close their environments at the end of a run."""
COMPUTE_TIMEOUT_S = 120.0
"""Seconds without a heartbeat after which a learner or policy worker is replaced, where runtime.step_timeout_s is
shorter."""
EVALUATOR_RESTARTS = 3
"""How often in a row an evaluator that has failed, died or hung is started anew without an evaluation in between."""
SAVING_S = 60.0
"""Seconds that the learner has for its current batch and its last checkpoint. A second Ctrl-C ends the wait."""


def train(config: Config, callbacks: Sequence[Callback] = ()) -> Result:
    """Train an agent, or resume the run in the config's folder.

    Args:
        config: Configuration of the run. The preset of the environment's family fills the fields that are not set.
        callbacks: Called with every :class:`sfactory.telemetry.metrics.Report`. Returning False interrupts the run.

    Returns:
        The result of the run. After Ctrl-C, SIGTERM, SIGHUP or a callback's False its status is interrupted, and the
        run is saved.

    Raises:
        ConfigError: If the configuration cannot work, before anything has started; names every problem.
        EnvironmentFault: If environments raise or break their API more often than a run survives. The run is saved.
        RunFailed: If a worker fails, or processes are lost too often. The run is saved if the learner still can.
        Exception: Whatever a callback raises. The run is saved.
    """
    return run_resolved(resolve(config), callbacks)


def run_resolved(config: Config, callbacks: Sequence[Callback] = ()) -> Result:
    """Train with a config whose preset has been applied. Otherwise as :func:`train`."""
    check_platform()
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
        folder.keep_spec(plan.env)
        store = CheckpointStore(folder.checkpoints, plan.config.log.keep, plan.config.log.milestone_every)
        snapshot = store.load_latest()
        if snapshot is not None:
            check_fit(plan, snapshot, folder.path)
        return _Supervisor(plan, folder, store, snapshot, callbacks, observer).run()


class _Supervisor:
    """Supervises one run from its first process to its summary."""

    def __init__(
        self,
        plan: Plan,
        folder: RunFolder,
        store: CheckpointStore,
        snapshot: Snapshot | None,
        callbacks: Sequence[Callback],
        observer: Observer | None,
    ) -> None:
        self._plan, self._folder, self._store, self._snapshot = plan, folder, store, snapshot
        self._callbacks, self._observer = callbacks, observer
        config = plan.config
        self._reporter = Reporter(plan, folder)
        self._begin(snapshot, 0.0 if snapshot is None else snapshot.wall_s)
        self._learner_restarts, self._sampling_restarts = (
            RestartBudget(config.runtime.restarts),
            RestartBudget(config.runtime.restarts),
        )
        self._budget = FaultBudget(config.runtime.env_fault_rate, self._reporter.note)
        self._failure: Failure | None = None
        self._error: Exception | None = None
        self._ended: TrainingEnded | None = None
        self._signal: int | None = None
        self._cancelled = self._report_asked = self._told_of_speed = False
        self._evaluator_restarts, self._evaluator_failure = RestartBudget(EVALUATOR_RESTARTS), ""
        self._evaluations = 0
        self._processes = WorkerProcesses()
        self._printed = PrintedLines(folder.path / OUTPUT if self._reporter.live else None, self._reporter.note)
        self._pickled_plan = None if config.serial else PickledPlan(plan)

    def _begin(self, snapshot: Snapshot | None, wall_s: float) -> None:
        """Create everything that a restart of the learner renews.

        Args:
            snapshot: Checkpoint to continue from, or None.
            wall_s: Seconds that the run has taken so far.
        """
        self._reporter.begin(snapshot, wall_s)
        self._wires = make_wires(self._plan, local=self._plan.config.serial)
        self._last_snapshot = self._last_status = (time.monotonic(), self._wires.control.snapshot())

    def run(self) -> Result:
        """Run until the end, successful or not.

        Raises:
            EnvironmentFault, RunFailed, Exception: As :func:`train`, after saving and writing the summary.
        """
        remove_status(self._folder.path)
        if self._snapshot is not None and self._snapshot.env_steps >= self._plan.config.steps:
            return self._reporter.nothing_to_do(self._snapshot)
        if self._snapshot is not None:
            self._reporter.note(f"going on at {self._snapshot.env_steps:,} env steps")
        elif self._folder.resumed:
            self._reporter.note(f"{self._folder.path} holds no checkpoint: its run begins anew at 0 env steps")
        for note in () if self._plan.sample_only else notes_on(self._plan):
            self._reporter.note(note)
        with self._signals():
            try:
                if self._plan.config.serial:
                    self._run_serial()
                else:
                    self._run_processes()
                self._report_rest()
            except Exception as error:
                self._fail(error)
            self._budget.flush()
            result = self._close()
            remove_status(self._folder.path)
        if self._error is not None:
            raise self._error
        if self._failure is not None:
            raise (EnvironmentFault if self._failure.environment_fault else RunFailed)(_describe(self._failure))
        return result

    def _signals(self) -> contextlib.AbstractContextManager[None]:
        """Handle signals: the first interrupt saves and ends the run, the second ends it at once, unless it is a
        SIGHUP, which comes twice where a shell ends with its terminal; SIGUSR1 requests a checkpoint, SIGUSR2 a report
        of the stacks of all processes."""
        if threading.current_thread() is not threading.main_thread():
            return contextlib.nullcontext()

        def interrupt(number: int, frame: types.FrameType | None) -> None:
            if self._signal is None:
                self._signal = number
            elif number != signal.SIGHUP:
                end_at_once(number)

        def ask_for_report(number: int, frame: types.FrameType | None) -> None:
            self._report_asked = True

        return handling(
            {
                **dict.fromkeys(interrupting_signals(), interrupt),
                signal.SIGUSR1: lambda *_: self._wires.control.request_save(),
                signal.SIGUSR2: ask_for_report,
            }
        )

    def _fail(self, error: Exception) -> None:
        """Record an error of this process as the failure of the run, unless there is one already."""
        if self._error is None and self._failure is None:
            self._error = error
            self._failure = Failure(
                "runner", f"{type(error).__name__}: {error}", "", isinstance(error, EnvironmentFault)
            )

    # Serial mode

    def _run_serial(self) -> None:
        """Run all workers in turn in this process."""
        torch.manual_seed(self._plan.config.seed)
        threads = torch.get_num_threads()
        torch.set_num_threads(devices.learner_torch_threads(self._plan.config))
        training = make_training(self._plan, self._wires, self._store)
        generation = self._reporter.progress.env_steps
        policies = [
            workers.make_policy_worker(self._plan, self._wires, i, generation) for i in range(len(self._wires.requests))
        ]
        rollouts = [
            workers.make_rollout_worker(self._plan, self._wires, i, generation) for i in range(self._plan.rollouts)
        ]
        self._evaluator = self._serial_evaluator()
        end = training.rescue
        try:
            training.learner.start()
            for rollout in rollouts:
                rollout.start()
            while not training.learner.done and not self._ending():
                for worker in (*policies, *rollouts, training.learner):
                    worker.poll(0)
                training.evaluate_if_due()
                self._poll_evaluator()
                training.save_if_due()
                self._watch(self._wires.events.take())
            if not self._ending():
                training.evaluate_last(self._poll_evaluator)
            end = training.finish
        except SfactoryError as error:
            self._failure = Failure("serial", str(error), "", isinstance(error, EnvironmentFault))
        except Exception as error:
            self._fail(devices.explained(error, self._plan.config))
        finally:
            for rollout in rollouts:
                rollout.report()
                rollout.close()
            end()
            self._wires.control.close()
            self._watch(self._wires.events.take(), report=False)
            torch.set_num_threads(threads)

    def _serial_evaluator(self) -> Evaluator | None:
        if not self._plan.evaluates:
            return None
        from sfactory.runtime.evaluator import Evaluator

        return Evaluator(self._plan, self._wires, self._folder.path / VIDEOS)

    def _poll_evaluator(self) -> bool:
        """Let the evaluator take its turn, if there is one; where its environments fail, the run goes on without it."""
        try:
            if self._evaluator is not None:
                self._evaluator.poll(0)
        except Exception as error:
            self._reporter.note(f"the run goes on without evaluation, which has failed: {said(error)}")
            self._evaluator = None
        return self._evaluator is not None

    # Worker processes

    def _run_processes(self) -> None:
        with self._printed, self._processes:
            self._start_learner()
            if self._plan.evaluates:
                self._start_evaluator()
            self._start_sampling()
            try:
                while self._ended is None and not self._ending():
                    self._watch(self._processes.take(EVENT_POLL_S))
                    if lost := self._lost_processes():
                        self._replace(lost)
            except Exception as error:
                self._fail(error)
            self._wires.control.stop()
            self._await_end()

    def _start_learner(self) -> None:
        self._start("learner", workers.learner_main, self._store)

    def _start_sampling(self) -> None:
        # Different at every start, so that new environments do not repeat old episodes.
        generation = self._reporter.progress.env_steps + self._learner_restarts.total + self._sampling_restarts.total
        for i in range(self._plan.policy_processes):
            self._start(f"policy-{i}", workers.policy_main, i, generation)
        for i in range(self._plan.rollouts):
            self._start(f"rollout-{i}", workers.rollout_main, i, generation)
        self._watchdog = self._new_watchdog()

    def _start_evaluator(self) -> None:
        self._wires.control.expect(EVALUATOR)
        self._start(EVALUATOR, workers.evaluator_main, self._folder.path / VIDEOS)

    def _start(self, name: str, target: Callable[..., None], *args: object) -> None:
        main = functools.partial(workers.process_main, output=self._printed.path)
        self._processes.start(name, main, target, self._pickled_plan, self._wires, *args)

    def _lost_processes(self) -> dict[str, str]:
        """Names of processes that have died or hang, each with a description."""
        if self._failure is not None or self._ended is not None:
            return {}
        lost = {
            name: _exit_description(code, crash_in(self._processes.folders[name]))
            for name, code in self._processes.exit_codes().items()
        }
        control = self._wires.control
        table = control.snapshot()
        column = table[:, COLUMNS.index("heartbeat")].tolist()
        heartbeats = {name: column[control.names.index(name)] for name in self._watched_names()}
        training = [name != EVALUATOR for name in control.names]  # an evaluation shows no progress of the run
        work = float(table[training][:, [COLUMNS.index(phase) for phase in WORKING]].sum())
        if not lost and (lost := self._watchdog.look(heartbeats, work)):
            self._write_report("; ".join(f"{name}: {problem}" for name, problem in lost.items()))
        return lost

    def _new_watchdog(self) -> Watchdog:
        limit = self._plan.config.runtime.step_timeout_s
        # Only environments hang by themselves; learner and policy workers may compute for long.
        patient = max(limit, COMPUTE_TIMEOUT_S)
        return Watchdog(
            {
                name: limit if name.startswith("rollout") or name == EVALUATOR else patient
                for name in self._watched_names()
            },
            patient + STARTING_S,
        )

    def _watched_names(self) -> list[str]:
        """Names of all workers that there must be: the evaluator may have been given up."""
        return [name for name in self._wires.control.names if name != EVALUATOR or name in self._processes.names]

    def _write_report(self, reason: str) -> None:
        state = observe(self._wires, self._processes, self._last_status[1], self._reporter.figures())
        path = write_report(self._folder.path, reason, state, self._processes)
        self._reporter.note(
            f"what every process does is in {path}"
            if path
            else "the report of what every process does could not be written"
        )

    def _replace(self, lost: dict[str, str]) -> None:
        """Restart every process that depends on a lost one.

        A queue that a killed process has shared may stay locked, and a policy worker holds the RNN states of its
        groups. So with one sampling process all of them are restarted. The learner shares no lock with them and stays.
        Without the learner everything is restarted from the newest checkpoint.
        """
        if EVALUATOR in lost:
            self._replace_evaluator(lost.pop(EVALUATOR))
        if not lost:
            return
        what = "; ".join(f"{name}: {problem}" for name, problem in lost.items())
        whole = "learner" in lost
        restarts = self._learner_restarts if whole else self._sampling_restarts
        snapshot = self._store.load_again() if whole else None
        saved_steps = 0 if snapshot is None else snapshot.env_steps
        if not restarts.allow(saved_steps if whole else self._reporter.progress.env_steps):
            limit = self._plan.config.runtime.restarts
            message = (
                f"worker process lost: {what}; after {limit} restarts without any progress the run ends "
                "(runtime.restarts)"
            )
            self._failure = Failure(next(iter(lost)), message, "")
            return
        consequence = (
            f"everything starts anew from the checkpoint at {saved_steps} env steps"
            if whole
            else "sampling starts anew"
        )
        self._reporter.note(f"worker process lost: {what}; {consequence}")
        if whole:
            evaluates = EVALUATOR in self._processes.names
            self._processes.kill(self._processes.names)
            self._begin(snapshot, self._reporter.wall_s)
            self._start_learner()
            if evaluates:
                self._start_evaluator()
            elif self._plan.evaluates:
                self._wires.control.forget(EVALUATOR)
        else:
            self._processes.kill([name for name in self._processes.names if name not in ("learner", EVALUATOR)])
            self._wires = renew_sampling(self._plan, self._wires)
        self._start_sampling()

    def _replace_evaluator(self, problem: str) -> None:
        """Start the evaluator anew, or go on without it if it has failed too often in a row."""
        problem, self._evaluator_failure = self._evaluator_failure or problem, ""
        self._processes.kill([EVALUATOR])
        if self._evaluator_restarts.allow(self._evaluations):
            self._reporter.note(f"evaluation starts anew: {problem}")
            self._start_evaluator()
        else:
            self._reporter.note(f"the run goes on without evaluation, which has failed too often: {problem}")
            self._wires.control.forget(EVALUATOR)
        self._watchdog = self._new_watchdog()

    def _await_end(self) -> None:
        """Wait until the learner has saved, if it has trained, and all processes have ended. Events are still taken,
        since a full pipe would block their senders."""
        trained = self._wires.control.total("learner", "batches") > 0
        begin = time.monotonic()
        while alive := self._processes.alive():
            waited = time.monotonic() - begin
            if waited > (SAVING_S if trained and "learner" in alive else CLOSING_S):
                break
            self._watch(self._processes.take(EVENT_POLL_S), report=False)

    # Watching

    def _ending(self) -> bool:
        """Whether a signal, a failure or a callback ends the run."""
        return self._signal is not None or self._failure is not None or self._cancelled

    def _watch(self, events: list[Event], report: bool = True) -> None:
        """Process events, and report what is due."""
        for event in events:
            match event:
                case Episodes():
                    self._reporter.add_episodes(event)
                case SurvivedFaults():
                    self._survive_faults(event)
                case Progress():
                    self._reporter.add_progress(event)
                case KernelsChosen():
                    self._reporter.add_kernels(event)
                case CheckpointResult(error=str() as error):
                    self._reporter.note(error)
                case Evaluated():
                    self._add_evaluation(event)
                case Note():
                    self._reporter.note(event.text)
                case Failure(process=process) if process == EVALUATOR:
                    self._evaluator_failure = event.message
                case TrainingEnded():
                    self._ended = event
                    if event.unsaved:
                        self._failure = self._failure or Failure(
                            "learner", f"{event.unsaved}; what was learned since the last one is lost", ""
                        )
                case Failure() if not self._ending():
                    self._failure = event
        if report and time.monotonic() - self._last_snapshot[0] >= self._plan.config.log.report_every_s:
            self._report()
        if report and time.monotonic() - self._last_status[0] >= STATUS_EVERY_S:
            self._write_status()
            self._tell_of_slow_steps()
            self._printed.look()
        if self._report_asked:
            self._report_asked = False
            self._write_report("asked for by SIGUSR2")
        if report and self._observer is not None:
            self._cancelled |= not self._observer(self._wires)

    def _add_evaluation(self, event: Evaluated) -> None:
        """Put an evaluation into the next report, after one that waits for it."""
        if self._reporter.has_evaluation:
            self._report()
        self._evaluations += 1
        self._reporter.add_evaluation(event)

    def _survive_faults(self, event: SurvivedFaults) -> None:
        """Show faults of environments, and end the run if there are too many."""
        self._budget.add(event)
        self._reporter.news = True
        faults, env_steps = map(int, self._sampling_totals("env_faults", "rows"))
        if (problem := self._budget.excess(faults, env_steps)) and not (self._ending() or self._ended):
            self._failure = Failure("runner", problem, "", environment_fault=True)

    def _sampling_totals(self, *columns: str) -> list[float]:
        """Totals of the workers that step environments."""
        control, kind = self._wires.control, "learner" if self._plan.on_device else "rollout"
        names = [name for name in control.names if name.startswith(kind)]
        return [sum(control.total(name, column) for name in names) for column in columns]

    def _tell_of_slow_steps(self) -> None:
        """Say once how long a batch takes where env steps are slow."""
        if self._told_of_speed:
            return
        seconds, steps = self._sampling_totals("environment", "rows")
        if not steps:
            return
        self._told_of_speed = True
        if (note := note_on_slow_steps(self._plan, seconds / steps)) is not None:
            self._reporter.note(note)

    def _write_status(self) -> None:
        """Write the state of the run for `python -m sfactory.status`."""
        state = observe(self._wires, self._processes, self._last_status[1], self._reporter.figures())
        write_status(self._folder.path, dataclasses.replace(state, returns=self._reporter.returns()))
        self._last_status = (time.monotonic(), self._wires.control.snapshot())

    def _report_rest(self) -> None:
        """Report what is new since the last report: the last episodes arrive after the learner's last event."""
        if self._reporter.news:
            self._report()

    def _report(self) -> None:
        """Write a report, show it, and call the callbacks."""
        report = self._reporter.report(self._load())
        self._wires.control.episode_return = self._reporter.settled_return
        if self._error is not None:
            return
        try:
            for callback in self._callbacks:
                self._cancelled |= callback(report) is False
        except Exception as error:
            self._fail(error)

    def _load(self) -> dict[str, float]:
        """Fields of a report about the load of the workers since the last report, and about slots."""
        table, (_, old) = self._wires.control.snapshot(), self._last_snapshot
        self._last_snapshot = (time.monotonic(), table)
        interval = Interval(self._wires.control.names, old, table)
        batches = interval.column("policy", "batches").sum()
        state = self._wires.arena.state
        return {
            **{f"{kind}_busy": interval.busy(kind) for kind in ("rollout", "policy", "learner")},
            "batch_fill": float(interval.column("policy", "rows").sum() / batches) if batches else float("nan"),
            "free_slots": int((state == FREE).sum()),
            "finished_slots": int((state == FINISHED).sum()),
            "restarts": self._learner_restarts.total + self._sampling_restarts.total,
            "queue_full_waits": int(table[:, COLUMNS.index("full_waits")].sum()),
            "env_faults": int(table[:, COLUMNS.index("env_faults")].sum()),
            "rss_mb": math.nan
            if self._processes.ended
            else (psutil.Process().memory_info().rss + self._processes.resident_bytes()) / 2**20,
        }

    def _close(self) -> Result:
        status: Status = "completed" if self._ended is not None and self._ended.completed else "interrupted"
        if self._failure is not None:
            status = "failed"
        env_steps = self._ended.env_steps if self._ended else self._reporter.progress.env_steps
        return self._reporter.close(
            status,
            env_steps,
            _describe(self._failure) if self._failure else None,
            self._signal,
            self._phases(),
        )

    def _phases(self) -> dict[str, dict[str, float]]:
        """Share of every phase in the time of each kind of worker, since the workers' start."""
        control = self._wires.control
        table = control.snapshot()
        whole = Interval(control.names, np.zeros_like(table), table)
        return {kind: whole.phases(kind) for kind in dict.fromkeys(name.split("-")[0] for name in control.names)}


def _describe(failure: Failure) -> str:
    """A failure as shown to the user. The message of an environment's fault includes its traceback already."""
    if failure.environment_fault or not failure.traceback:
        return f"{failure.process}: {failure.message}"
    return f"{failure.process}: {failure.message}\n{failure.traceback}"


def _exit_description(code: int, crash: str) -> str:
    """How a process ended, as shown to the user.

    Args:
        code: Exit code; negative: the signal that killed it.
        crash: The process's own reason, or the stack of the crash, as far as it could write it.
    """
    if code >= 0:
        return f"exit status {code}" + (f" ({crash})" if crash else "")
    hint = "; the system may have run out of memory" if -code == signal.SIGKILL else ""
    where = f"\n{crash}\n" if crash else ""
    return f"killed by {signal.Signals(-code).name}{hint}{where}"
