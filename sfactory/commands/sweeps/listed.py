"""Trials that are known beforehand, a grid's or random ones: their run folders say what came of them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path

from sfactory.commands.sweeps.runs import failure, is_complete, run_folder, score, unscored
from sfactory.commands.sweeps.space import Space
from sfactory.commands.sweeps.trials import Trial
from sfactory.files import TRIALS


class ListedTrials:
    """The trials of a grid, or random ones. What has failed is tried again by the next process.

    Args:
        space: What is searched.
        folder: Maps a trial's number to its folder.
    """

    rungs = ()

    def __init__(self, space: Space, folder: Path) -> None:
        self._space, self._folder = space, folder
        self._trials = [Trial(number, chosen) for number, chosen in enumerate(space.listed())]
        self._left = iter(self._trials)

    def all(self) -> list[Trial]:
        return [
            read_trial(self._space, self._folder, trial) if trial.state == "running" else trial
            for trial in self._trials
        ]

    def next(self) -> Trial | None:
        return next(self._left, None)

    def loses(self, trial: Trial, env_steps: int, value: float) -> bool:
        return False

    def end(self, trial: Trial) -> None:
        pass


def read_trial(space: Space, sweep: Path, trial: Trial) -> Trial:
    """A copy of a trial with what its run folders say has come of it."""
    folder, objective = trial_folder(sweep, trial.number), space.objective
    found = {seed: score(run, objective) for seed in space.seeds if is_complete(run := run_folder(folder, seed))}
    read = Trial(trial.number, trial.chosen)
    read.scores = {seed: value for seed, value in found.items() if not math.isnan(value)}
    failures = {seed: reason for seed in space.seeds if seed not in found and (reason := failure(folder, seed))}
    if missing := [seed for seed in found if seed not in read.scores]:
        read.state, read.reason = "failed", unscored(missing[0], objective)
    elif failures:
        seed, reason = next(iter(failures.items()))
        read.state, read.reason = "failed", f"seed {seed}: {reason}"
    elif len(found) == len(space.seeds):
        read.state, read.value = "completed", objective.across(list(read.scores.values()))
    return read


def rescored(space: Space, sweep: Path, trials: Sequence[Trial]) -> list[Trial]:
    """The same trials with values by the space's objective, where another one chose them."""
    found = []
    for trial in trials:
        if trial.state == "completed":
            trial = read_trial(space, sweep, trial)
        elif trial.state == "pruned":
            run = run_folder(trial_folder(sweep, trial.number), space.seeds[0])
            value = score(run, space.objective)
            trial = dataclasses.replace(trial, value=None if math.isnan(value) else value)
        found.append(trial)
    return found


def trial_folder(sweep: Path, number: int) -> Path:
    """The folder of a trial."""
    return sweep / TRIALS / f"{number:04d}"
