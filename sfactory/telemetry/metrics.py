"""What a run reports: the declarations of its metrics, their files, and summary.json at the end."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from sfactory.config import Config
from sfactory.errors import ConfigError
from sfactory.files import append_whole, write_atomically
from sfactory.telemetry.events import TERM
from sfactory.telemetry.tensorboard import EventFile

REQUIRED: Any = dataclasses.MISSING
"""Default of a metric that every report has."""


class Metric(NamedTuple):
    """A figure that a run reports.

    Attributes:
        name: Its column in metrics.csv and field in :class:`Report`.
        source: Where :meth:`Report.gathered` finds it.
        unit: What it counts or measures; empty for a plain number.
        section: TensorBoard's group of charts.
        csv: Whether it is a column of metrics.csv.
        tensorboard: Whether TensorBoard shows it.
        label: Its name on the live display, which has a row for it then.
    """

    name: str
    source: str
    unit: str
    section: str
    csv: bool
    tensorboard: bool
    label: str | None

    @property
    def tag(self) -> str:
        """Its name in TensorBoard."""
        return f"{self.section}/{self.name}"


def metric(
    source: str,
    unit: str = "",
    default: Any = math.nan,
    *,
    section: str | None = None,
    csv: bool = True,
    tensorboard: bool = True,
    label: str | None = None,
) -> Any:
    """Declare a field of :class:`Report`; metrics.csv, TensorBoard and the display follow.

    Args:
        source: ``source.name`` in the arguments of :meth:`Report.gathered`; the name is the field's own if left out.
        unit: See :class:`Metric`, as for the rest.
        default: Where the source does not know it; NaN: an empty cell.
        section: Unset: the source.
    """
    group = source.partition(".")[0]
    declared = {"source": source, "unit": unit, "section": section or group, "csv": csv, "tensorboard": tensorboard}
    return field(default=default, metadata=declared | {"label": label})


@dataclass(frozen=True, kw_only=True)
class Report:
    """One row of metrics.csv, in the order of its columns. NaN: not known in this interval.

    A new metric is one declaration here, as long as its source knows it, as the learner knows the weights::

        weight_max: float = metric("losses", section="lag")
    """

    wall_s: float = metric("speed", "s", REQUIRED, section="progress")
    """Seconds trained so far, over all resumes."""
    env_steps: int = metric("progress", "env steps", REQUIRED, tensorboard=False)
    """Env steps so far; the horizontal axis of TensorBoard's charts."""
    frames: int = metric("totals", "frames", REQUIRED, section="progress")
    """Simulated frames so far: env steps x frameskip."""
    fps: float = metric("speed", "env steps/s", label="env steps/s")
    """Env steps per second since the last report."""
    frames_per_s: float = metric("speed", "frames/s", label="frames/s")
    """Frames per second since the last report."""
    episodes: int = metric("episodes", "episodes", 0, section="episode")
    """Episodes that ended since the last report."""
    episode_return_mean: float = metric("episodes.return_mean", section="episode", label="return")
    """Mean return over the window of recent episodes, as are the next three."""
    episode_return_min: float = metric("episodes.return_min", section="episode", label="")
    """Lowest return."""
    episode_return_max: float = metric("episodes.return_max", section="episode")
    """Highest return."""
    episode_length_mean: float = metric("episodes.length_mean", "env steps", section="episode", label="length")
    """Mean length."""
    eval_env_steps: float = metric("evaluation.env_steps", "env steps", section="eval", tensorboard=False)
    """Env steps behind the weights whose evaluation has come in since the last report, as have the next five."""
    eval_return_mean: float = metric("evaluation.return_mean", section="eval", label="evaluation")
    """Mean return of an evaluation's episodes."""
    eval_return_std: float = metric("evaluation.return_std", section="eval")
    """Their standard deviation."""
    eval_return_min: float = metric("evaluation.return_min", section="eval")
    """Lowest return."""
    eval_return_max: float = metric("evaluation.return_max", section="eval")
    """Highest return."""
    eval_length_mean: float = metric("evaluation.length_mean", "env steps", section="eval")
    """Mean length."""
    policy_lag_mean: float = metric("progress.lag_mean", "updates", section="lag", label="policy lag")
    """Mean policy lag of the samples trained on since the last report."""
    policy_lag_max: float = metric("progress.lag_max", "updates", section="lag")
    """Highest policy lag among them."""
    learner_updates: int = metric("progress.updates", "updates", 0, label="updates")
    """Gradient steps so far."""
    skipped_updates: int = metric("progress.skipped", "updates", 0)
    """Gradient steps that changed nothing, because the gradient was not finite."""
    loss: float = metric("losses", section="learner")
    """What is minimised, as a mean since the last report; so are all losses."""
    policy_loss: float = metric("losses", section="learner")
    """Policy's part of the loss."""
    value_loss: float = metric("losses", section="learner")
    """Value loss before its coefficient."""
    entropy: float = metric("losses", "nats", section="learner")
    """Entropy of the policy, or its KL divergence from the uniform policy with loss.exploration kl."""
    kl: float = metric("losses", "nats", section="learner")
    """KL divergence of the new policy from the one with which its batch was begun (the proximal policy)."""
    behaviour_kl: float = metric("losses", "nats", section="lag")
    """KL divergence of the proximal policy from the behaviour policy, which sampled: what the policy lag amounts to."""
    clip_fraction: float = metric("losses", "share", section="learner")
    """Share of samples whose ratio PPO's clip cut off."""
    explained_variance: float = metric("losses", section="learner")
    """1 - Var(return - value) / Var(return)."""
    grad_norm: float = metric("losses", section="learner")
    """Norm of the gradient before clipping."""
    lr: float = metric("progress", section="learner")
    """Learning rate."""
    rollout_busy: float = metric("load", "share", label="rollout busy")
    """Share of their time that the rollout workers did not wait."""
    policy_busy: float = metric("load", "share", label="policy busy")
    """Share of their time that the policy workers did not wait."""
    learner_busy: float = metric("load", "share", label="learner busy")
    """Share of its time that the learner did not wait."""
    batch_fill: float = metric("load", "rows", label="batch fill")
    """Mean rows of an inference batch."""
    free_slots: int = metric("load", "slots", 0, label="free slots")
    """Slots waiting to be filled, at the time of the report."""
    finished_slots: int = metric("load", "slots", 0, label="finished")
    """Slots waiting for the learner."""
    queue_full_waits: int = metric("load", "", 0)
    """Times a full queue blocked a sender, so far."""
    restarts: int = metric("load", "", 0)
    """Times that worker processes were lost and started anew, since the command."""
    env_faults: int = metric("load", "", 0)
    """Faults of environments that the run has survived since it was started."""
    rss_mb: float = metric("load", "MiB", label="memory")
    """Resident memory of all processes."""
    extras: Mapping[str, float] = field(default_factory=dict)
    """Means of the numeric entries of ``info`` at episode ends, and of a user's own loss terms (``term/NAME``)."""

    @classmethod
    def gathered(cls, extras: Mapping[str, float], **sources: Any) -> Report:
        """A report of what its sources know.

        Args:
            extras: See the field.
            sources: Objects and mappings by the names that the metrics declare. An empty mapping knows nothing; any
                other has all its metrics.
        """
        values = {}
        for each in METRICS:
            name, _, key = each.source.partition(".")
            source, key = sources[name], key or each.name
            if not isinstance(source, Mapping):
                values[each.name] = getattr(source, key)
            elif source:
                values[each.name] = source[key]
        return cls(extras=extras, **values)


