"""Trials that are known beforehand, a grid's or random ones: their run folders say what came of them."""

from __future__ import annotations

import math
from pathlib import Path

from sfactory.commands.sweeps.runs import is_complete, run_folder, score, unscored
from sfactory.commands.sweeps.space import Space
from sfactory.commands.sweeps.trials import Trial


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
        for trial in self._trials:
            if trial.state == "running":
                self._read(trial)
        return self._trials

    def next(self) -> Trial | None:
        return next(self._left, None)

    def loses(self, trial: Trial, env_steps: int, value: float) -> bool:
        return False

    def end(self, trial: Trial) -> None:
        pass

    def _read(self, trial: Trial) -> None:
        runs = {seed: run_folder(trial_folder(self._folder, trial.number), seed) for seed in self._space.seeds}
        objective = self._space.objective
        found = {seed: score(run, objective) for seed, run in runs.items() if is_complete(run)}
        trial.scores = {seed: value for seed, value in found.items() if not math.isnan(value)}
        if missing := [seed for seed in found if seed not in trial.scores]:
            trial.state, trial.reason = "failed", unscored(missing[0], objective)
        elif len(found) == len(runs):
            trial.state, trial.value = "completed", objective.across(list(trial.scores.values()))


def trial_folder(sweep: Path, number: int) -> Path:
    """The folder of a trial."""
    return sweep / "trials" / f"{number:04d}"
