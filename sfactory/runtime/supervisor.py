"""The supervisor: starts the worker processes of a run, watches over them, replaces those that die or hang, and ends
them."""

from __future__ import annotations

import contextlib
import functools
import signal
import time
from collections.abc import Callable
from contextlib import AbstractContextManager

from sfactory.runs.checkpoint import CheckpointStore
from sfactory.runs.run_files import OUTPUT, VIDEOS
from sfactory.runs.run_folder import RunFolder
from sfactory.runtime import worker_process, workers
from sfactory.runtime.budgets import RestartBudget
from sfactory.runtime.monitor import Monitor
from sfactory.runtime.mps import mps_daemon
from sfactory.runtime.output import PrintedLines
from sfactory.runtime.plan import EVALUATOR, PickledPlan, Plan
from sfactory.runtime.stacks import crash_in
from sfactory.runtime.watchdog import Watchdog
from sfactory.runtime.wires import renew_sampling
from sfactory.telemetry.control_block import STARTING_S
from sfactory.telemetry.events import Failure
from sfactory.telemetry.stopwatch import COLUMNS, WORKING

EVENT_POLL_S = 0.1
CLOSING_S = 2.0
"""Seconds that workers have to close their environments at the end of a run."""
COMPUTE_TIMEOUT_S = 120.0
"""Seconds without a heartbeat after which a learner or policy worker is replaced, where runtime.step_timeout_s is
shorter."""
EVALUATOR_RESTARTS = 3
"""How often in a row an evaluator that has failed, died or hung is started anew without an evaluation in between."""
SAVING_S = 60.0
"""Seconds without a heartbeat after which the end does not wait for a learner that still trains on its last batch, or
saves. A second Ctrl-C ends the wait."""


