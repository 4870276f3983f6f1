"""Environments that misbehave as those of users do."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode

from sfactory.envs import env_seed


class Panic(BaseException):
    """No Exception, as what a panic in Rust becomes in Python."""


class Faulty(gym.Env):
    """Does well until its step `after`; then environment number `bad` of a run with seed 0 misbehaves.

    Args:
        fault: none, reset, step, nan, shape, exit, panic, interrupt or hang.
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
        if self._due("panic"):
            raise Panic("index out of bounds")
        if self._due("interrupt"):
            raise KeyboardInterrupt
        if self._due("hang"):
            time.sleep(1000)
        obs = (
            np.full((3,), np.nan, np.float32)
            if self._due("nan")
            else np.zeros((4,) if self._due("shape") else (3,), np.float32)
        )
        return obs, 1.0, self.count % 10 == 0, False, {}

    def _due(self, fault: str) -> bool:
        return self.fault == fault and self.is_bad and self.count >= self.after


class WithProgram(Faulty):
    """Runs a program of its own beside it, as simulators do, which does not end by itself.

    Args:
        own_session: Whether the program is in a session of its own.
        hold: File; once it is there, a step hangs in C code that keeps the interpreter to itself.
    """

    def __init__(self, own_session=False, hold="", **kwargs):
        super().__init__(**kwargs)
        self.program, self.hold = subprocess.Popen(["sleep", "1000"], start_new_session=own_session), hold

    def step(self, action):
        if self.hold and os.path.exists(self.hold):
            ctypes.PyDLL(None).sleep(1000)
        time.sleep(0.0005)
        return super().step(action)

    def close(self):
        self.program.kill()
        self.program.wait()


class Flaky(gym.Env):
    """Fails now and then, by its seed, and writes down each time.

    Observations are [seed modulo 1000, steps of its life, steps of the episode, 1]; the reward of every step is 1.
    Episodes last 7 steps, every other one is truncated.

    Args:
        ways: How it may fail, of step, reset, nan, inf, reward, shape, result and exit.
        p: Probability at each step, and at each reset but the first of its life.
        log: A file that gets one byte for each fault.
        broken: A file from whose existence on it fails at every call.
    """

    observation_space = spaces.Box(-np.inf, np.inf, (4,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, ways: str = "step", p: float = 0.001, log: str = "", broken: str = ""):
        self.ways, self.p, self.log, self.broken = ways.split(), p, log, broken
        self.life = self.episodes = self.number = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if seed is not None:
            self.number, self.life = seed % 1000, 0
        elif self._fails("reset"):
            raise RuntimeError("the simulator has lost its licence")
        if "reset" in self.ways and self._is_broken():
            raise RuntimeError("the simulator has lost its licence for good")
        self.count = 0
        self.episodes += 1
        return self._see(), {}

    def step(self, action):
        self.count += 1
        self.life += 1
        ended, terminates = self.count == 7, self.episodes % 2 == 0
        unseen = ("reset", "nan", "inf", "shape") if ended and terminates else ("reset",)
        fault = next((way for way in self.ways if way not in unseen and self._fails(way)), None)
        if fault == "step":
            raise RuntimeError("the simulator has lost its licence")
        if fault == "exit":
            sys.exit(3)
        if fault == "result":
            return self._see(), 1.0, False
        obs = np.zeros(5, np.float32) if fault == "shape" else self._see()
        if fault in ("nan", "inf"):
            obs[1] = float(fault)
        return obs, np.nan if fault == "reward" else 1.0, ended and terminates, ended and not terminates, {}

    def _see(self):
        return np.array([self.number, self.life, self.count, 1], np.float32)

    def _is_broken(self) -> bool:
        return bool(self.broken) and os.path.exists(self.broken)

    def _fails(self, way: str) -> bool:
        if way not in self.ways or not (self.np_random.random() < self.p or (way != "reset" and self._is_broken())):
            return False
        if self.log:
            with Path(self.log).open("ab") as file:
                file.write(b"x")
        return True


class FlakyVector(gym.vector.VectorEnv):
    """A vector of :class:`Flaky`, whose faults it passes on. Resets in the step after an end."""

    metadata: ClassVar[dict[str, Any]] = {"autoreset_mode": AutoresetMode.NEXT_STEP}

    def __init__(self, num_envs: int = 1, **kwargs):
        self.num_envs = num_envs
        self.single_observation_space, self.single_action_space = Flaky.observation_space, Flaky.action_space
        self.envs = [Flaky(**kwargs) for _ in range(num_envs)]
        self.over = np.zeros(num_envs, bool)

    def reset(self, *, seed=None, options=None):
        self.over[:] = False
        seeds = seed if isinstance(seed, list) else [seed] * self.num_envs
        return np.stack([env.reset(seed=one)[0] for env, one in zip(self.envs, seeds, strict=True)]), {}

    def step(self, actions):
        began = [
            (env.reset()[0], 0.0, False, False) if over else None
            for env, over in zip(self.envs, self.over, strict=True)
        ]
        results = [first or env.step(0)[:4] for env, first in zip(self.envs, began, strict=True)]
        observations, rewards, terminated, truncated = (np.array(column) for column in zip(*results, strict=True))
        self.over = terminated | truncated
        return observations, rewards, terminated, truncated, {}
