"""What is counted from report to report: episodes that ended recently, the learner's statistics, speeds, and a critic
that sees nothing."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from sfactory.telemetry.events import Episodes, Progress

MOST_EXTRAS = 256
"""Names of extras that are kept; an environment may name them after its episodes."""
BLIND = 1e-5
"""Below it lies the explained variance of values that are all the same: 0 but for rounding, 1e-8 to 1e-6 in float32."""
BLIND_REPORTS = 6
"""Reports in a row; a critic that has merely learned nothing yet is not so near to 0 for so long."""


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

    def recent(self) -> np.ndarray:
        """These values, float64 ``[counted]``."""
        self.chunks = [np.concatenate(self.chunks)[-max(self.window, self.new) :]]
        return self.chunks[0]

    def report(self) -> np.ndarray:
        """These values; the next report's count as new from here."""
        recent = self.recent()
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

    def add(self, episodes: Episodes) -> None:
        """Count episodes that ended."""
        self._returns.extend(np.array(episodes.returns, np.float64))
        self._lengths.extend(np.array(episodes.lengths, np.float64))
        for name, values in episodes.extras.items():
            if name not in self._extras and len(self._extras) == MOST_EXTRAS:
                continue
            array = np.array(values, np.float64)
            self._extras.setdefault(name, _Series(self._window)).extend(array[np.isfinite(array)])

    @property
    def settled_return(self) -> float:
        """Mean return, once a whole window of episodes has ended; NaN before."""
        returns = self._returns.recent()
        return float(returns.mean()) if len(returns) >= self._window else math.nan

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


class ProgressWindow:
    """The learner's statistics since the last report, over all of its events in between.

    Args:
        begin: The counters with which the learner begins.

    Attributes:
        newest: The newest event.
    """

    def __init__(self, begin: Progress) -> None:
        self.newest = begin
        self._events: list[Progress] = []
        self._updates: list[int] = []

    def add(self, new: Progress) -> None:
        """Take an event. One without losses, because nothing was trained, has counters alone."""
        if new.losses:
            self._events.append(new)
            self._updates.append(new.updates - self.newest.updates)
        self.newest = new

    def report(self) -> Progress:
        """The newest counters; means of all updates since the last report, and the highest lag. Where there were none,
        no losses and no lag are known."""
        events, losses = self._events, {}
        lag_mean = lag_max = math.nan
        if events:
            losses = {name: self._mean([event.losses[name] for event in events]) for name in events[0].losses}
            lag_mean, lag_max = self._mean([event.lag_mean for event in events]), max(e.lag_max for e in events)
        reported = dataclasses.replace(self.newest, losses=losses, lag_mean=lag_mean, lag_max=lag_max)
        self._events, self._updates = [], []
        return reported

    def _mean(self, values: Sequence[float]) -> float:
        """Mean of the events' values, each for its updates; NaN, where all of these were skipped, does not count."""
        pairs = [pair for pair in zip(values, self._updates, strict=True) if not math.isnan(pair[0])]
        return math.nan if not pairs else sum(value * n for value, n in pairs) / sum(n for _, n in pairs)


class Speed(NamedTuple):
    """Speeds since the last report.

    Attributes:
        wall_s: As :attr:`Speedometer.wall_s`.
        fps: Env steps per second.
    """

    wall_s: float
    fps: float
    frames_per_s: float


class Speedometer:
    """Speeds since the last report and over the whole run. Time runs from its construction until it is stopped.

    Args:
        wall_s: Seconds that a resumed run has already taken.
        env_steps: Env steps that it has already done.
        frames: Frames likewise.
        clock: Seconds; monotonic.
    """

    def __init__(
        self, wall_s: float = 0.0, env_steps: int = 0, frames: int = 0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        self._start = clock() - wall_s
        self._begin = (wall_s, env_steps)
        self._trained: list[tuple[float, int]] = []
        self._stopped: float | None = None
        self._last = (wall_s, env_steps, frames)

    @property
    def wall_s(self) -> float:
        """Seconds that the run has taken so far, over all resumes."""
        return self._clock() - self._start if self._stopped is None else self._stopped

    def trained(self, env_steps: int) -> None:
        """Note that so many env steps of the run have been trained by now."""
        self._trained = [*self._trained[:1], (self.wall_s, env_steps)]

    def stop(self) -> None:
        """End the run's time with the last training, unless a report has been made later."""
        self._stopped = max(self._trained[-1][0] if self._trained else self.wall_s, self._last[0])

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
        """Env steps per second over the whole run, without the time before training began since the construction, if
        that is known. What a resumed run has taken before counts whole."""
        seconds = self.wall_s
        if len(self._trained) == 2:
            (first_s, first_steps), (last_s, last_steps) = self._trained
            seconds, env_steps = self._begin[0] + last_s - first_s, self._begin[1] + last_steps - first_steps
        return env_steps / seconds if seconds > 0 else math.nan


class BlindCritic:
    """Notices a critic whose values are the same whatever it observes, as after a layer was saturated. Such a run never
    learns anything."""

    def __init__(self) -> None:
        self._updates, self._reports = 0, 0

    def noticed(self, updates: int, explained_variance: float) -> bool:
        """Take a report into account; True once, at the last of so many reports that show it. One that shows nothing
        new, or returns that do not vary, counts neither way."""
        if updates == self._updates or explained_variance == 0.0 or math.isnan(explained_variance):
            return False
        self._updates = updates
        self._reports = self._reports + 1 if abs(explained_variance) < BLIND else 0
        return self._reports == BLIND_REPORTS
