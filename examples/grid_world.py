"""The grid world of Gymnasium's tutorial: an agent that walks to a target, both known by their cells.

python -m sfactory.train --env examples.grid_world:GridWorld-v0 --steps 100000

Its observation is a Dict of integers with small bounds, so they enter the network as categories.
"""

from __future__ import annotations

import gymnasium as gym
import numpy as np

DIRECTIONS = np.array([[1, 0], [0, 1], [-1, 0], [0, -1]])


class GridWorld(gym.Env):
    """The reward is 1 at the target, which ends the episode, and else 0."""

    def __init__(self, size: int = 5) -> None:
        self.size = size
        cell = gym.spaces.Box(0, size - 1, (2,), int)
        self.observation_space = gym.spaces.Dict({"agent": cell, "target": cell})
        self.action_space = gym.spaces.Discrete(4)

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[dict, dict]:
        super().reset(seed=seed)
        self.agent = self.target = self.np_random.integers(0, self.size, 2)
        while np.array_equal(self.target, self.agent):
            self.target = self.np_random.integers(0, self.size, 2)
        return self._observe(), self._inform()

    def step(self, action: int) -> tuple[dict, float, bool, bool, dict]:
        self.agent = np.clip(self.agent + DIRECTIONS[action], 0, self.size - 1)
        arrived = np.array_equal(self.agent, self.target)
        return self._observe(), 1.0 if arrived else 0.0, arrived, False, self._inform()

    def _observe(self) -> dict:
        return {"agent": self.agent.copy(), "target": self.target.copy()}

    def _inform(self) -> dict:
        return {"distance": np.linalg.norm(self.agent - self.target, ord=1)}


gym.register("GridWorld-v0", entry_point=GridWorld, max_episode_steps=300)
