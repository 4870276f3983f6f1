"""Base of vector environments whose rows share one of Gymnasium's single environments.

The single environment takes all its arguments and begins the episodes, so each row plays as it would there; how all
rows are stepped is each kind's own (:mod:`~sfactory.envs.families.mujoco`,
:mod:`~sfactory.envs.families.classic_control`).
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Any, ClassVar

import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space


class SharedEnv(VectorEnv):
    """Rows that share one environment. Each begins its next episode in the step that ends the one before (SAME_STEP).

    Args:
        env: As ``gymnasium.make`` gives it.
        num_envs: How many rows share it.

    Attributes:
        family: Name of the kind in an :class:`~sfactory.envs.interface.EnvSpec`.
        entry_points: Of the environments that can be shared, as Gymnasium registers them.
    """

    family: ClassVar[str]
    entry_points: ClassVar[Container[Any]]

    def __init__(self, env: Any, num_envs: int) -> None:
        self.num_envs = num_envs
        self.metadata = {**env.metadata, "autoreset_mode": AutoresetMode.SAME_STEP}
        self.single_observation_space, self.single_action_space = env.observation_space, env.action_space
        self.observation_space = batch_space(env.observation_space, num_envs)
        self.action_space = batch_space(env.action_space, num_envs)
        self._env: Any = env.unwrapped
        self._limit = env.spec.max_episode_steps or np.inf
        self._ages = np.zeros(num_envs, np.int64)
        self._randoms: list[np.random.Generator] = []

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict[str, Any]]:
        """Begin all first episodes. A list has a seed for each environment; one number is the first one's, the others
        follow from it."""
        seeds = (
            seed
            if isinstance(seed, Sequence)
            else [None if seed is None else seed + row for row in range(self.num_envs)]
        )
        self._randoms = [np.random.default_rng() for _ in range(self.num_envs)]
        for row, own in enumerate(seeds):
            self._begin(row, own)
        return self._observations(), {}

    def step(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        reward, terminated, quantities = self._play(actions)
        self._ages += 1
        truncated = self._ages >= self._limit
        observations = self._observations()
        ended = np.flatnonzero(terminated | truncated)
        if not len(ended):
            return observations, reward, terminated, truncated, {}
        for row in ended.tolist():
            self._begin(row)
        info = {"final_obs": observations, "final_info": quantities}
        return self._observations(), reward, terminated, truncated, info

    def close_extras(self, **kwargs: Any) -> None:
        self._env.close()

    def _begin(self, row: int, seed: int | None = None) -> None:
        """Begin a row's next episode, its first one with a seed."""
        self._env.np_random = self._randoms[row]
        self._env.reset(seed=seed)
        self._randoms[row] = self._env.np_random
        self._ages[row] = 0
        self._keep(row)

    def _keep(self, row: int) -> None:
        """Copy the state of the environment, in which an episode has just begun, to a row."""
        raise NotImplementedError

    def _play(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]:
        """Step all rows; gives their rewards, whether they have terminated, and what else the environment tells in its
        info."""
        raise NotImplementedError

    def _observations(self) -> np.ndarray:
        """Of all rows, in a new array."""
        raise NotImplementedError
