"""Environments like those that newcomers bring, which no trainer knows: slow ones, and one of many rows."""

from __future__ import annotations

import time
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv

STEP_S = 0.005
EPISODE = 100


class Slow(gymnasium.Env):
    """Each step takes 5 ms: of a core's time, or of waiting for something else."""

    def __init__(self, waits: bool) -> None:
        self.observation_space = gymnasium.spaces.Box(-1, 1, (4,), np.float32)
        self.action_space = gymnasium.spaces.Discrete(2)
        self._waits = waits

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self._left = EPISODE
        return self._observe(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict]:
        if self._waits:
            time.sleep(STEP_S)
        else:
            end = time.thread_time() + STEP_S
            while time.thread_time() < end:
                pass
        self._left -= 1
        return self._observe(), float(action), False, self._left == 0, {}

    def _observe(self) -> np.ndarray:
        return self.np_random.uniform(-1, 1, 4).astype(np.float32)


class Chase(VectorEnv):
    """Points that walk to a target on a plane, a hundred of them in one call unless asked for others."""

    metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}  # noqa: RUF012

    def __init__(self, num_envs: int = 100) -> None:
        self.num_envs = num_envs
        self.single_observation_space = gymnasium.spaces.Box(-2, 2, (4,), np.float32)
        self.single_action_space = gymnasium.spaces.Discrete(4)
        self.observation_space = gymnasium.vector.utils.batch_space(self.single_observation_space, num_envs)
        self.action_space = gymnasium.vector.utils.batch_space(self.single_action_space, num_envs)
        self._moves = np.array([[0.1, 0], [-0.1, 0], [0, 0.1], [0, -0.1]], np.float32)

    def reset(self, *, seed: Any = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=int(np.sum(seed)) if np.ndim(seed) else seed)
        self._left = np.full(self.num_envs, EPISODE)
        self._state = self._begin(self.num_envs)
        return self._state.copy(), {}

    def step(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, dict]:
        self._state[:, :2] = np.clip(self._state[:, :2] + self._moves[actions], -2, 2)
        self._left -= 1
        distance = np.abs(self._state[:, :2] - self._state[:, 2:]).sum(1)
        terminated = distance < 0.15
        truncated = ~terminated & (self._left == 0)
        ended, infos = terminated | truncated, {}
        if ended.any():
            infos = {"final_obs": self._state.copy(), "_final_obs": ended}
            self._state[ended] = self._begin(np.count_nonzero(ended))
            self._left[ended] = EPISODE
        return self._state.copy(), -distance.astype(np.float32), terminated, truncated, infos

    def _begin(self, count: int) -> np.ndarray:
        return self.np_random.uniform(-1, 1, (count, 4)).astype(np.float32)


gymnasium.register("Computing-v0", entry_point=Slow, kwargs={"waits": False})
gymnasium.register("Waiting-v0", entry_point=Slow, kwargs={"waits": True})
