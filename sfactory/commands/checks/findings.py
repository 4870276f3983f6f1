"""What a check finds out about an environment."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

SPARSE = 0.005
"""Share of unusual rewards below which they are sparse."""
ALIKE = 0.05
"""Deviation of returns, as a share of their mean, up to which episodes are alike."""


class Finding(NamedTuple):
    """The result of one check.

    Attributes:
        check: Its name.
        level: problem: training would fail or learn the wrong thing; note: worth knowing; ok.
        message: What was found, and what to do.
    """

    check: str
    level: Literal["ok", "note", "problem"]
    message: str


class Stage(NamedTuple):
    """What is done from here on."""

    name: str


class Unmakeable(NamedTuple):
    """The environment cannot be made."""

    message: str


@dataclass(frozen=True)
class Spread:
    """Of durations in seconds.

    Attributes:
        p95: The 95th percentile.
    """

    mean: float
    median: float
    p95: float
    most: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Spread:
        values = np.asarray(seconds if len(seconds) else [0.0])
        return cls(float(values.mean()), *np.percentile(values, (50, 95, 100)).tolist())

    def __str__(self) -> str:
        return f"{duration(self.median)} (95 % below {duration(self.p95)}, at most {duration(self.most)})"


@dataclass(frozen=True)
class Facts:
    """What was measured while random actions were played.

    Attributes:
        kind: single, vector, parallel, or the name of a family of sfactory's own.
        rows: Agents that one step moves.
        agents: Agents of one environment.
        steps: Env steps that were played.
        step, reset: Durations of one call.
        cpu_share: Share of a step's time in which it, or a program that the environment has started, was at work, where
            it waits at all; 1 where it never gives the processor away.
        episodes: How many ended.
        episode_length: Their mean length in env steps.
        episode_return, episode_return_std: Of their returns.
        reward_mean, reward_std, reward_min, reward_max: Of all rewards.
        reward_usual: The most frequent reward.
        reward_share: Share of env steps with another one.
        observation_max: Largest magnitude of an observation that is no image.
        running_share: Share of the time in which other programs left it the processor.
    """

    kind: str
    rows: int
    agents: int
    steps: int
    step: Spread
    reset: Spread
    cpu_share: float
    episodes: int
    episode_length: float
    episode_return: float
    episode_return_std: float
    reward_mean: float
    reward_std: float
    reward_min: float
    reward_max: float
    reward_usual: float
    reward_share: float
    observation_max: float
    running_share: float

    @property
    def sparse(self) -> bool:
        """Whether hardly any reward is unusual, and the lengths of episodes do not make returns differ either."""
        alike = self.reward_usual == 0 or self.episode_return_std <= ALIKE * abs(self.episode_return)
        return self.reward_share < SPARSE and alike

    @property
    def env_step_s(self) -> float:
        """Seconds per env step of the environment alone, its share of the resets included, as if no other program ran
        on its core."""
        resets_apart = self.episodes and self.kind in ("single", "parallel")
        resets = self.reset.mean / self.episode_length if resets_apart else 0.0
        taken = self.step.mean / self.rows + resets / (self.agents if self.kind == "parallel" else 1)
        return taken * self.running_share


def duration(seconds: float) -> str:
    """Seconds in a unit that suits them."""
    for unit, name in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= unit:
            return f"{seconds / unit:.3g} {name}"
    return f"{seconds * 1e6:.3g} us"