METRICS = tuple(Metric(f.name, **f.metadata) for f in dataclasses.fields(Report) if f.metadata)
"""All metrics, in the order of the columns of metrics.csv."""
_COLUMNS = tuple(each.name for each in METRICS if each.csv)
_ALWAYS_THERE = {f.name for f in dataclasses.fields(Report) if f.metadata and f.default is REQUIRED}
"""Columns without which a file is no metrics.csv of any sfactory."""


MOST_COLUMNS = 256
"""Of metrics.csv: an environment may give its extras ever new names."""


class MetricsWriter:
    """Appends reports to metrics.csv and, with `log.tensorboard`, to TensorBoard files in the run folder.

    A metrics.csv of another version of sfactory goes on: it gets the columns that it lacks, and keeps those that there
    are no more, empty in new rows.

    Args:
        run_folder: An existing folder.
        env_steps: Where a resumed run goes on. TensorBoard hides what was reported beyond; metrics.csv keeps every row.

    Raises:
        ConfigError: If the file to continue is no metrics.csv, or TensorBoard is wanted and not installed.
    """

    def __init__(self, run_folder: str | os.PathLike[str], config: Config, env_steps: int = 0) -> None:
        self._csv = Path(run_folder) / "metrics.csv"
        self._columns = _mend_csv(self._csv) if self._csv.exists() else _COLUMNS
        self._unwritten: list[dict[str, str]] = []
        self._events = EventFile(run_folder, env_steps) if config.log.tensorboard else None

    def write(self, report: Report) -> None:
        """Add one row; it is in the file when this returns. The first row brings the header, and an extra that has not
        been reported before its column.

        Raises:
            OSError: For example if the disk is full. metrics.csv has whole rows only, and gets those that it lacks the
                next time.
        """
        values = {name: getattr(report, name) for name in _COLUMNS} | _extras(report)
        self._unwritten.append({name: _cell(value) for name, value in values.items()})
        self._add_columns([name for name in values if name not in self._columns])
        header = _csv_text(self._columns, [], header=True)
        append_whole(self._csv, _csv_text(self._columns, self._unwritten), header)
        self._unwritten.clear()
        if self._events is not None:
            self._events.write(scalars(report), report.env_steps)

    def _add_columns(self, names: Sequence[str]) -> None:
        """Write the file anew with further columns, of which it has at most :data:`MOST_COLUMNS`."""
        names = names[: max(0, MOST_COLUMNS - len(self._columns))]
        if not names:
            return
        columns = (*self._columns, *names)
        if self._csv.exists():
            rows = csv.DictReader(io.StringIO(self._csv.read_text()))
            write_atomically(self._csv, _csv_text(columns, rows, header=True))
        self._columns = columns


