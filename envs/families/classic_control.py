"""Gymnasium's Acrobot and MountainCar, which have no vector environment of their own, with env_backend auto.

One compiled pass steps all environments of a group (:mod:`sfactory.envs.kernels.classic_control`), where Gymnasium's
Python takes 17 to 62 us for each on a quiet core. Pendulum is not among them
(docs/decisions/034-compiled-classic-control.md).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from sfactory.envs.families.shared_env import SharedEnv

_MODULE = "gymnasium.envs.classic_control."
TASKS = {
    _MODULE + "acrobot:AcrobotEnv": "ACROBOT",
    _MODULE + "continuous_mountain_car:Continuous_MountainCarEnv": "CONTINUOUS_MOUNTAIN_CAR",
    _MODULE + "mountain_car:MountainCarEnv": "MOUNTAIN_CAR",
}
"""Of each entry point the name of its compiled task."""


class ClassicControl(SharedEnv):
    """Environments of one compiled task.

    Args:
        env: One of those that `TASKS` knows, as ``gymnasium.make`` gives it.
        num_envs: How many there are.
    """

    family = "classic_control"
    entry_points = TASKS

    def __init__(self, env: Any, num_envs: int) -> None:
        from sfactory.envs.kernels import classic_control

        super().__init__(env, num_envs)
        self._task: classic_control.Task = getattr(classic_control, TASKS[env.spec.entry_point])
        self._constants = tuple(float(getattr(self._env, name)) for name in self._task.constants)
        self._states = np.zeros((num_envs, self._task.size))

    def _keep(self, row: int) -> None:
        self._states[row] = self._env.state

    def _play(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]:
        rewards, terminated = np.empty(self.num_envs, np.float32), np.empty(self.num_envs, bool)
        self._task.step(self._states, actions, self._constants, rewards, terminated)
        return rewards, terminated, {}

    def _observations(self) -> np.ndarray:
        observations = np.empty((self.num_envs, *(self.single_observation_space.shape or ())), np.float32)
        self._task.observe(self._states, observations)
        return observations
