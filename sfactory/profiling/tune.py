"""Tuning: finds by short real runs which processes and threads suit a machine and an environment.

The search climbs one setting at a time, in the order of how much it usually matters, as long as a step brings more than
noise, twice; then the fastest settings run again for longer, and the best of them wins. What is learned stays as it is:
batch size, rollout, epochs, losses and model. No more samples are under way than presets were tuned with, or than the
run had.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from time import monotonic
from typing import Any

import yaml

from sfactory.config import Config, changed, devices, fitted_with_free_batch_size, merged, resolve, to_dict
from sfactory.config.fitting import MOST_BATCHES
from sfactory.envs.factory import takes_rows
from sfactory.envs.interface import EnvRequest
from sfactory.errors import ConfigError, RunFailed
from sfactory.files import write_atomically
from sfactory.profiling.ceiling import precision_of
from sfactory.profiling.measure import PATIENCE_S, Interrupted, Profile, profile_run
from sfactory.runtime.plan import Plan
from sfactory.runtime.planning import make_plan

NOISE = 1.1
"""A setting counts as better from this ratio of env steps per second on."""
FINALISTS = 3
START_S = 4.0
"""Initial estimate of the seconds that a run takes besides its measurement."""
SEARCHED = (
    "device",
    "workers",
    "envs_per_worker",
    "precision",
    "runtime.policy_workers",
    "runtime.groups",
    "runtime.learner_threads",
    "runtime.inference_threads",
    "runtime.rollout_nice",
)
"""The settings that are searched, in this order."""

NICE_TRIED = 5
"""Value to try for ``runtime.rollout_nice``."""

Settings = dict[str, Any]


@dataclass(frozen=True)
class Trial:
    """One short run.

    Attributes:
        settings: Value of each searched field.
        fps: Env steps per second; NaN if it could not be run.
        note: Why it could not be run.
    """

    settings: Settings
    fps: float
    note: str = ""


@dataclass
class Tuning:
    """The result of a search.

    Attributes:
        plan: The best plan found.
        profile: Profile of its longest run.
        trials: All runs, in order.
        signal: The signal that ended the search early, if one did.
    """

    plan: Plan
    profile: Profile
    trials: list[Trial] = field(default_factory=list)
    signal: int | None = None


def tune(
    plan: Plan, seconds: float, sample_only: bool = False, report: Callable[[Trial], None] = lambda trial: None
) -> Tuning:
    """Search for the fastest settings.

    Args:
        plan: Where to begin, from :func:`sfactory.runtime.planning.make_plan`.
        seconds: For all runs together; at least the first one is made.
        sample_only: Look at sampling alone.
        report: Takes every trial as it ends.

    Raises:
        Interrupted, EnvironmentFault, RunFailed: As :func:`profile_run`, in the first run. An interrupt after that ends
            the search.
    """
    search = _Search(dataclasses.replace(plan, sample_only=sample_only), seconds, report)
    search.try_settings(search.best)
    try:
        search.climb()
        search.final()
    except Interrupted as end:
        search.signal = end.signal
    profile = search.profiles[_key(search.best)]
    return Tuning(profile.plan, profile, search.trials, search.signal)


def tuned_values(asked: Config, best: Config) -> dict[str, Any]:
    """The settings to write to a YAML file: what was asked for besides the defaults, and every searched field of the
    best config.

    With them and nothing else, ``python -m sfactory.train --config FILE`` trains what was tuned.
    """
    plain = to_dict(resolve(Config(env=asked.env, preset=asked.preset)))
    values = {"env": asked.env, "preset": asked.preset} | _differences(to_dict(asked), plain)
    for name in ("run", "overwrite", "log"):
        values.pop(name, None)
    _set(values, searched_values(best))
    for name in ("rollout", "batch_size"):  # fitted to numbers of environments that are given now
        if getattr(best, name) != getattr(asked, name):
            values[name] = getattr(best, name)
    return values


def write_tuned(file: Path, asked: Config, tuning: Tuning) -> None:
    """Write :func:`tuned_values` as YAML, with a comment that says what it is.

    Raises:
        OSError: If the file cannot be written.
    """
    head = (
        f"# {len(tuning.trials)} runs on {devices.cores()} cores; the best did {tuning.profile.fps:,.0f} env steps/s\n"
    )
    text = head + yaml.safe_dump(tuned_values(asked, tuning.plan.config), sort_keys=False)
    write_atomically(file, text.encode())


def searched_values(config: Config) -> Settings:
    """Values of the searched fields, with threads as they will be, and the precision as it is asked for."""
    return {name: attrgetter(name)(config) for name in SEARCHED} | {
        "runtime.learner_threads": devices.learner_threads(config),
        "runtime.inference_threads": devices.inference_threads(config),
    }


def _set(values: dict[str, Any], settings: Settings) -> None:
    """Put settings into a nested mapping, as a YAML file has it."""
    for name, value in settings.items():
        group, _, key = name.rpartition(".")
        (values.setdefault(group, {}) if group else values)[key] = value


def _differences(values: dict[str, Any], others: dict[str, Any]) -> dict[str, Any]:
    """The entries of a nested mapping that another one has not."""
    found = {}
    for key, value in values.items():
        other = others.get(key)
        if isinstance(value, dict) and isinstance(other, dict) and key not in ("env_kwargs", "kwargs"):
            if inner := _differences(value, other):
                found[key] = inner
        elif value != other:
            found[key] = value
    return found


def _key(settings: Settings) -> tuple:
    return tuple(settings[name] for name in SEARCHED)


class _Search:
    """The state of a search.

    Attributes:
        best: The fastest settings so far.
        profiles: The longest run of every setting that ran, by its values.
    """

    def __init__(self, plan: Plan, seconds: float, report: Callable[[Trial], None]) -> None:
        self._plan, self._report = plan, report
        self._end = monotonic() + seconds
        self._run_s = min(10.0, max(1.5, seconds / 40))
        self._start_s = START_S
        self.best = searched_values(plan.config) | {"precision": self._precision(plan.config)}
        self._other_device = None
        if plan.device_reason:  # it was left open, and there are two
            self._other_device = "cpu" if plan.config.device == "cuda" else "cuda"
        self.profiles: dict[tuple, Profile] = {}
        self.trials: list[Trial] = []
        self.signal: int | None = None

    def climb(self) -> None:
        """One setting after the other, again and again, until a whole round brings nothing or the time is up."""
        improved = True
        while improved:
            improved = False
            for name in SEARCHED:
                improved |= self._climb_along(name)

    def final(self) -> None:
        """The fastest settings again, twice as long. Of those that are as good as the best, the first found wins: it
        changes least."""
        order = list(self.profiles)
        fastest = sorted(order, key=lambda key: self.profiles[key].fps, reverse=True)[:FINALISTS]
        again: dict[tuple, float] = {}
        for key in fastest if len(fastest) > 1 else []:
            if self._left() < self._start_s + 2 * self._run_s:
                break
            fps = self._run(dict(zip(SEARCHED, key, strict=True)), 2 * self._run_s, first=False)
            if not math.isnan(fps):
                again[key] = fps
        good = [key for key in again if again[key] * NOISE >= max(again.values())]
        if good:
            self.best = dict(zip(SEARCHED, next(key for key in order if key in good), strict=True))

    def try_settings(self, settings: Settings) -> float:
        """Env steps per second of the first run of some settings."""
        return self._run(settings, self._run_s, first=not self.profiles)

    def _climb_along(self, name: str) -> bool:
        """Move along one setting while it gets faster; whether it did."""
        improved = False
        for direction in (1, -1):
            for value in self._values(name, direction):
                if (
                    self._left() < (2 + 2 * FINALISTS) * self._run_s + (2 + FINALISTS) * self._start_s
                ):  # the final's share of the time
                    return improved
                candidate = self._candidate(name, value)
                if candidate is None:
                    continue
                before = self.profiles[_key(self.best)].fps
                if not all(self.try_settings(candidate) > NOISE * before for _ in range(2)):
                    break
                self.best, improved = candidate, True
            if improved:
                break
        return improved

    def _values(self, name: str, direction: int) -> Iterator[Any]:
        """Further values of a setting, from the present one in a direction."""
        now, cores = self.best[name], devices.cores()
        if name == "device":
            if direction == 1 and self._other_device is not None:
                yield self._other_device
            return
        if name == "precision":
            if direction == 1 and devices.computes_bfloat16(devices.learner_device(self._config(self.best))):
                yield "float32" if now == "bfloat16" else "bfloat16"
            return
        if name == "runtime.rollout_nice":
            if direction == 1:
                yield NICE_TRIED if now == 0 else 0
            return
        if name == "envs_per_worker":
            yield from (v for k in range(1, 5) if (v := int(now * 2.0 ** (direction * k))) >= 1)
            return
        # Many environments that wait fit onto a core.
        most = {"workers": max(2 * cores, 16), "runtime.groups": 4}.get(name, cores)
        least = 0 if name == "runtime.policy_workers" else 1
        steps = sorted(
            {*range(least, min(most, 4) + 1), *(2**k for k in range(3, 10) if 2**k <= most), most, max(1, cores - 1)}
        )
        yield from (v for v in (steps if direction == 1 else reversed(steps)) if (v - now) * direction > 0)

    def _candidate(self, name: str, value: Any) -> Settings | None:
        """The best settings with one of them changed and others made to fit; None where that has been tried or cannot
        be."""
        changes = {name: value}
        if name == "device":  # policy workers are left to what suits it, and the precision, if nobody has named one
            other = changed(self._plan.config.runtime, policy_workers=None)
            config = changed(self._plan.config, device=value, runtime=other)
            changes["runtime.policy_workers"] = devices.policy_processes(config)
            changes["precision"] = self._precision(config)
        fitting = self._fitting({**self.best, **changes})
        if fitting is None:
            return None
        settings, tried = searched_values(fitting), {_key(trial.settings) for trial in self.trials}
        return None if _key(settings) in tried or settings[name] == self.best[name] else settings

    def _config(self, settings: Settings) -> Config:
        values: dict[str, Any] = {}
        _set(values, settings)
        return merged(self._plan.config, values)

    def _fitting(self, settings: Settings) -> Config | None:
        """A config of some settings, with so few environments that what is learned stays as it is; None if there is no
        such number."""
        config, asked, env = self._config(settings), self._plan.config, self._plan.env
        batches, groups = 1 if asked.lag_free else MOST_BATCHES, config.runtime.groups
        most = batches * asked.batch_size // (asked.rollout * env.agents)  # environments of the whole run
        most = max(most, self._plan.rollout_workers * asked.envs_per_worker)
        request = EnvRequest.of(config, self._plan.env_source)
        for envs in range(min(config.envs_per_worker, most // (config.workers or 1)) // groups, 0, -1):
            if not takes_rows(request, env, envs):
                continue
            fewer = changed(config, envs_per_worker=envs * groups)
            found = fitted_with_free_batch_size(fewer, env.agents, env.observation.has_images)
            if (found.batch_size, found.rollout) == (asked.batch_size, asked.rollout):
                return found
        return None

    def _run(self, settings: Settings, seconds: float, first: bool) -> float:
        """Env steps per second of a run with some settings; NaN if they cannot run. The first run has time to begin,
        whatever is left: nothing can be compared without it, and its error is raised."""
        begin = monotonic()
        patience_s = max(15.0, min(60.0, self._left()))
        try:
            plan = dataclasses.replace(self._plan, config=make_plan(self._config(settings)).config)
            profile = profile_run(plan, seconds, patience_s=PATIENCE_S if first else patience_s)
        except (ConfigError, RunFailed) as problem:
            if first:
                raise
            self._note(Trial(settings, math.nan, str(problem).splitlines()[0]))
            return math.nan
        self._start_s = 0.5 * (self._start_s + monotonic() - begin - seconds)
        self.profiles[_key(settings)] = profile
        self._note(Trial(settings, profile.fps))
        return profile.fps

    def _precision(self, config: Config) -> str:
        """The precision that the learner of a run computes in, by name."""
        return precision_of(dataclasses.replace(self._plan, config=config), devices.learner_device(config))

    def _left(self) -> float:
        return self._end - monotonic()

    def _note(self, trial: Trial) -> None:
        self.trials.append(trial)
        self._report(trial)