class Supervisor:
    """Supervises the worker processes of one run, from the first to the last.

    Args:
        plan: Plan of the run.
        folder: Run folder.
        store: Its checkpoints, from the newest of which a run goes on whose learner is lost.
        monitor: Takes the workers' events, and says when the run has to end.
    """

    def __init__(self, plan: Plan, folder: RunFolder, store: CheckpointStore, monitor: Monitor) -> None:
        self._plan, self._pickled_plan = plan, PickledPlan(plan)
        self._store, self._monitor, self._processes = store, monitor, monitor.processes
        self._videos = folder.path / VIDEOS
        self._environment: dict[str, str] = {}
        self._printed = PrintedLines(folder.path / OUTPUT if monitor.reporter.live else None, monitor.note)
        limit = plan.config.runtime.restarts
        self._learner_restarts, self._sampling_restarts = RestartBudget(limit), RestartBudget(limit)
        self._evaluator_restarts = RestartBudget(EVALUATOR_RESTARTS)

    def run(self) -> None:
        """Start all workers, and return when all have ended: with the training, or because the run ends."""
        monitor = self._monitor
        mps = self._plan.config.runtime.mps
        sharing: AbstractContextManager[dict[str, str]] = mps_daemon() if mps else contextlib.nullcontext({})
        with sharing as self._environment, self._printed, self._processes:
            self._start_learner()
            if self._plan.evaluates:
                self._start_evaluator()
            self._start_sampling()
            try:
                while monitor.ended is None and not monitor.ending:
                    monitor.watch(self._processes.take(EVENT_POLL_S))
                    self._printed.look()
                    if lost := self._lost_processes():
                        self._replace(lost)
            except Exception as error:
                monitor.fail_with(error)
            monitor.wires.control.stop()
            self._await_end()

    # Starting

    def _start_learner(self) -> None:
        self._start("learner", workers.learner_main, self._generation, self._store)

    @property
    def _generation(self) -> int:
        """Different at every start, so that new workers do not repeat what old ones drew, such as episodes."""
        return self._monitor.reporter.progress.env_steps + self._monitor.restarts

    def _start_sampling(self) -> None:
        generation = self._generation
        for i in range(self._plan.policy_processes):
            self._start(f"policy-{i}", workers.policy_main, i, generation)
        for i in range(self._plan.rollout_workers):
            self._start(f"rollout-{i}", workers.rollout_main, i, generation)
        self._watchdog = self._new_watchdog()

    def _start_evaluator(self) -> None:
        self._monitor.wires.control.expect(EVALUATOR)
        self._start(EVALUATOR, workers.evaluator_main, self._videos)

    def _start(self, name: str, target: Callable[..., None], *args: object) -> None:
        main = functools.partial(worker_process.process_main, output=self._printed.path, environment=self._environment)
        self._processes.start(name, main, target, self._pickled_plan, self._monitor.wires, *args)

    # Watching

    def _lost_processes(self) -> dict[str, str]:
        """Names of processes that have died or hang, each with a description."""
        if self._monitor.failure is not None or self._monitor.ended is not None:
            return {}
        lost = {
            name: _exit_description(code, crash_in(self._processes.folders[name]))
            for name, code in self._processes.exit_codes().items()
        }
        control = self._monitor.wires.control
        table = control.snapshot()
        column = table[:, COLUMNS.index("heartbeat")].tolist()
        heartbeats = {name: column[control.names.index(name)] for name in self._watched_names()}
        training = [name != EVALUATOR for name in control.names]  # an evaluation shows no progress of the run
        work = float(table[training][:, [COLUMNS.index(phase) for phase in WORKING]].sum())
        if not lost and (lost := self._watchdog.look(heartbeats, work)):
            self._monitor.write_stacks("; ".join(f"{name}: {problem}" for name, problem in lost.items()))
        return lost

    def _new_watchdog(self) -> Watchdog:
        limit = self._plan.config.runtime.step_timeout_s
        names, stepping = self._watched_names(), ("learner" if self._plan.on_device else "rollout", EVALUATOR)
        sampling = {name for name in names if name.startswith(stepping)}
        # Only environments hang by themselves; learner and policy workers may compute for long.
        patient = max(limit, COMPUTE_TIMEOUT_S)
        limits = {name: patient if name.startswith(("learner", "policy")) else limit for name in names}
        return Watchdog(limits, sampling, patient + STARTING_S)

    def _watched_names(self) -> list[str]:
        """Names of all workers that there must be: the evaluator may have been given up."""
        names = self._monitor.wires.control.names
        return [name for name in names if name != EVALUATOR or name in self._processes.names]

    # Replacing

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
        snapshot = self._store.load_latest_patiently() if whole else None
        saved_steps = 0 if snapshot is None else snapshot.env_steps
        self._monitor.restarts += 1
        if not restarts.allow(saved_steps if whole else self._monitor.reporter.progress.env_steps):
            limit = self._plan.config.runtime.restarts
            message = (
                f"worker process lost: {what}; after {limit} restarts without any progress the run ends "
                "(runtime.restarts)"
            )
            self._monitor.fail(Failure(next(iter(lost)), message, ""))
            return
        place = f"from the checkpoint at {saved_steps} env steps" if snapshot else "at 0 env steps: none are saved yet"
        consequence = f"everything starts anew {place}" if whole else "sampling starts anew"
        self._monitor.note(f"worker process lost: {what}; {consequence}")
        if whole:
            evaluates = EVALUATOR in self._processes.names
            self._processes.kill(self._processes.names)
            self._monitor.begin(snapshot, self._monitor.reporter.wall_s)
            self._start_learner()
            if evaluates:
                self._start_evaluator()
            elif self._plan.evaluates:
                self._monitor.wires.control.forget(EVALUATOR)
        else:
            self._processes.kill([name for name in self._processes.names if name not in ("learner", EVALUATOR)])
            self._monitor.wires = renew_sampling(self._plan, self._monitor.wires)
        self._start_sampling()

    def _replace_evaluator(self, problem: str) -> None:
        """Start the evaluator anew, or go on without it if it has failed too often in a row."""
        problem, self._monitor.evaluator_failure = self._monitor.evaluator_failure or problem, ""
        self._processes.kill([EVALUATOR])
        if self._evaluator_restarts.allow(self._monitor.evaluations):
            self._monitor.note(f"evaluation starts anew: {problem}")
            self._start_evaluator()
        else:
            self._monitor.note(f"the run goes on without evaluation, which has failed too often: {problem}")
            self._monitor.wires.control.forget(EVALUATOR)
        self._watchdog = self._new_watchdog()

    # Ending

    def _await_end(self) -> None:
        """Wait until the learner has saved, if it has trained, and all processes have ended. Events are still taken,
        since a full pipe would block their senders."""
        control = self._monitor.wires.control
        trained = control.total("learner", "batches") > 0
        begin = time.monotonic()
        while alive := self._processes.alive():
            saving = trained and "learner" in alive
            since = max(begin, control.total("learner", "heartbeat")) if saving else begin
            if time.monotonic() - since > (SAVING_S if saving else CLOSING_S):
                break
            self._monitor.watch(self._processes.take(EVENT_POLL_S), report=False)
        if trained and not self._plan.sample_only and self._monitor.ended is None:
            self._tell_if_lost()

    def _tell_if_lost(self) -> None:
        """After the learner has not said how it ended: unless it has failed by itself, and saved, what it has learned
        since the newest checkpoint is lost."""
        if self._processes.exit_codes().get("learner") == 0:
            return
        if "learner" in self._processes.names:  # it hangs, or has died
            self._processes.kill(["learner"])
        snapshot = self._store.load_latest_patiently()
        self._monitor.learner_is_gone(0 if snapshot is None else snapshot.env_steps)


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
    name = {each.value: each.name for each in signal.Signals}.get(-code, f"signal {-code}")  # a real-time one has none
    return f"killed by {name}{hint}{where}"
