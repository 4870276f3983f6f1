"""What came of a sweep: a table of its trials, the best configuration, and pictures."""

from __future__ import annotations

import csv
import io
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from rich.table import Table
from rich.text import Text

from sfactory.commands.sweeps.listed import trial_folder
from sfactory.commands.sweeps.runs import curve, run_folder
from sfactory.commands.sweeps.space import Space
from sfactory.commands.sweeps.study import STATES, distribution, load_optuna
from sfactory.commands.sweeps.trials import Note, Trial, value_text
from sfactory.errors import installing
from sfactory.files import write_atomically

BEST, TRIALS, PLOTS = "best.yaml", "trials.csv", "plots"
SHOWN = 10
"""Trials in the table on the terminal."""
DOTS_PER_INCH = 120


def best_first(space: Space, trials: Sequence[Trial]) -> list[Trial]:
    """The completed trials, and after them all others."""

    def place(trial: Trial) -> tuple[int, float]:
        rank = ("completed", "pruned", "running", "failed").index(trial.state)
        return rank, 0.0 if trial.value is None else space.objective.better_first(trial.value)

    return sorted(trials, key=place)


def write_summary(space: Space, folder: Path, trials: Sequence[Trial], note: Note) -> Trial | None:
    """Write ``trials.csv``, ``best.yaml`` and the plots into the sweep's folder.

    Returns:
        The best trial, or None if none is complete.
    """
    best = write_results(space, folder, trials)
    if best is not None:
        _draw(space, folder, trials, note)
    return best


def write_results(space: Space, folder: Path, trials: Sequence[Trial]) -> Trial | None:
    """The same without the plots, which take long."""
    ordered = best_first(space, trials)
    write_atomically(folder / TRIALS, _csv(space, ordered).encode())
    complete = [trial for trial in ordered if trial.state == "completed"]
    if not complete:
        return None
    best = complete[0]
    head = f"# trial {best.number} of {folder}: {space.objective.metric} {best.value:,.6g} ({_seeds(best)})\n"
    values = yaml.safe_dump(space.values(best.chosen), sort_keys=False)
    write_atomically(folder / BEST, (head + values).encode())
    return best


def table(space: Space, trials: Sequence[Trial]) -> Table:
    """The best trials, for the terminal."""
    shown = Table()
    for name in ("trial", "state", space.objective.metric, *space.search):
        shown.add_column(Text(name))
    for trial in best_first(space, trials)[:SHOWN]:
        value = "" if trial.value is None else f"{trial.value:,.4g}"
        chosen = (value_text(trial.chosen.get(name)) for name in space.search)
        shown.add_row(*map(Text, (str(trial.number), _state(trial), value, *chosen)))
    return shown


def _state(trial: Trial) -> str:
    """A sweep that is summed up no longer runs anything."""
    return "unfinished" if trial.state == "running" else trial.state


def _seeds(trial: Trial) -> str:
    return ", ".join(f"seed {seed}: {value:,.4g}" for seed, value in trial.scores.items())


def _csv(space: Space, trials: Sequence[Trial]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["trial", "state", "value", *space.search, *(f"seed {seed}" for seed in space.seeds), "reason"])
    for trial in trials:
        chosen = [trial.chosen.get(name, "") for name in space.search]
        scores = [trial.scores.get(seed, "") for seed in space.seeds]
        value = "" if trial.value is None else trial.value
        writer.writerow([trial.number, _state(trial), value, *chosen, *scores, trial.reason])
    return text.getvalue()


# Pictures


def _draw(space: Space, folder: Path, trials: Sequence[Trial], note: Note) -> None:
    """Draw Optuna's plots of the trials, as far as Optuna and matplotlib are installed."""
    try:
        optuna = load_optuna()
        import matplotlib
    except ImportError as error:
        note(f"no plots: {error}; {installing('sweep')}")
        return
    matplotlib.use("agg")
    study = _study_of(optuna, space, folder, trials)
    (folder / PLOTS).mkdir(exist_ok=True)
    for name, draw in _plots(space).items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                axes = draw(study)
            except (ValueError, RuntimeError) as error:  # as for importances, if all trials have the same value
                note(f"no plot {name}: {error}")
                continue
        _save(axes, folder / PLOTS / f"{name}.png")


def _plots(space: Space) -> dict[str, Any]:
    from optuna.importance import PedAnovaImportanceEvaluator
    from optuna.visualization import matplotlib as plots

    def importances(study: Any) -> Any:
        return plots.plot_param_importances(study, evaluator=PedAnovaImportanceEvaluator())

    drawn: dict[str, Any] = {"history": plots.plot_optimization_history, "curves": plots.plot_intermediate_values}
    if space.search:
        drawn["slices"] = plots.plot_slice
    if len(space.search) > 1:
        drawn |= {"parallel-coordinates": plots.plot_parallel_coordinate, "importances": importances}
    return drawn


def _study_of(optuna: Any, space: Space, folder: Path, trials: Sequence[Trial]) -> Any:
    """A study in memory with the trials that have ended, whoever chose them, and the curves of their first seeds."""
    study = optuna.create_study(direction=space.objective.direction)
    distributions = {name: distribution(dimension) for name, dimension in space.search.items()}
    for trial in trials:
        if trial.state in ("completed", "pruned"):
            run = run_folder(trial_folder(folder, trial.number), space.seeds[0])
            labels = {name: dimension.label_of(trial.chosen[name]) for name, dimension in space.search.items()}
            study.add_trial(
                optuna.create_trial(
                    state=optuna.trial.TrialState[STATES[trial.state]], value=trial.value, params=labels,
                    distributions=distributions,
                    intermediate_values=dict(curve(run, space.objective.metric)),
                )
            )  # fmt: skip
    return study


def _save(axes: Any, path: Path) -> None:
    import matplotlib.pyplot
    import numpy as np

    figure = np.ravel(np.asarray(axes, dtype=object))[0].figure
    figure.savefig(path, dpi=DOTS_PER_INCH, bbox_inches="tight")
    matplotlib.pyplot.close(figure)