def _mend_csv(path: Path) -> Sequence[str]:
    """Make a metrics.csv fit to be continued: without the half row of a process that was killed while writing it, and
    with all columns.

    Returns:
        The columns of the file.
    """
    data = path.read_bytes()
    whole = data.rfind(b"\n") + 1
    if whole < len(data):
        os.truncate(path, whole)
    if not whole or data.startswith(_csv_text(_COLUMNS, [], header=True)):
        return _COLUMNS
    try:
        rows = csv.DictReader(io.StringIO(data[:whole].decode(errors="replace")))
        found = rows.fieldnames or []
        if not set(found) >= _ALWAYS_THERE or len(set(found)) < len(found):
            raise ConfigError(
                f"{path} has other columns than sfactory writes; move it away, or name another folder with --run"
            )
        columns = (*_COLUMNS, *(name for name in found if name not in _COLUMNS))
        if columns != tuple(found):
            write_atomically(path, _csv_text(columns, rows, header=True))
    except csv.Error as error:
        raise ConfigError(
            f"{path} cannot be continued ({error}); move it away, or name another folder with --run"
        ) from None
    return columns


def _csv_text(columns: Sequence[str], rows: Iterable[Mapping[str, str]], header: bool = False) -> bytes:
    """Rows as lines of a CSV file; cells that they lack are empty, and cells beyond the columns are left out."""
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, extrasaction="ignore", lineterminator="\n")
    if header:
        writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().encode()


def _cell(value: float | int) -> str:
    if isinstance(value, float):
        return "" if math.isnan(value) else f"{value:.8g}"
    return str(value)


def scalars(report: Report) -> list[tuple[str, float]]:
    """The tags and values that TensorBoard and loggers show: what is known, over env steps."""
    named = {each.tag: getattr(report, each.name) for each in METRICS if each.tensorboard}
    return [(tag, value) for tag, value in (named | _extras(report)).items() if not math.isnan(value)]


def _extras(report: Report) -> dict[str, float]:
    """Extras by names that no metric has: ``extra/NAME``, or ``term/NAME`` for a loss term."""
    return {name if name.startswith(TERM) else f"extra/{name}": value for name, value in report.extras.items()}


@dataclass(frozen=True, kw_only=True)
class Summary:
    """What summary.json says of a run.

    Attributes:
        env: The environment's name.
        protocol: How it is played (``EnvSpec.protocol``), or empty.
        fps: Env steps per second over the whole run.
        extras: Means of the last report.
        error: What made a failed run fail.
        phases: Share of every phase in the time of each kind of worker, 0 to 1.
        machine: Facts about the machine, for a reader.
    """

    status: Literal["completed", "interrupted", "failed"]
    env: str
    seed: int
    env_steps: int
    frames: int
    wall_s: float
    fps: float
    episode_return_mean: float
    protocol: str = ""
    extras: Mapping[str, float] = field(default_factory=dict)
    error: str | None = None
    phases: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    machine: Mapping[str, str] = field(default_factory=dict)

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write the file as one step. NaN becomes null."""
        numbers = {name: _finite(getattr(self, name)) for name in ("wall_s", "fps", "episode_return_mean")}
        extras = {name: _finite(value) for name, value in self.extras.items()}
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)} | numbers | {"extras": extras}
        write_atomically(Path(path), (json.dumps(values, indent=2, allow_nan=False) + "\n").encode())


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


class EpisodeStatistics(NamedTuple):
    """Statistics of recent episodes; NaN where none has ended.

    Attributes:
        episodes: Episodes that ended since the last report.
        counted: Episodes that the statistics are over.
        extras: The mean of each extra over its own recent values.
    """

    episodes: int
    counted: int
    return_mean: float
    return_min: float
    return_max: float
    length_mean: float
    extras: dict[str, float]


class _Series:
    """The last `window` values, or all since the last report if those are more."""

    def __init__(self, window: int) -> None:
        self.window = window
        self.chunks = [np.empty(0)]
        self.new = 0

    def extend(self, values: np.ndarray) -> None:
        self.chunks.append(values)
        self.new += len(values)

    def report(self) -> np.ndarray:
        """The values to report, float64 ``[counted]``; the next report's values count as new from here."""
        values = np.concatenate(self.chunks)
        recent = values[-max(self.window, self.new) :]
        self.chunks, self.new = [recent[-self.window :].copy()], 0
        return recent


