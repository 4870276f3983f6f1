"""Base of native environments: the arrays of a group and the random streams of its kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import gymnasium
import numpy as np
from numba import njit

from sfactory.envs.interface import Group, Outcome, StepBuffers, SurvivedFault
from sfactory.errors import ConfigError

RESTING = -1
"""Value of a row's elapsed env steps that marks it as resting: it begins its next episode instead of stepping."""


class NativeGroup(Group):
    """A group whose rows are one kernel's loop. One row per environment; terminated rows reset at once, truncated rows
    rest for one step.

    Args:
        seeds: One seed per environment.
        squash: How continuous actions are mapped into the action space.
        max_episode_steps: Env steps after which an episode is truncated.

    Raises:
        ConfigError: If `max_episode_steps` is below 1.
    """

    observation_space: gymnasium.Space
    action_space: gymnasium.Space
    render_fps: float

    def __init__(self, seeds: Sequence[int], squash: Literal["clip", "tanh"], max_episode_steps: int) -> None:
        if max_episode_steps < 1:
            raise ConfigError(f"env_kwargs max_episode_steps is {max_episode_steps}; it must be at least 1")
        self.rows = len(seeds)
        self.extras: list[dict[str, float]] = []
        self.faults: list[SurvivedFault] = []
        self._squash = squash
        self._max_steps = max_episode_steps
        self._random = random_streams(seeds)
        self._elapsed = np.full(self.rows, RESTING, np.int32)

    def reset(self, buffers: StepBuffers) -> None:
        self._elapsed.fill(RESTING)
        rows = self.rows
        discarded = Outcome(np.empty(rows, np.float32), np.empty(rows, bool), np.empty(rows, bool))
        self.step(np.zeros((rows, 1), np.int32), np.zeros((rows, 1), np.float32), discarded, buffers)

    def step(self, categorical: np.ndarray, continuous: np.ndarray, outcome: Outcome, after: StepBuffers) -> None:
        raise NotImplementedError

    def render(self) -> list[np.ndarray]:
        raise NotImplementedError

    def close(self) -> None:
        """Do nothing: a native group holds no resources."""


def random_streams(seeds: Sequence[int]) -> np.ndarray:
    """The states, uint64 ``[len(seeds)]``, of one splitmix64 generator for each seed."""
    return np.array([np.random.SeedSequence(seed).generate_state(1, np.uint64)[0] for seed in seeds], np.uint64)


@njit(cache=True, nogil=True)
def uniform(random: np.ndarray, row: int) -> float:
    """The next number in [0, 1) of a row's stream (splitmix64: Steele, Lea and Flood, Fast splittable pseudorandom
    number generators, OOPSLA 2014).

    Args:
        random: uint64 ``[rows]``, states, advanced in place.
    """
    random[row] += np.uint64(0x9E3779B97F4A7C15)
    bits = random[row]
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    bits ^= bits >> np.uint64(31)
    return np.float64(bits >> np.uint64(11)) * 2.0**-53
