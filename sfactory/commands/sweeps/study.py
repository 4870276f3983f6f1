"""Trials that Optuna chooses with regard to the earlier ones, kept in an SQLite file in the sweep's folder."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from sfactory.commands.sweeps.space import Dimension, Space
from sfactory.commands.sweeps.trials import Trial
from sfactory.errors import ConfigError, RunFailed, installing, said

DATABASE, STUDY = "study.db", "sweep"
STATES = {"completed": "COMPLETE", "pruned": "PRUNED", "failed": "FAIL"}
"""Optuna's names of the states in which a trial has ended."""
FIRST_RUNG = 9
"""Trials are first compared after this part of their env steps, unless prune.first says otherwise."""


class StudyTrials:
    """The trials of an Optuna study, which a process that was killed leaves such that the next one goes on.

    Args:
        space: What is searched.
        folder: The sweep's folder.

    Raises:
        ConfigError: If Optuna is not installed.
    """

    def __init__(self, space: Space, folder: Path) -> None:
        try:
            optuna = load_optuna()
        except ImportError as error:
            raise ConfigError(
                f"sampler tpe needs Optuna: {error}; {installing('sweep')}, or write sampler: random or grid"
            ) from error
        self._space, self.rungs = space, rungs(space)
        self._distributions = {name: distribution(dimension) for name, dimension in space.search.items()}
        self._storage = optuna.storages.RDBStorage(_url(folder / DATABASE))
        self._study = optuna.create_study(
            storage=self._storage, study_name=STUDY, load_if_exists=True, direction=space.objective.direction,
            pruner=_pruner(space, self.rungs),
        )  # fmt: skip
        self._study_id = self._storage.get_study_id_from_name(STUDY)
        known = self._study.get_trials(deepcopy=False)
        # Another seed for each process, so that it does not begin with the draws of the one before it.
        self._study.sampler = optuna.samplers.TPESampler(seed=len(known), constant_liar=True)
        self._unfinished = [each.number for each in known if not each.state.is_finished()]

    def all(self) -> list[Trial]:
        return [self._trial(each) for each in self._study.get_trials(deepcopy=False)]

    def next(self) -> Trial | None:
        while self._unfinished:
            trial = self._trial(self._frozen(self._unfinished.pop(0)))
            if len(trial.chosen) == len(self._distributions):
                return trial
            trial.state, trial.reason = "failed", "its process was killed before all values were chosen"
            self.end(trial)
        if len(self._study.get_trials(deepcopy=False)) >= self._space.trials:
            return None
        return self._trial(self._frozen(self._study.ask(self._distributions).number))

    def loses(self, trial: Trial, env_steps: int, value: float) -> bool:
        self._storage.set_trial_intermediate_value(self._id(trial.number), env_steps, value)
        return bool(self._study.pruner.prune(self._study, self._frozen(trial.number)))

    def end(self, trial: Trial) -> None:
        from optuna.trial import TrialState

        kept = {"scores": {str(seed): value for seed, value in trial.scores.items()}, "reason": trial.reason}
        for name, value in kept.items():
            self._storage.set_trial_user_attr(self._id(trial.number), name, value)
        completed = trial.value if trial.state == "completed" else None
        self._study.tell(trial.number, completed, TrialState[STATES[trial.state]])

    def _id(self, number: int) -> int:
        return int(self._storage.get_trial_id_from_study_id_trial_number(self._study_id, number))

    def _frozen(self, number: int) -> Any:
        return self._storage.get_trial(self._id(number))

    def _trial(self, frozen: Any) -> Trial:
        """A trial as the storage has it."""
        ended: dict[str, Any] = {name: state for state, name in STATES.items()}
        search = self._space.search
        chosen = {
            name: search[name].labels[value] if search[name].choices else value for name, value in frozen.params.items()
        }
        scores = {int(seed): value for seed, value in frozen.user_attrs.get("scores", {}).items()}
        value = frozen.intermediate_values[frozen.last_step] if frozen.last_step is not None else None
        return Trial(
            frozen.number, chosen, ended.get(frozen.state.name, "running"), scores,
            frozen.value if frozen.value is not None else value, frozen.user_attrs.get("reason", ""),
        )  # fmt: skip


def _url(file: Path) -> str:
    """The address of an SQLite file, whose path may have characters that mean something in addresses."""
    from sqlalchemy import URL  # Optuna needs it

    return URL.create("sqlite", database=str(file.resolve())).render_as_string()


@contextlib.contextmanager
def telling_of_database() -> Iterator[None]:
    """Tell in a sentence what Optuna raises of its file, as where the disk is full.

    Raises:
        RunFailed: If the file cannot be read or written.
    """
    try:
        yield
    except Exception as error:
        if type(error).__module__.partition(".")[0] not in ("optuna", "sqlalchemy"):
            raise
        reason = said(error.__cause__ or error).partition("\n")[0]
        raise RunFailed(
            f"cannot use {DATABASE} in the sweep's folder: {reason}; the same command goes on once that is mended"
        ) from error


def load_optuna() -> Any:
    """Optuna, with its warnings alone."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


def distribution(dimension: Dimension) -> Any:
    """Optuna's word for a searched field."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if dimension.choices:
        return CategoricalDistribution(list(dimension.labels))
    if dimension.whole:
        step = 1 if dimension.step is None else dimension.step
        return IntDistribution(int(dimension.low), int(dimension.high), log=dimension.log, step=int(step))
    return FloatDistribution(dimension.low, dimension.high, log=dimension.log, step=dimension.step)


def _pruner(space: Space, rungs: Sequence[int]) -> Any:
    from optuna.pruners import NopPruner, SuccessiveHalvingPruner

    if space.prune is None or not rungs:
        return NopPruner()
    return SuccessiveHalvingPruner(rungs[0], space.prune.factor)


def rungs(space: Space) -> list[int]:
    """Env steps at which trials are compared, below those of a whole run; none where they have no value before."""
    if space.prune is None or space.is_scored_at_end:
        return []
    # rounded up: the multiples of a smaller one would end with a rung just below the whole run
    found = [space.prune.first or -(-space.least_steps // FIRST_RUNG)]
    while found[-1] < space.least_steps:
        found.append(found[-1] * space.prune.factor)
    return found[:-1]
