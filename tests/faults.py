"""Environments that misbehave as those of users do."""

from __future__ import annotations

import subprocess
import sys
import time

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from sfactory.envs import env_seed


class Faulty(gym.Env):
    """Does well until its step `after`; then environment number `bad` of a run with seed 0 misbehaves.

    Args:
        fault: none, reset, step, nan, shape, exit or hang.
    """

    observation_space = spaces.Box(-1, 1, (3,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, fault: str = "none", after: int = 100, bad: int = 5):
        self.fault, self.after, self.seed, self.count, self.is_bad = fault, after, env_seed(0, bad), 0, False

    def reset(self, *, seed=None, options=None):
        if seed is not None:
            self.is_bad = seed == self.seed
        if self._due("reset"):
            raise RuntimeError("the simulator has lost its licence")
        return np.zeros(3, np.float32), {}

    def step(self, action):
        self.count += 1
        if self._due("step"):
            raise RuntimeError("the simulator has lost its licence")
        if self._due("exit"):
            sys.exit(3)
        if self._due("hang"):
            time.sleep(1000)
        obs = np.full((3,), np.nan, np.float32) if self._due("nan") else np.zeros((4,) if self._due("shape") else (3,), np.float32)
        return obs, 1.0, self.count % 10 == 0, False, {}

    def _due(self, fault: str) -> bool:
        return self.fault == fault and self.is_bad and self.count >= self.after


class WithProgram(Faulty):
    """Runs a program of its own beside it, as simulators do, which does not end by itself."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.program = subprocess.Popen(["sleep", "1000"])

    def step(self, action):
        time.sleep(0.0005)
        return super().step(action)

    def close(self):
        self.program.kill()
        self.program.wait()
