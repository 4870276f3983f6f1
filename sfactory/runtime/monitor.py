"""The monitor: what the runner knows of a run. It takes the workers' events, reports, and says when the run has to
end."""

from __future__ import annotations

import dataclasses
import math
import os
import time
from collections.abc import Callable, Sequence

import numpy as np

from sfactory.data.arena import FINISHED
from sfactory.errors import EnvironmentFault, RunFailed
from sfactory.runs.checkpoint import Snapshot
from sfactory.runs.run_folder import RunFolder
from sfactory.runs.run_state import RunState, write_status
from sfactory.runtime.budgets import FaultBudget
from sfactory.runtime.observed_state import observe, write_stack_file
from sfactory.runtime.plan import EVALUATOR, Plan
from sfactory.runtime.planning import SLOW_STEP_S, note_on_slow_steps
from sfactory.runtime.processes import WorkerProcesses
from sfactory.runtime.reporting import Reporter, Result, Status
from sfactory.runtime.step_time import programs_s
from sfactory.runtime.wires import Wires, make_wires
from sfactory.telemetry.events import (
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
from sfactory.telemetry.stopwatch import Interval

Callback = Callable[[Report], bool | None]
Observer = Callable[[Wires], bool]
STATUS_EVERY_S = 1.0
STEPS_WATCHED_S = 1.0
"""Seconds of env steps after which it is said whether they compute or wait."""


class Monitor:
    """Watches one run, from its start to its summary.

    Args:
        plan: Plan of the run.
        folder: Run folder.
        callbacks: Called with every report. Returning False interrupts the run.
        observer: Called with the wires whenever events are taken. Returning False interrupts the run.

    Attributes:
        reporter: Makes the reports.
        processes: The worker processes; a serial run starts none.
        wires: What the workers share; renewed with workers that are replaced.
        ended: The learner's last event, once it has come.
        failure: Why the run has failed, else None.
        signal: The signal that interrupts the run, else None.
        stacks_asked: Whether somebody waits for a report of the stacks of all processes.
        restarts: How often workers have been replaced.
        evaluations: Evaluations so far.
        evaluator_failure: What the evaluator has said of its own failure.
    """

    def __init__(
        self, plan: Plan, folder: RunFolder, callbacks: Sequence[Callback] = (), observer: Observer | None = None
    ) -> None:
        self._plan, self._folder, self._callbacks, self._observer = plan, folder, callbacks, observer
        self.reporter = Reporter(plan, folder)
        self.processes = WorkerProcesses()
        self.wires: Wires
        self.ended: TrainingEnded | None = None
        self.failure: Failure | None = None
        self.signal: int | None = None
        self.stacks_asked = False
        self.restarts = self.evaluations = 0
        self.evaluator_failure = ""
        self._faults = FaultBudget(plan.config.runtime.env_fault_rate, self.reporter.note)
        self._error: BaseException | None = None
        self._cancelled = self._told_of_speed = False
        self._past: dict[str, float] = {}
        self._first_steps: dict[str, np.ndarray] = {}

    def begin(self, snapshot: Snapshot | None, wall_s: float) -> None:
        """Make the wires and begin to report, at the start and whenever the learner is replaced.

        Args:
            snapshot: Checkpoint to continue from, or None.
            wall_s: Seconds that the run has taken so far.
        """
        self.reporter.begin(snapshot, wall_s)
        if self.restarts:
            self._past = self._totals()
        self.wires = make_wires(self._plan, self._plan.config.serial, self.reporter.wall_s)
        self._first_steps.clear()
        # When, and the workers' counters then.
        self._last_report = self._last_status = (time.monotonic(), self.wires.control.snapshot())

    def note(self, text: str) -> None:
        """Show the user a line of text."""
        self.reporter.note(text)

    # How the run ends

    @property
    def ending(self) -> bool:
        """Whether a signal, a failure or a callback ends the run."""
        return self.signal is not None or self.failure is not None or self._cancelled

    def fail(self, failure: Failure) -> None:
        """End the run for this reason, unless it has failed already."""
        self.failure = self.failure or failure

    def fail_with(self, error: BaseException) -> None:
        """End the run for an error of this process, which :attr:`exception` then is, unless it has failed already."""
        if self.failure is None:
            self._error = error
            message = f"{type(error).__name__}: {error}"
            self.failure = Failure("runner", message, "", isinstance(error, EnvironmentFault))

    @property
    def exception(self) -> BaseException | None:
        """What the caller of a failed run gets raised, else None."""
        if self._error is not None or self.failure is None:
            return self._error
        return (EnvironmentFault if self.failure.environment_fault else RunFailed)(_describe(self.failure))

    def summarize(self) -> Result:
        """Write the summary of the run, whose clock stops with that."""
        self._faults.flush()
        status: Status = "completed" if self.ended is not None and self.ended.completed else "interrupted"
        if self.failure is not None:
            status = "failed"
        env_steps = self.ended.env_steps if self.ended else self.reporter.progress.env_steps
        error = _describe(self.failure) if self.failure else None
        return self.reporter.summarize(status, env_steps, error, self.signal, self._phases())

    def _phases(self) -> dict[str, dict[str, float]]:
        """Share of every phase in the time of each kind of worker, since the workers' start."""
        control = self.wires.control
        table = control.snapshot()
        whole = Interval(control.names, np.zeros_like(table), table)
        return {kind: whole.phases(kind) for kind in dict.fromkeys(name.split("-")[0] for name in control.names)}

    def interrupt(self, number: int) -> None:
        """End the run for a signal."""
        self.signal = number
        self.wires.control.stop()

    def learner_is_gone(self, saved_steps: int) -> None:
        """Take note that the learner has ended without a word, and so without a last checkpoint.

        Args:
            saved_steps: Env steps of the newest checkpoint.
        """
        self._take(TrainingEnded(saved_steps, False, "the learner has ended without its last checkpoint"))

    # What the workers say

    def watch(self, events: list[Event], report: bool = True) -> None:
        """Take events.

        Args:
            events: From the workers.
            report: Whether to report what is due, too.
        """
        for event in events:
            self._take(event)
        if report and time.monotonic() - self._last_report[0] >= self._plan.config.log.report_every_s:
            self._report()
        if report and time.monotonic() - self._last_status[0] >= STATUS_EVERY_S:
            self._write_status()
            self._tell_of_slow_steps()
        if self.stacks_asked:
            self.stacks_asked = False
            self.write_stacks("asked for by SIGUSR2")
        if report and self._observer is not None:
            self._cancelled |= not self._observer(self.wires)

    def _take(self, event: Event) -> None:
        match event:
            case Episodes():
                self.reporter.add_episodes(event)
                self.wires.control.episode_return = self.reporter.settled_return  # for the next checkpoint
            case SurvivedFaults():
                self._survive_faults(event)
            case Progress():
                self.reporter.add_progress(event)
            case KernelsChosen():
                self.reporter.add_kernels(event)
            case Evaluated():
                self._add_evaluation(event)
            case Note():
                self.note(event.text)
            case Failure(process=process) if process == EVALUATOR:
                self.evaluator_failure = event.message
            case TrainingEnded():
                self.ended = event
                self.reporter.end_training()
                if event.unsaved:
                    self._lose(f"{event.unsaved}; what was learned since the last one is lost")
            case Failure(process="learner"):  # also while the run ends, since then it may not have saved
                self.fail(event)
            case Failure() if not (self.ending or self.ended):
                self.fail(event)

    def _lose(self, what: str) -> None:
        """Say that something is lost, and let the run fail for it unless it has failed already."""
        if self.failure is not None:
            self.note(what)
        self.fail(Failure("learner", what, ""))

    def _add_evaluation(self, event: Evaluated) -> None:
        """Put an evaluation into the next report, after one that waits for it."""
        if self.reporter.has_evaluation:
            self._report()
        self.evaluations += 1
        self.reporter.add_evaluation(event)

    def _survive_faults(self, event: SurvivedFaults) -> None:
        """Show faults of environments, and end the run if there are too many."""
        self._faults.add(event)
        self.reporter.news = True
        totals = self._totals()
        problem = self._faults.excess(int(totals["env_faults"]), int(totals["rows"]))
        if problem and not (self.ending or self.ended):
            self.fail(Failure("runner", problem, "", environment_fault=True))

    def _totals(self) -> dict[str, float]:
        """Counters since this program began the run, of workers too that have been replaced: full_waits of all, the
        others of those that step environments."""
        control = self.wires.control
        counted = dict.fromkeys(("rows", "env_faults"), self._sampling()) | {"full_waits": control.names}
        return {
            column: self._past.get(column, 0) + sum(control.total(name, column) for name in names)
            for column, names in counted.items()
        }

    def _sampling(self) -> list[str]:
        """Names of the workers that step environments."""
        kind = "learner" if self._plan.on_device else "rollout"
        return [name for name in self.wires.control.names if name.startswith(kind)]

    # What the user is told

    def report_rest(self) -> None:
        """Report what is new since the last report: the last episodes arrive after the learner's last event."""
        if self.reporter.news:
            self._report()

    def write_stacks(self, reason: str) -> None:
        """Write down what every process does.

        Args:
            reason: Why it is written.
        """
        path = write_stack_file(self._folder.path, reason, self._state(), self.processes)
        self.note(
            f"what every process does is in {path}"
            if path
            else "what every process does could not be written to a file"
        )

    def _report(self) -> None:
        """Write a report, show it, and call the callbacks."""
        report = self.reporter.report(self._load())
        if self._error is not None:
            return
        try:
            for callback in self._callbacks:
                answer = callback(report)
                self._cancelled |= isinstance(answer, bool | np.bool_) and not answer
        except BaseException as error:  # sys.exit(), too, ends a run that is saved
            self.fail_with(error)

    def _load(self) -> dict[str, float]:
        """Fields of a report about the load of the workers since the last report, and about slots."""
        table, (_, old) = self.wires.control.snapshot(), self._last_report
        self._last_report = (time.monotonic(), table)
        interval = Interval(self.wires.control.names, old, table)
        batches = interval.column("policy", "batches").sum()
        totals = self._totals()
        return {
            **{f"{kind}_busy": interval.busy(kind) for kind in ("rollout", "policy", "learner")},
            "batch_fill": float(interval.column("policy", "rows").sum() / batches) if batches else float("nan"),
            "free_slots": len(self.wires.free),
            "finished_slots": int((self.wires.arena.state == FINISHED).sum()),
            "restarts": self.restarts,
            "queue_full_waits": int(totals["full_waits"]),
            "env_faults": int(totals["env_faults"]),
            "rss_mb": math.nan if self.processes.ended else self.processes.resident_bytes() / 2**20,
        }

    def _state(self) -> RunState:
        return observe(self.wires, self.processes, self._last_status[1], self.reporter.figures())

    def _write_status(self) -> None:
        """Write the state of the run for `python -m sfactory.status`."""
        write_status(self._folder.path, dataclasses.replace(self._state(), returns=self.reporter.returns()))
        self._last_status = (time.monotonic(), self.wires.control.snapshot())

    def _tell_of_slow_steps(self) -> None:
        """Say once how long a batch takes where env steps are slow or wait, but for a worker's first ones, in which
        functions are compiled."""
        if self._told_of_speed:
            return
        since_first = np.zeros(5)
        pids = self.processes.pids() if self.processes.names else dict.fromkeys(self.wires.control.names, os.getpid())
        for name in self._sampling():
            columns = ("rows", "environment", "cpu_s", "crowded_s")
            counted = [self.wires.control.total(name, column) for column in columns]
            if counted[0] and name in pids:
                now = np.array([*counted, programs_s(pids[name])])
                since_first += now - self._first_steps.setdefault(name, now)
        rows, seconds, *computing_s = since_first.tolist()
        if not rows or seconds < min(STEPS_WATCHED_S, SLOW_STEP_S * rows):
            return
        self._told_of_speed = True
        if (note := note_on_slow_steps(self._plan, seconds / rows, min(1.0, sum(computing_s) / seconds))) is not None:
            self.note(note)


def _describe(failure: Failure) -> str:
    """A failure as shown to the user. The message of an environment's fault includes its traceback already."""
    if failure.environment_fault or not failure.traceback:
        return f"{failure.process}: {failure.message}"
    return f"{failure.process}: {failure.message}\n{failure.traceback}"
