"""Events: messages from workers to the runner. They are rare and typed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from sfactory.envs.interface import SurvivedFault

PROGRESS_EVERY_S = 0.25
"""Seconds between two events of a worker about its progress."""


@dataclass(frozen=True)
class Episodes:
    """Episodes that ended in a rollout worker.

    Attributes:
        returns: float32 ``[n]``, undiscounted sums of the environment's own rewards.
        lengths: int32 ``[n]``, env steps.
        extras: Numeric entries of ``info`` at the episodes' ends: one array by name, with the values of those episodes
            that had it. Values that are not finite are not counted.
    """

    returns: np.ndarray
    lengths: np.ndarray
    extras: Mapping[str, np.ndarray] = field(default_factory=dict)


def by_name(entries: Iterable[Mapping[str, float]]) -> dict[str, np.ndarray]:
    """Mappings, one per episode, as one float64 array by name."""
    values: dict[str, list[float]] = {}
    for entry in entries:
        for name, value in entry.items():
            values.setdefault(name, []).append(value)
    return {name: np.array(column, np.float64) for name, column in values.items()}


@dataclass(frozen=True)
class SurvivedFaults:
    """Faults of environments that a rollout worker has survived since its last event.

    Attributes:
        counts: Number of faults, by the environment's name.
        first: The first of them.
    """

    counts: dict[str, int]
    first: SurvivedFault


@dataclass(frozen=True)
class Progress:
    """The learner's counters, and its statistics since its last event.

    Attributes:
        env_steps: Samples learned from, over the whole run.
        updates: Optimizer steps, over the whole run.
        lag_mean, lag_max: Policy lag of the samples since the last event, in updates; NaN without any.
        losses: Means since the last event, by name, without those of skipped updates.
        lr: Learning rate.
        skipped: Updates so far that were skipped because their gradient was not finite.
    """

    env_steps: int
    updates: int
    lag_mean: float
    lag_max: float
    losses: dict[str, float]
    lr: float
    skipped: int = 0


TERM = "term/"
"""Before the name of a user's own loss term."""


@dataclass(frozen=True)
class KernelsChosen:
    """Which kernels a kind of worker runs with.

    Attributes:
        worker: The kind of worker, learner or policy.
        taken: Names of the kernels.
        refused: Why others that would fit are not taken, by name.
    """

    worker: str
    taken: list[str]
    refused: dict[str, str]


@dataclass(frozen=True)
class Evaluated:
    """The evaluator has played its episodes.

    Attributes:
        env_steps: Env steps behind the weights.
        length_mean: In env steps.
    """

    env_steps: int
    return_mean: float
    return_std: float
    return_min: float
    return_max: float
    length_mean: float


@dataclass(frozen=True)
class Note:
    """A line of text for the user."""

    text: str


@dataclass(frozen=True)
class TrainingEnded:
    """The learner has reached the run's number of env steps, or was told to stop.

    Attributes:
        env_steps: Env steps trained on, over the whole run.
        completed: Whether the run's number of env steps is reached.
        unsaved: Why the last checkpoint could not be written, else None.
    """

    env_steps: int
    completed: bool
    unsaved: str | None = None


@dataclass(frozen=True)
class Failure:
    """A process cannot go on, so the run fails.

    Attributes:
        process: Name of the process.
        message: Explanation for the user.
        traceback: Python traceback; empty where the message explains everything.
        environment_fault: Whether the environment is at fault, not sfactory.
    """

    process: str
    message: str
    traceback: str
    environment_fault: bool = False


Event = Episodes | SurvivedFaults | Progress | KernelsChosen | Evaluated | Note | TrainingEnded | Failure
