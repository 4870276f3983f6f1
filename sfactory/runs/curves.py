"""Learning curves: read from run folders and CSV files, and put together over seeds.

Several runs are told by the conventions of rliable (Agarwal et al. 2021, "Deep Reinforcement Learning at the Edge of
the Statistical Precipice"): the interquartile mean over runs, with an interval from a bootstrap that draws runs within
each environment.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from sfactory.config import flattened, load_yaml
from sfactory.errors import ConfigError
from sfactory.files import run_name
from sfactory.runs.run_files import CONFIG, METRICS, is_held

STEPS, RETURN, EVALUATED = "env_steps", "episode_return_mean", "eval_env_steps"
SPEEDS = {"fps", "frames_per_s"}
"""Columns that are since the row before, per second of wall time."""
EVALUATIONS = "eval_"
"""Beginning of the names of columns of evaluations."""
OWN_COLUMNS = ("extra/", "term/")
"""Beginnings of the names of columns that are the user's: entries of ``info``, and loss terms."""
RESAMPLES = 2000
"""Draws of the bootstrap."""
CONFIDENCE = 0.95
_TRIMMED = 0.25
"""Share of runs that the interquartile mean leaves out at either end."""
_SEED = re.compile(r"[-.]\d+$")


@dataclass(frozen=True, eq=False)
class Curve:
    """The reports of a run, or of a CSV file.

    Attributes:
        name: Of the run (:func:`sfactory.files.run_name`), or of the file without its suffix.
        columns: float64 ``[rows]`` by name, NaN for an empty cell; rows in the order of their env steps.
        settings: The config of a run folder by dotted names; empty for a file.
        living: Whether the run still goes on.
    """

    name: str
    columns: Mapping[str, np.ndarray]
    settings: Mapping[str, Any] = field(default_factory=dict)
    living: bool = False

    @property
    def env(self) -> str:
        """The environment; of a file, what its name says without a seed at its end."""
        return str(self.settings.get("env") or _SEED.sub("", self.name))

    @property
    def rows(self) -> int:
        """Number of reports."""
        return len(next(iter(self.columns.values()), ()))

    def series(self, x: str, y: str) -> tuple[np.ndarray, np.ndarray]:
        """Two columns, float64 ``[n]`` each, of the reports that have both; empty if a column is not there."""
        if x not in self.columns or y not in self.columns:
            return np.empty(0), np.empty(0)
        known = np.isfinite(self.columns[x]) & np.isfinite(self.columns[y])
        return self.columns[x][known], self.columns[y][known]


def read_curve(path: str | Path) -> Curve:
    """The curve of a run folder, which may belong to a living run, or of a CSV file.

    Raises:
        ConfigError: If there is neither.
    """
    path = Path(path)
    if path.is_dir():
        if not (path / CONFIG).exists() and not (path / METRICS).exists():
            raise ConfigError(f"{path} holds no run (no {CONFIG}, no {METRICS}); name run folders or CSV files")
        settings = flattened(load_yaml(path / CONFIG)) if (path / CONFIG).exists() else {}
        return Curve(run_name(path), read_table(path / METRICS), settings, is_held(path))
    if path.suffix != ".csv" or not path.exists():
        raise ConfigError(f"{path} is no run folder and no CSV file; name run folders or CSV files with {STEPS}")
    return Curve(path.stem, read_table(path))


def read_table(path: Path) -> dict[str, np.ndarray]:
    """The columns of a CSV file of reports; without rows if there is no such file.

    A row that is written at this moment is left out, and so are those of a future that the run fell back from: where it
    went on from a checkpoint, env steps come again, and the later reports count. Of rows with the same env steps, as of
    a run that waits for something, the last one with a return counts, with what those before know of its learner, and
    every one with an evaluation. Its speed is that since the last row with other env steps. Of evaluations, too, those
    that come again count, with the weights of the later future.

    Raises:
        ConfigError: If it has no column of env steps, or is no text.
    """
    try:
        text = path.read_text() if path.exists() else ""
        whole = text[: text.rfind("\n") + 1]
        rows = [row for row in csv.DictReader(io.StringIO(whole)) if None not in row and None not in row.values()]
    except (OSError, UnicodeError, csv.Error) as error:
        raise ConfigError(f"{path} cannot be read: {error}; name run folders or CSV files") from None
    if not rows:
        return {}
    if STEPS not in rows[0]:
        raise ConfigError(f"{path} has no column {STEPS}; a curve needs one (its columns: {', '.join(rows[0])})")
    columns = {name: np.array([_number(row[name]) for row in rows]) for name in rows[0]}
    _forget_evaluations(columns)
    counting = _counting_rows(columns)
    repeated = (np.flatnonzero(np.diff(columns[STEPS]) == 0) + 1).tolist()
    _fill(columns, repeated)
    _join_speeds(columns, repeated)
    return {name: values[counting] for name, values in columns.items()}


