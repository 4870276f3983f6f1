"""Environments whose trajectories are known in advance."""

from __future__ import annotations

import os

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv


class Counting(gym.Env):
    """Counts its own steps; ends by its seed's schedule, now by termination, now by truncation, whatever the actions.

    Observations are [episode, step, length]; the reward of a step is 100 x episode + step.
    """

    observation_space = spaces.Box(0, 1e6, (3,), np.float32)
    action_space = spaces.Discrete(3)

    def __init__(self, longest: int = 9):
        self.longest, self.episode, self.count, self.length = longest, -1, 0, 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.episode += 1
        self.count = 0
        self.length = int(self.np_random.integers(1, self.longest + 1))
        self.truncates = bool(self.np_random.integers(2))
        return self._observation(), {}

    def step(self, action):
        self.count += 1
        ended = self.count == self.length
        return (
            self._observation(),
            100.0 * self.episode + self.count,
            ended and not self.truncates,
            ended and self.truncates,
            {"last": self.count},
        )

    def _observation(self):
        return np.array([self.episode, self.count, self.length], np.float32)


class Drawn(Counting):
    """Is drawn by what MUJOCO_GL said when the first one was made, as DeepMind Control is when it is imported."""

    metadata = {"render_modes": ["rgb_array"]}  # noqa: RUF012
    drawn_by: str | None = None

    def __init__(self, render_mode=None):
        super().__init__()
        self.render_mode = render_mode
        Drawn.drawn_by = Drawn.drawn_by or os.environ.get("MUJOCO_GL", "a window")

    def render(self):
        assert self.drawn_by == "egl"
        return np.zeros((8, 8, 3), np.uint8)


class Careless(Counting):
    """Changes what is not its own, as simulators do: the working directory, NumPy's errors and torch's gradients.

    Args:
        folder: Where it goes.
        at: The step at which it does; 0: when it is made.
    """

    def __init__(self, folder: str, at: int = 0):
        super().__init__()
        self.folder, self.at, self.steps = folder, at, 0
        self._change()

    def step(self, action):
        self.steps += 1
        self._change()
        return super().step(action)

    def _change(self) -> None:
        if self.steps == self.at:
            os.chdir(self.folder)
            np.seterr(all="raise")
            torch.set_grad_enabled(False)


class Lives(gym.Env):
    """Pays 1 a step. A game has three lives of two, three and four steps, each of which ends an episode."""

    observation_space = spaces.Box(0, 1e6, (1,), np.float32)
    action_space = spaces.Discrete(3)

    def __init__(self):
        self.life, self.count, self.games = 0, 0, 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.count = 0
        return self._observation(), {}

    def step(self, action):
        self.count += 1
        ended = self.count == 2 + self.life
        self.life = (self.life + ended) % 3
        over = ended and self.life == 0
        self.games += over
        return self._observation(), 1.0, ended, False, {"goes_on": ended and not over, "games": self.games}

    def _observation(self):
        return np.array([self.count], np.float32)


class Busy(gym.Env):
    """Everything that makes a learner's life hard: Dict observations with an image, a mask that changes, a mixed action
    space, and ends of both kinds in the middle of segments."""

    observation_space = spaces.Dict({
        "image": spaces.Box(0, 255, (3, 12, 12), np.uint8),
        "inner": spaces.Tuple((spaces.Box(-np.inf, np.inf, (4,)), spaces.Discrete(5, start=2))),
        "action_mask": spaces.MultiBinary(5),
    })  # fmt: skip
    action_space = spaces.Dict({"move": spaces.MultiDiscrete([3, 2]), "turn": spaces.Box(-2, 2, (2,))})

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.left = int(self.np_random.integers(2, 12))
        return self._observation(), {}

    def step(self, action):
        assert self.allowed[action["move"][0]]
        assert self.allowed[3 + action["move"][1]]
        self.left -= 1
        ended, truncates = self.left <= 0, bool(self.np_random.integers(2))
        return self._observation(), float(self.np_random.normal()), ended and not truncates, ended and truncates, {}

    def _observation(self):
        self.allowed = self.np_random.integers(0, 2, 5).astype(np.int8)
        self.allowed[self.np_random.integers(0, 3)] = 1
        self.allowed[3 + self.np_random.integers(0, 2)] = 1
        inner = (self.np_random.normal(3, 2, 4).astype(np.float32), int(self.np_random.integers(2, 7)))
        return {
            "image": self.np_random.integers(0, 256, (3, 12, 12)).astype(np.uint8),
            "inner": inner,
            "action_mask": self.allowed,
        }


def vector_of(make, mode: AutoresetMode):
    """A factory of Gymnasium vector environments in an autoreset mode, as a user would pass it."""

    def factory(num_envs: int):
        return SyncVectorEnv([make] * num_envs, autoreset_mode=mode)

    return factory


MODES = list(AutoresetMode)


class Pixels(gym.Env):
    """Shows random pictures."""

    observation_space = spaces.Box(0, 255, (4, 84, 84), np.uint8)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.observation_space.sample(), {}

    def step(self, action):
        return self.observation_space.sample(), 0.0, False, False, {}
