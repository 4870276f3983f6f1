"""Runs the trials of a sweep, several at once, each on cores of its own."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import random
import signal
import time
import types
from dataclasses import dataclass
from pathlib import Path

import yaml

from sfactory.commands.sweeps.listed import trial_folder
from sfactory.commands.sweeps.runs import Run, env_steps, is_complete, run_folder, score, unscored
from sfactory.commands.sweeps.space import Space
from sfactory.commands.sweeps.summary import write_results
from sfactory.commands.sweeps.trials import Note, State, Trial, Trials, value_text
from sfactory.errors import ConfigError, RunFailed
from sfactory.files import TRIAL, write_atomically
from sfactory.runs.run_files import is_held
from sfactory.runtime.interrupts import handling

POLL_S = 0.2
REPORT_EVERY_S = 1.0
"""log.report_every_s of the runs where the base does not say it: short runs need reports to be compared."""
MOST_FAILURES = 3
"""So many trials that fail before any other has ended, or has come farther, are the fault of what they share."""


def core_shares(parallel: int | None, runs: int) -> list[list[int]]:
    """The cores of each run that is trained at the same time. All have as many: workers and environments follow from
    their number, so that the seeds of a trial would be trained in different ways.

    Args:
        parallel: Number of runs at the same time; None: one for every two cores.
        runs: Number of runs in all.

    Raises:
        ConfigError: If there are fewer cores than runs at the same time.
    """
    from sfactory.config.devices import cores

    seen, usable = sorted(os.sched_getaffinity(0)), cores()
    count = parallel or max(1, min(usable // 2, runs))
    if count > usable:
        raise ConfigError(f"parallel is {count}, but there are {usable} cores; a run needs at least one")
    each = usable // count
    first = random.randrange(len(seen) - usable + 1)  # containers with limits of time may share a machine's cores
    return [seen[first + i * each : first + (i + 1) * each] for i in range(count)]


def write_config(space: Space, sweep: Path, trial: Trial) -> Path:
    """Write the configuration of a trial into its folder, as ``--config`` reads it; gives the folder.

    Nothing is evaluated at the end of a run unless the space says so: no value would come of it.
    """
    folder = trial_folder(sweep, trial.number)
    folder.mkdir(parents=True, exist_ok=True)
    values = space.values(trial.chosen)
    values["eval"] = {"at_end": False} | values.get("eval", {})
    values["log"] = {"report_every_s": REPORT_EVERY_S, "tensorboard": False} | values.get("log", {})
    write_atomically(folder / TRIAL, yaml.safe_dump(values, sort_keys=False).encode())
    return folder


@dataclass(eq=False)
class _Begun:
    """A trial that has begun.

    Attributes:
        left: Seeds that have not been started.
        living: Its runs, with the index of the cores that each has.
        reports: Env steps and values of its first run's reports.
    """

    trial: Trial
    folder: Path
    left: list[int]
    living: list[tuple[Run, int]] = dataclasses.field(default_factory=list)
    reports: list[tuple[int, float]] = dataclasses.field(default_factory=list)


class Scheduler:
    """Runs trials until there are no more, or a signal ends the sweep.

    The first seed of a trial runs ahead where trials are compared, and the others follow if it is not pruned.

    Args:
        space: What is searched.
        folder: The sweep's folder.
        trials: Chooses the trials and keeps their results.
        shares: From :func:`core_shares`.
        note: Shows a line of text.

    Attributes:
        signal: The signal that ended the sweep, if one did.
    """

    def __init__(self, space: Space, folder: Path, trials: Trials, shares: list[list[int]], note: Note) -> None:
        self._space, self._folder, self._trials, self._shares, self._note = space, folder, trials, shares, note
        self._begun: list[_Begun] = []
        self._free = list(range(len(shares)))
        self._failures, self._failed_at = 0, 0  # and the most env steps of a trial that has failed
        self._waited_for: set[Path] = set()
        self._interrupts = 0
        self.signal: int | None = None

    def run(self) -> None:
        """Run all trials.

        Raises:
            RunFailed: If the first trials all fail.
        """
        with self._signals():
            try:
                while True:
                    self._start_runs()
                    self._begun = [begun for begun in self._begun if begun.trial.state == "running" or begun.living]
                    if not (self._begun if self.signal is None else self._living()):
                        return
                    for begun in self._begun:
                        self._watch(begun)
                    self._pass_interrupts_on()
                    time.sleep(POLL_S)
            except BaseException:
                self._interrupts += 1
                while self._living():
                    self._pass_interrupts_on()
                    for begun in self._begun:
                        begun.living = [(run, core) for run, core in begun.living if run.poll() is None]
                    time.sleep(POLL_S)
                raise

    def _living(self) -> list[Run]:
        return [run for begun in self._begun for run, _ in begun.living]

    def _signals(self) -> contextlib.AbstractContextManager[None]:
        """SIGINT and SIGTERM have the runs save and end; a second one has them end at once."""

        def interrupt(number: int, frame: types.FrameType | None) -> None:
            if self.signal is None:
                self._note("ending: the runs save; the same command goes on with them")
            self.signal = self.signal or number
            self._interrupts += 1

        return handling({signal.SIGINT: interrupt, signal.SIGTERM: interrupt})

    def _pass_interrupts_on(self) -> None:
        for run in self._living():
            if run.asked < self._interrupts:
                run.end()

    def _start_runs(self) -> None:
        """Start runs on all cores that are free."""
        while self._free and self.signal is None:
            ready = next((begun for begun in self._begun if self._may_start(begun)), None)
            if ready is None:
                if (trial := self._trials.next()) is None:
                    return
                self._begin(trial)
            elif is_complete(run_folder(ready.folder, seed := ready.left.pop(0))):
                self._take_score(ready, seed)
            else:
                core = self._free.pop()
                ready.living.append((Run(ready.folder, seed, self._shares[core]), core))

    def _begin(self, trial: Trial) -> None:
        begun = _Begun(trial, write_config(self._space, self._folder, trial), list(self._space.seeds))
        self._begun.append(begun)
        self._note(f"trial {trial.number}: {described(trial)}")

    def _may_start(self, begun: _Begun) -> bool:
        """Whether another run of a trial can be started."""
        if not begun.left or (self._trials.rungs and begun.living and not begun.trial.scores):
            return False
        folder = run_folder(begun.folder, begun.left[0])
        if not is_held(folder):
            return True
        if folder not in self._waited_for:  # of a sweep that was killed
            self._waited_for.add(folder)
            self._note(f"{folder} is still held by a process that saves; waiting for it")
        return False

    def _watch(self, begun: _Begun) -> None:
        """Look after the runs of a trial."""
        for run, core in list(begun.living):
            status = run.poll()
            if self._trials.rungs and run.seed == self._space.seeds[0] and self.signal is None:
                self._compare(begun, run)
            if status is None:
                continue
            begun.living.remove((run, core))
            self._free.append(core)
            if begun.trial.state != "running" or self.signal is not None:
                continue
            if status == 0:
                self._take_score(begun, run.seed)
            else:
                self._fail(begun, f"seed {run.seed}: {run.reason() or f'exit status {status}'}")

    def _compare(self, begun: _Begun, run: Run) -> None:
        """Compare the trial with the others at each rung that the new reports of its first run have passed."""
        objective = self._space.objective
        for report in run.new_reports(objective.metric):
            while begun.reports and begun.reports[-1][0] >= report[0]:  # it fell back to a checkpoint
                begun.reports.pop()
            before = begun.reports[-1][0] if begun.reports else 0
            begun.reports.append(report)
            for rung in self._trials.rungs:
                if begun.trial.state != "running" or not before < rung <= report[0] or is_complete(run.folder):
                    continue
                value = objective.of_run(begun.reports, rung)
                if self._trials.loses(begun.trial, rung, value):
                    self._end(begun, "pruned", value, f"{value:,.4g} at {rung:,} env steps")

    def _take_score(self, begun: _Begun, seed: int) -> None:
        """Take the value of a run that was trained to its end."""
        trial, objective = begun.trial, self._space.objective
        value = score(run_folder(begun.folder, seed), objective)
        if math.isnan(value):
            self._fail(begun, unscored(seed, objective))
            return
        trial.scores[seed] = value
        if len(trial.scores) == len(self._space.seeds):
            total = objective.across(list(trial.scores.values()))
            self._end(begun, "completed", total, f"{total:,.4g}")

    def _fail(self, begun: _Begun, reason: str) -> None:
        begun.trial.reason = reason
        self._end(begun, "failed", None, reason)
        self._failures += 1
        reached = (env_steps(run_folder(begun.folder, seed)) for seed in self._space.seeds)
        self._failed_at = max(self._failed_at, *reached)
        if self._failures < MOST_FAILURES or self._is_any_ahead():
            return
        if not any(trial.state in ("completed", "pruned") for trial in self._trials.all()):  # of earlier commands, too
            raise RunFailed(f"the first {MOST_FAILURES} trials have failed; {reason}")

    def _is_any_ahead(self) -> bool:
        """Whether a living run has come farther than all that have failed."""
        running = [begun for begun in self._begun if begun.trial.state == "running"]
        return any(env_steps(run.folder) > self._failed_at for begun in running for run, _ in begun.living)

    def _end(self, begun: _Begun, state: State, value: float | None, text: str) -> None:
        """End a trial; what still runs of it saves and ends."""
        begun.trial.state, begun.trial.value = state, value
        begun.left.clear()
        self._trials.end(begun.trial)
        self._note(f"trial {begun.trial.number} {state}: {text}")
        try:
            write_results(self._space, self._folder, self._trials.all())
        except OSError as error:
            self._note(f"results not written: {error}; trying again when the next trial ends")
        for run, _ in begun.living:
            run.end()


def described(trial: Trial) -> str:
    """The values of the searched fields in words."""
    return ", ".join(f"{name} {value_text(value)}" for name, value in trial.chosen.items()) or "the base alone"
