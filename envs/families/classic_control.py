"""Gymnasium's Acrobot and MountainCar, which have no vector environment of their own, with env_backend auto.

One compiled pass steps all environments of a group (:mod:`sfactory.envs.kernels.classic_control`), where Gymnasium's
Python takes 17 to 62 us for each on a quiet core. Pendulum is not among them
(docs/decisions/034-compiled-classic-control.md).
"""

from __future__ import annotations

import gymnasium
import numpy as np

from sfactory.envs.families.shared_env import SharedEnv, is_one_of, read_spec, shared_group
from sfactory.envs.families.vector import VectorGroup
from sfactory.envs.interface import EnvRequest, EnvSpec

_MODULE = "gymnasium.envs.classic_control."
TASKS = {
    _MODULE + "acrobot:AcrobotEnv": "ACROBOT",
    _MODULE + "continuous_mountain_car:Continuous_MountainCarEnv": "CONTINUOUS_MOUNTAIN_CAR",
    _MODULE + "mountain_car:MountainCarEnv": "MOUNTAIN_CAR",
}
"""Of each entry point the name of its compiled task."""


def handles(request: EnvRequest) -> bool:
    """Ids of these environments."""
    return is_one_of(request, TASKS)


def probe(request: EnvRequest) -> EnvSpec:
    """Make one environment, read its spec, and close it.

    Raises:
        ConfigError: If `env_kwargs` do not fit.
    """
    return read_spec(request, ClassicControl, "classic_control")


def make_group(request: EnvRequest, spec: EnvSpec, count: int, first_index: int, seed: int) -> VectorGroup:
    """A group of `count` environments. Raises as `probe` does."""
    return shared_group(request, ClassicControl, spec, count, first_index, seed)


class ClassicControl(SharedEnv):
    """Environments of one compiled task.

    Args:
        env: One of those that `TASKS` knows, as ``gymnasium.make`` gives it.
        num_envs: How many there are.
    """

    def __init__(self, env: gymnasium.Env, num_envs: int) -> None:
        from sfactory.envs.kernels import classic_control

        super().__init__(env, num_envs)
        self._task: classic_control.Task = getattr(classic_control, TASKS[env.spec.entry_point])
        self._constants = tuple(float(getattr(self._env, name)) for name in self._task.constants)
        self._env.reset()
        self._states = np.zeros((num_envs, len(self._env.state)))
        self._rewards, self._terminated = np.zeros(num_envs, np.float32), np.zeros(num_envs, bool)

    def _keep(self, row: int) -> None:
        self._states[row] = self._env.state

    def _play(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]:
        self._task.step(self._states, actions, self._constants, self._rewards, self._terminated)
        return self._rewards, self._terminated, {}

    def _observations(self) -> np.ndarray:
        observations = np.empty((self.num_envs, *self.single_observation_space.shape), np.float32)
        self._task.observe(self._states, observations)
        return observations