class EpisodeWindow:
    """Episodes that ended recently: at least the last `window`, and all since the last report.

    Args:
        window: Number of episodes, at least 1.
    """

    def __init__(self, window: int) -> None:
        self._window = window
        self._returns = _Series(window)
        self._lengths = _Series(window)
        self._extras: dict[str, _Series] = {}

    def add(self, returns: np.ndarray, lengths: np.ndarray, extras: Iterable[Mapping[str, float]] = ()) -> None:
        """Count episodes that ended.

        Args:
            returns: ``[n]``, any float or integer type; copied.
            lengths: ``[n]``, in env steps; copied.
            extras: Numeric entries of ``info``, one mapping per episode that had any. Values that are not finite are
                left out.
        """
        self._returns.extend(np.array(returns, np.float64))
        self._lengths.extend(np.array(lengths, np.float64))
        values: dict[str, list[float]] = {}
        for entries in extras:
            for name, value in entries.items():
                values.setdefault(name, []).append(value)
        for name, column in values.items():
            array = np.array(column, np.float64)
            self._extras.setdefault(name, _Series(self._window)).extend(array[np.isfinite(array)])

    def report(self) -> EpisodeStatistics:
        """The statistics now; what is added from here on counts as new for the next report."""
        episodes = self._returns.new
        returns, lengths = self._returns.report(), self._lengths.report()
        extras = {name: float(values.mean()) for name, series in self._extras.items() if len(values := series.report())}
        return EpisodeStatistics(
            episodes=episodes,
            counted=len(returns),
            return_mean=_statistic(np.mean, returns),
            return_min=_statistic(np.min, returns),
            return_max=_statistic(np.max, returns),
            length_mean=_statistic(np.mean, lengths),
            extras=extras,
        )


def _statistic(of: Callable[[np.ndarray], Any], values: np.ndarray) -> float:
    return float(of(values)) if len(values) else math.nan


class Speed(NamedTuple):
    """Speeds since the last report.

    Attributes:
        wall_s: Seconds trained so far, over all resumes.
        fps: Env steps per second.
    """

    wall_s: float
    fps: float
    frames_per_s: float


class Speedometer:
    """Speeds since the last report and over the whole run. Time runs from its construction.

    Args:
        wall_s: Seconds that a resumed run has already trained.
        env_steps: Env steps that it has already done.
        frames: Frames likewise.
        clock: Seconds; monotonic.
    """

    def __init__(
        self, wall_s: float = 0.0, env_steps: int = 0, frames: int = 0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        self._start = clock() - wall_s
        self._last = (wall_s, env_steps, frames)

    @property
    def wall_s(self) -> float:
        """Seconds trained so far, over all resumes."""
        return self._clock() - self._start

    def report(self, env_steps: int, frames: int) -> Speed:
        """Speeds since the last call, or since the construction; NaN if no time has passed.

        Args:
            env_steps: Env steps of the run so far.
            frames: Frames of the run so far.
        """
        wall_s = self.wall_s
        elapsed = wall_s - self._last[0]
        done_steps, done_frames = env_steps - self._last[1], frames - self._last[2]
        self._last = (wall_s, env_steps, frames)
        return (
            Speed(wall_s, done_steps / elapsed, done_frames / elapsed)
            if elapsed > 0
            else Speed(wall_s, math.nan, math.nan)
        )

    def overall_fps(self, env_steps: int) -> float:
        """Env steps per second over the whole run."""
        wall_s = self.wall_s
        return env_steps / wall_s if wall_s > 0 else math.nan
