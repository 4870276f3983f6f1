"""What a sweep searches, and what makes one of its trials better than another."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import operator
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import yaml

from sfactory.config import Config, alike, flattened, from_dict
from sfactory.config.declaring import settings_of
from sfactory.errors import ConfigError
from sfactory.runs.curves import EVALUATIONS, interquartile_mean

Plain = bool | int | float | str | None


@dataclass(frozen=True)
class Dimension:
    """A field that is searched: choices, or an interval.

    Attributes:
        name: Dotted name of the field.
        choices: Its values; empty for an interval.
        low: Lowest value of an interval.
        high: Highest value, included.
        log: Whether values are drawn uniformly in their logarithm.
        step: Distance of the values of an interval; None: any.
        whole: Whether the values are integers.
    """

    name: str
    choices: tuple[Any, ...] = ()
    low: float = 0.0
    high: float = 0.0
    log: bool = False
    step: float | None = None
    whole: bool = False

    @functools.cached_property
    def labels(self) -> dict[Plain, Any]:
        """The choices by what stands for them where only plain values can: lists and mappings by their YAML, and all
        choices by that of a list with each alone where two would be the same, as 1 and true are in Python."""
        labels: dict[Plain, Any] = {v if isinstance(v, Plain) else _yaml(v): v for v in self.choices}
        return labels if len(labels) == len(self.choices) else {_yaml([value]): value for value in self.choices}

    def label_of(self, value: Any) -> Plain:
        """What stands for a value: its label among the choices, or itself."""
        return next((label for label, choice in self.labels.items() if alike(choice, value)), value)

    @property
    def ends(self) -> tuple[Any, ...]:
        """All choices, or both ends of the interval: what is checked beforehand."""
        return self.choices or (self.low, self.high)

    def draw(self, generator: random.Random) -> Any:
        """A value at random."""
        if self.choices:
            return generator.choice(self.choices)
        if self.step is not None:
            most = math.floor((self.high - self.low) / self.step + 1e-9)
            return min(self.low + self.step * generator.randint(0, most), self.high)
        if self.log:
            value = math.exp(generator.uniform(math.log(self.low), math.log(self.high)))
            return min(max(round(value), self.low), self.high) if self.whole else value
        return (
            generator.randint(int(self.low), int(self.high)) if self.whole else generator.uniform(self.low, self.high)
        )


@dataclass(frozen=True)
class Objective:
    """What makes one trial better than another.

    Attributes:
        metric: A column of metrics.csv.
        last: The value of a run is the mean over this last share of its env steps, above 0 and at most 1.
        direction: Whether more or less of it is better.
        over_seeds: The value of a trial: iqm is the mean over the middle half of its runs' values.
    """

    metric: str = "episode_return_mean"
    last: float = 0.1
    direction: Literal["maximize", "minimize"] = "maximize"
    over_seeds: Literal["iqm", "mean", "median", "min"] = "iqm"

    def of_run(self, reports: Sequence[tuple[int, float]], env_steps: float = math.inf) -> float:
        """The value of a run, or what it was after so many env steps; NaN if nothing was reported.

        Each report stands for the env steps since the one before it, so that the value does not depend on how often a
        run reports.

        Args:
            reports: Env steps and values, in the order of the env steps.
            env_steps: What came later does not count.
        """
        if not reports:
            return math.nan
        steps, values = np.array(reports, dtype=float).T
        end = min(env_steps, steps[-1])
        begins = np.maximum(np.append(0.0, steps[:-1]), (1 - self.last) * end)
        weights = np.maximum(np.minimum(steps, end) - begins, 0.0)
        return float(np.average(values, weights=weights)) if weights.any() else float(values[-1])

    def across(self, values: Sequence[float]) -> float:
        """The value of a trial, of those of its runs."""
        if self.over_seeds == "iqm":
            return float(interquartile_mean(np.reshape(values, (-1, 1)))[0])
        over: Mapping[str, Callable[[Any], Any]] = {"mean": np.mean, "median": np.median, "min": np.min}
        return float(over[self.over_seeds](values))

    def better_first(self, value: float) -> float:
        """A key by which better values come first."""
        return -value if self.direction == "maximize" else value


@dataclass(frozen=True)
class Pruning:
    """When trials end early (asynchronous successive halving, Li et al. 2018).

    Attributes:
        first: Env steps of the first comparison; 0: a ninth of the run.
        factor: One trial in so many goes on after each comparison; the next one comes after so many times the env
            steps.
    """

    first: int = 0
    factor: int = 3


@dataclass(frozen=True)
class Space:
    """What a sweep searches.

    Attributes:
        base: What all trials share: keys of a configuration.
        search: The searched fields by name.
        trials: Number of configurations.
        seeds: Each configuration is trained with each of them.
        sampler: grid: all combinations of choices; random: drawn beforehand; tpe: Optuna, each trial with regard to the
            earlier ones.
        objective: What makes one trial better than another.
        prune: When trials end early; None: never.
        parallel: Runs at the same time; None: one for every two cores.
    """

    base: dict[str, Any]
    search: dict[str, Dimension]
    trials: int
    seeds: tuple[int, ...]
    sampler: Literal["grid", "random", "tpe"]
    objective: Objective = field(default_factory=Objective)
    prune: Pruning | None = None
    parallel: int | None = None

    @property
    def least_steps(self) -> int:
        """Env steps of the shortest run."""
        if "steps" in self.search:
            return min(int(parsed("steps", end)) for end in self.search["steps"].ends)
        return from_dict(self.base).steps

    @property
    def is_scored_at_end(self) -> bool:
        """Whether a run has no value before its end, since it is evaluated there alone."""
        every = (self.base.get("eval") or {}).get("every") or "eval.every" in self.search
        return self.objective.metric.startswith(EVALUATIONS) and not every

    def values(self, chosen: Mapping[str, Any]) -> dict[str, Any]:
        """The configuration of a trial as nested keys, as ``--config`` reads them."""
        return functools.reduce(lambda tree, item: _with(tree, item[0].split("."), item[1]), chosen.items(), self.base)

    def differences(self, other: Space) -> list[str]:
        """Keys in which another space would have trials other than these."""

        def choices(space: Space, name: str, dimension: Dimension) -> tuple[Any, ...]:
            if space.sampler == "tpe":  # Optuna's study has them as they were written
                return tuple(dimension.labels)
            return tuple(parsed(name, value) for value in dimension.choices)

        def meant(space: Space) -> dict[str, Any]:
            config = from_dict(space.base)
            base = {name: operator.attrgetter(name)(config) for name in flattened(space.base)}
            search = {
                name: dataclasses.asdict(dimension) | {"choices": choices(space, name, dimension)}
                for name, dimension in space.search.items()
            }
            return {"base": base, "search": search, "sampler": space.sampler}

        mine, others = meant(self), meant(other)
        return [key for key, value in mine.items() if not alike(others[key], value)]

    def listed(self) -> list[dict[str, Any]]:
        """The configurations of a grid, or those drawn at random, which are the same every time."""
        if self.sampler == "grid":
            combinations = itertools.product(*(dimension.choices for dimension in self.search.values()))
            return [dict(zip(self.search, values, strict=True)) for values in combinations]
        generator = random.Random(0)
        return [{name: dim.draw(generator) for name, dim in self.search.items()} for _ in range(self.trials)]


def parsed(name: str, value: Any) -> Any:
    """What a value of a searched field means, as a configuration has it: 1e-3, without a point, is a string in YAML."""
    if name not in settings_of(Config):
        return value
    try:
        return operator.attrgetter(name)(from_dict(_with({}, name.split("."), value)))
    except ConfigError:
        return value


def _yaml(value: Any) -> str:
    return yaml.safe_dump(value, default_flow_style=True).strip()


def _with(tree: Mapping[str, Any], path: Sequence[str], value: Any) -> dict[str, Any]:
    """A nested mapping with another value at a path."""
    name, *rest = path
    inner = tree.get(name)
    return {**tree, name: _with(inner if isinstance(inner, Mapping) else {}, rest, value) if rest else value}
