"""CartPole without its velocities: an agent needs memory to balance it.

python -m sfactory.train --env examples.masked_cartpole:MaskedCartPole-v0 --model.core lstm --steps 500000
"""

from __future__ import annotations

import gymnasium as gym
import numpy as np


class HideVelocities(gym.ObservationWrapper):
    """Keeps the cart's position and the pole's angle."""

    def __init__(self, env: gym.Env) -> None:
        super().__init__(env)
        low, high = env.observation_space.low[[0, 2]], env.observation_space.high[[0, 2]]
        self.observation_space = gym.spaces.Box(low, high, dtype=np.float32)

    def observation(self, observation: np.ndarray) -> np.ndarray:
        return observation[[0, 2]]


def make(**kwargs) -> gym.Env:
    return HideVelocities(gym.make("CartPole-v1", **kwargs))


gym.register("MaskedCartPole-v0", entry_point=make)
