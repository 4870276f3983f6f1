"""What a run reports: one typed row per report, in metrics.csv and TensorBoard, and summary.json at the end."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from sfactory.config import Config
from sfactory.errors import ConfigError
from sfactory.files import append_whole, write_atomically
from sfactory.telemetry.tensorboard import EventFile


def _column(section: str, default: Any = dataclasses.MISSING) -> Any:
    """A field of :class:`Report` with the section under which TensorBoard shows it."""
    return field(default=default, metadata={"section": section})


@dataclass(frozen=True, kw_only=True)
class Report:
    """One row of metrics.csv, in the order of its columns. NaN: not known in this interval.

    Attributes:
        wall_s: Seconds trained so far, over all resumes.
        env_steps: Env steps so far.
        frames: Simulated frames so far: env steps x frameskip.
        fps: Env steps per second since the last report.
        frames_per_s: Frames per second since the last report.
        episodes: Episodes that ended since the last report.
        episode_return_mean: Over the window of recent episodes, as are the next three.
        episode_length_mean: In env steps.
        policy_lag_mean: In learner updates, over the samples trained on since the last report.
        policy_lag_max: The highest of them.
        learner_updates: Gradient steps so far.
        skipped_updates: Of them those that changed nothing, because the gradient was not finite.
        kl: KL divergence of the new policy from the one with which its batch was begun (the proximal policy), in nats.
        behaviour_kl: KL divergence of that one from the behaviour policy, which sampled: what the policy lag amounts
            to.
        clip_fraction: Share of samples whose ratio PPO's clip cut off.
        explained_variance: 1 - Var(return - value) / Var(return).
        grad_norm: Before clipping.
        rollout_busy: Share of their time, 0 to 1, that the rollout workers did not wait; likewise the next two.
        batch_fill: Mean rows of an inference batch.
        free_slots: Slots waiting to be filled, at the time of the report.
        finished_slots: Slots waiting for the learner.
        queue_full_waits: Times a full queue blocked a sender, so far.
        restarts: Times that worker processes were lost and started anew, since the command.
        env_faults: Faults of environments that the run has survived since it was started.
        rss_mb: Resident memory of all processes, in MiB.
        extras: Means of the numeric entries of ``info`` at episode ends. Not in metrics.csv, whose columns are fixed.
    """

    wall_s: float = _column("progress")
    env_steps: int = _column("progress")
    frames: int = _column("progress")
    fps: float = _column("speed", math.nan)
    frames_per_s: float = _column("speed", math.nan)
    episodes: int = _column("episode", 0)
    episode_return_mean: float = _column("episode", math.nan)
    episode_return_min: float = _column("episode", math.nan)
    episode_return_max: float = _column("episode", math.nan)
    episode_length_mean: float = _column("episode", math.nan)
    policy_lag_mean: float = _column("lag", math.nan)
    policy_lag_max: float = _column("lag", math.nan)
    learner_updates: int = _column("progress", 0)
    skipped_updates: int = _column("progress", 0)
    loss: float = _column("learner", math.nan)
    policy_loss: float = _column("learner", math.nan)
    value_loss: float = _column("learner", math.nan)
    entropy: float = _column("learner", math.nan)
    kl: float = _column("learner", math.nan)
    behaviour_kl: float = _column("lag", math.nan)
    clip_fraction: float = _column("learner", math.nan)
    explained_variance: float = _column("learner", math.nan)
    grad_norm: float = _column("learner", math.nan)
    lr: float = _column("learner", math.nan)
    rollout_busy: float = _column("load", math.nan)
    policy_busy: float = _column("load", math.nan)
    learner_busy: float = _column("load", math.nan)
    batch_fill: float = _column("load", math.nan)
    free_slots: int = _column("load", 0)
    finished_slots: int = _column("load", 0)
    queue_full_waits: int = _column("load", 0)
    restarts: int = _column("load", 0)
    env_faults: int = _column("load", 0)
    rss_mb: float = _column("load", math.nan)
    extras: Mapping[str, float] = field(default_factory=dict)


_COLUMNS = tuple(f for f in dataclasses.fields(Report) if f.name != "extras")
_HEADER = ",".join(f.name for f in _COLUMNS).encode() + b"\n"


class MetricsWriter:
    """Appends reports to metrics.csv and, with `log.tensorboard`, to TensorBoard files in the run folder.

    Args:
        run_folder: An existing folder.
        env_steps: Where a resumed run goes on. TensorBoard hides what was reported beyond; metrics.csv keeps every row.

    Raises:
        ConfigError: If the metrics.csv to continue has columns unknown to this sfactory, or TensorBoard is wanted and
            not installed.
    """

    def __init__(self, run_folder: str | os.PathLike[str], config: Config, env_steps: int = 0) -> None:
        self._csv = Path(run_folder) / "metrics.csv"
        if self._csv.exists():
            _mend_csv(self._csv)
        self._unwritten: list[bytes] = []
        self._events = EventFile(run_folder, env_steps) if config.log.tensorboard else None

    def write(self, report: Report) -> None:
        """Add one row; it is in the file when this returns. The first row brings the header.

        Raises:
            OSError: For example if the disk is full. metrics.csv has whole rows only, and gets those that it lacks the
                next time.
        """
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerow(_cell(getattr(report, f.name)) for f in _COLUMNS)
        self._unwritten.append(text.getvalue().encode())
        append_whole(self._csv, b"".join(self._unwritten), _HEADER)
        self._unwritten.clear()
        if self._events is not None:
            self._events.write(_scalars(report), report.env_steps)


def _mend_csv(path: Path) -> None:
    """Make a metrics.csv fit to be continued: without the half row of a process that was killed while writing it, and
    with all columns."""
    data = path.read_bytes()
    whole = data.rfind(b"\n") + 1
    if whole < len(data):
        os.truncate(path, whole)
    header = data[:whole].partition(b"\n")[0] + b"\n"
    if not whole or header == _HEADER:
        return
    rows = csv.DictReader(io.StringIO(data[:whole].decode(errors="replace")))
    names = [f.name for f in _COLUMNS]
    if rows.fieldnames is None or not set(rows.fieldnames) < set(names):
        raise ConfigError(
            f"{path} has other columns than this sfactory writes; move it away, or name another folder with --run"
        )
    text = io.StringIO()
    writer = csv.DictWriter(text, names, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_atomically(path, text.getvalue().encode())


def _cell(value: float | int) -> str:
    if isinstance(value, float):
        return "" if math.isnan(value) else f"{value:.8g}"
    return str(value)


def _scalars(report: Report) -> Iterable[tuple[str, float]]:
    for f in _COLUMNS:
        value = getattr(report, f.name)
        if f.name != "env_steps" and not math.isnan(value):
            yield f"{f.metadata['section']}/{f.name}", value
    for name, value in report.extras.items():
        if not math.isnan(value):
            yield f"extra/{name}", value


def write_summary(
    path: str | os.PathLike[str],
    status: Literal["completed", "interrupted", "failed"],
    *,
    env: str,
    seed: int,
    env_steps: int,
    frames: int,
    wall_s: float,
    fps: float,
    episode_return_mean: float,
    extras: Mapping[str, float] | None = None,
    error: str | None = None,
) -> None:
    """Write summary.json as one step. NaN becomes null.

    Args:
        path: The file.
        env: The environment's name.
        fps: Env steps per second over the whole run.
        error: What made a failed run fail.
    """
    values = {
        "status": status,
        "env": env,
        "seed": seed,
        "env_steps": env_steps,
        "frames": frames,
        "wall_s": _finite(wall_s),
        "fps": _finite(fps),
        "episode_return_mean": _finite(episode_return_mean),
        "extras": {name: _finite(value) for name, value in (extras or {}).items()},
        "error": error,
    }
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
        if not len(returns):
            return EpisodeStatistics(0, 0, math.nan, math.nan, math.nan, math.nan, extras)
        return EpisodeStatistics(
            episodes=episodes,
            counted=len(returns),
            return_mean=float(returns.mean()),
            return_min=float(returns.min()),
            return_max=float(returns.max()),
            length_mean=float(lengths.mean()),
            extras=extras,
        )


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