def _counting_rows(columns: Mapping[str, np.ndarray]) -> list[int]:
    """The rows of a table that count, in their order (:func:`read_table`)."""
    steps = columns[STEPS]
    known = {name: np.isfinite(columns.get(name, np.full(len(steps), np.nan))) for name in (RETURN, EVALUATED)}
    rows = np.flatnonzero(steps <= _least_behind(steps)).tolist()
    of_steps: dict[float, int] = {}
    for row in rows:
        if known[RETURN][row] or not known[RETURN][of_steps.get(steps[row], row)]:
            of_steps[steps[row]] = row
    return [row for row in rows if known[EVALUATED][row] or of_steps[steps[row]] == row]


def _forget_evaluations(columns: Mapping[str, np.ndarray]) -> None:
    """Forget those of a future that the run fell back from, in rows that count: the first report after it went on may
    have come beyond them."""
    if EVALUATED not in columns:
        return
    forgotten = columns[EVALUATED] >= _least_behind(columns[EVALUATED])
    for name, values in columns.items():
        if name.startswith(EVALUATIONS):
            values[forgotten] = np.nan


def _least_behind(values: np.ndarray) -> np.ndarray:
    """The least known of the values behind each, infinity behind the last."""
    return np.append(np.fmin.accumulate(values[::-1])[::-1][1:], np.inf)


def _fill(columns: Mapping[str, np.ndarray], repeated: Sequence[int]) -> None:
    """Let `repeated` rows, without any new env steps, have what the row before knows beside returns and evaluations."""
    for row in repeated:
        for name, values in columns.items():
            if np.isnan(values[row]) and not name.startswith(("episode_", EVALUATIONS)):
                values[row] = values[row - 1]


def _join_speeds(columns: Mapping[str, np.ndarray], repeated: Sequence[int]) -> None:
    """Let the speeds in `repeated` rows, which are 0 since the row before, be those since the last row with other env
    steps: a report may come several times while a batch is sampled."""
    if "wall_s" not in columns:
        return
    seconds = np.diff(columns["wall_s"], prepend=0.0)
    seconds[seconds < 0] = np.nan  # a run that was killed has gone on from before
    for name in SPEEDS & columns.keys():
        speeds, done, took = columns[name], columns[name] * seconds, seconds.copy()
        for row in repeated:
            done[row] += done[row - 1]
            took[row] += took[row - 1]
            speeds[row] = done[row] / took[row] if took[row] > 0 else speeds[row - 1]


def steps_column(column: str) -> str:
    """The column of the env steps that another one is of: weights are older when their evaluation is reported."""
    return EVALUATED if column.startswith(EVALUATIONS) else STEPS


def last_known(columns: Mapping[str, np.ndarray]) -> dict[str, float]:
    """The last finite number of each column that has one."""
    known = {name: values[np.isfinite(values)] for name, values in columns.items()}
    return {name: float(values[-1]) for name, values in known.items() if len(values)}


def _number(cell: str) -> float:
    try:
        return float(cell)
    except ValueError:
        return np.nan


def interquartile_mean(values: np.ndarray) -> np.ndarray:
    """Mean over the middle half of runs, of each column; with less than four runs, of all.

    Args:
        values: ``[..., runs, columns]``.

    Returns:
        ``[..., columns]``.
    """
    runs = values.shape[-2]
    cut = int(_TRIMMED * runs)
    return np.sort(values, axis=-2)[..., cut : runs - cut, :].mean(-2)


def bootstrap_interval(values: np.ndarray, strata: Sequence[object]) -> tuple[np.ndarray, np.ndarray]:
    """Lower and upper end of the 95 % percentile interval of the interquartile mean, ``[columns]`` each.

    Args:
        values: ``[runs, columns]``.
        strata: The environment of each run: as many runs of each are drawn, with replacement, as it has.
    """
    generator = np.random.default_rng(0)  # the same runs give the same interval
    members = [np.flatnonzero([one == stratum for one in strata]) for stratum in dict.fromkeys(strata)]
    draws = np.concatenate([generator.choice(rows, (RESAMPLES, len(rows))) for rows in members], axis=1)
    means = np.concatenate([interquartile_mean(values[some]) for some in np.array_split(draws, RESAMPLES // 100)])
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(means, (tail, 1 - tail), axis=0)
    return low, high


def smoothed(values: np.ndarray, share: float) -> np.ndarray:
    """Running mean over a share of the columns, which narrows towards both ends.

    Args:
        values: ``[runs, columns]``, evenly spaced.
        share: 0 to 1; 0: as they are.
    """
    half = round(share * values.shape[-1] / 2)
    sums = np.cumsum(np.pad(values, ((0, 0), (1, 0))), axis=1)
    at = np.arange(values.shape[-1])
    reach = np.minimum(half, np.minimum(at, at[::-1]))
    return (sums[:, at + reach + 1] - sums[:, at - reach]) / (2 * reach + 1)
