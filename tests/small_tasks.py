"""Small tasks, each of which asks for something else of a trainer; after bsuite, PufferLib's Ocean and
Stable-Baselines3's tests."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from pettingzoo import ParallelEnv


class Bandit(gym.Env):
    """Ten arms; one pays 1 and the others pay 0, with noise. An episode is one pull."""

    observation_space = spaces.Box(0, 1, (1,))
    action_space = spaces.Discrete(10)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.ones(1, np.float32), {}

    def step(self, action):
        return np.ones(1, np.float32), float(action == 7) + self.np_random.normal(0, 0.1), True, False, {}


class Password(gym.Env):
    """Five letters of an alphabet of two, of which the agent sees those that it has typed. Pays 1 if all are right,
    else nothing."""

    letters = (0, 1, 1, 0, 1)
    observation_space = spaces.Box(-1, 1, (5,))
    action_space = spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.typed = []
        return self._observation(), {}

    def step(self, action):
        self.typed.append(int(action))
        ended = len(self.typed) == len(self.letters)
        return self._observation(), float(tuple(self.typed) == self.letters), ended, False, {}

    def _observation(self):
        seen = np.zeros(5, np.float32)
        seen[: len(self.typed)] = 2 * np.array(self.typed) - 1
        return seen


class Memory(gym.Env):
    """A bit is shown once; the action of the last step, `delay` steps later, must repeat it. Pays 1 or -1."""

    observation_space = spaces.Box(-1, 1, (2,))
    action_space = spaces.Discrete(2)

    def __init__(self, delay=5):
        self.delay = delay

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.bit, self.count = int(self.np_random.integers(2)), 0
        return np.array([2 * self.bit - 1, 0], np.float32), {}

    def step(self, action):
        self.count += 1
        if self.count > self.delay:
            return np.zeros(2, np.float32), 1.0 if action == self.bit else -1.0, True, False, {}
        return np.array([0, self.count == self.delay], np.float32), 0.0, False, False, {}


class Catch(gym.Env):
    """A ball falls down a board of 10 x 5 cells and must be met by a paddle that moves along the last row. Pays 1 or -1
    (bsuite)."""

    rows, columns = 10, 5
    observation_space = spaces.Box(0, 1, (rows, columns))
    action_space = spaces.Discrete(3)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.row, self.ball, self.paddle = 0, int(self.np_random.integers(self.columns)), self.columns // 2
        return self._observation(), {}

    def step(self, action):
        self.paddle = int(np.clip(self.paddle + action - 1, 0, self.columns - 1))
        self.row += 1
        ended = self.row == self.rows - 1
        return self._observation(), (1.0 if self.ball == self.paddle else -1.0) if ended else 0.0, ended, False, {}

    def _observation(self):
        board = np.zeros((self.rows, self.columns), np.float32)
        board[self.row, self.ball] = board[-1, self.paddle] = 1
        return board


class Identity(gym.Env):
    """The action must be what is observed, which pays 1; for a hundred steps (Stable-Baselines3)."""

    def __init__(self, space):
        self.observation_space = self.action_space = space

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if seed is not None:
            self.observation_space.seed(seed)
        self.count, self.wanted = 0, self.observation_space.sample()
        return self.wanted, {}

    def step(self, action):
        reward = float(np.all(action == self.wanted))
        self.count, self.wanted = self.count + 1, self.observation_space.sample()
        return self.wanted, reward, False, self.count == 100, {}


class UmbrellaChain(gym.Env):
    """Only the first of ten actions matters, take an umbrella or not; the last step pays 1 or -1 for it, and all others
    pay 1 or -1 at random. Twenty bits of the observation mean nothing (bsuite)."""

    length, distractors = 10, 20
    observation_space = spaces.Box(0, 1, (3 + distractors,))
    action_space = spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.count, (self.needed, self.taken) = 0, self.np_random.integers(0, 2, 2)
        return self._observation(), {}

    def step(self, action):
        self.count += 1
        if self.count == 1:
            self.taken = action
        right = bool(self.taken == self.needed)
        if self.count == self.length:
            return self._observation(), 2.0 * right - 1.0, True, False, {"right": right}
        return self._observation(), 2.0 * self.np_random.integers(2) - 1.0, False, False, {}

    def _observation(self):
        bits = self.np_random.integers(0, 2, self.distractors)
        return np.array([self.needed, self.taken, 1 - self.count / self.length, *bits], np.float32)


class Picked(gym.Env):
    """A vector and a category, which says of which entry of the vector the sign is asked. Twenty questions pay 1
    each."""

    observation_space = spaces.Dict(vector=spaces.Box(-1, 1, (4,)), entry=spaces.Discrete(4))
    action_space = spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.count = 0
        return self._ask(), {}

    def step(self, action):
        reward = float(action == (self.vector[self.entry] > 0))
        self.count += 1
        return self._ask(), reward, False, self.count == 20, {}

    def _ask(self):
        self.vector, self.entry = self.np_random.uniform(-1, 1, 4).astype(np.float32), int(self.np_random.integers(4))
        return {"vector": self.vector, "entry": self.entry}


class Both(gym.Env):
    """A Tuple of a vector and a category is answered by a Tuple of which of the vector's halves is larger and the
    category; each answer pays a half, twenty times."""

    observation_space = spaces.Tuple((spaces.Box(-1, 1, (4,)), spaces.Discrete(5)))
    action_space = spaces.Tuple((spaces.Discrete(2), spaces.Discrete(5)))

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.count = 0
        return self._ask(), {}

    def step(self, action):
        vector, category = self.asked
        reward = 0.5 * (action[0] == (vector[2:].sum() > vector[:2].sum())) + 0.5 * (action[1] == category)
        self.count += 1
        return self._ask(), float(reward), False, self.count == 20, {}

    def _ask(self):
        self.asked = self.np_random.uniform(-1, 1, 4).astype(np.float32), int(self.np_random.integers(5))
        return self.asked


class Target(gym.Env):
    """The action must be the observed point of a square; twenty steps cost their squared distance each."""

    observation_space = action_space = spaces.Box(-1, 1, (2,))

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.count = 0
        return self._aim(), {}

    def step(self, action):
        cost = float(np.square(action - self.target).sum())
        self.count += 1
        return self._aim(), -cost, False, self.count == 20, {}

    def _aim(self):
        self.target = self.np_random.uniform(-1, 1, 2).astype(np.float32)
        return self.target


class Crowd(ParallelEnv):
    """Each of three agents must answer its own observation, which pays it 1; for twenty steps."""

    def __init__(self):
        self.possible_agents = ["a", "b", "c"]
        self.random = np.random.default_rng()

    def observation_space(self, agent):
        return spaces.Discrete(4)

    def action_space(self, agent):
        return spaces.Discrete(4)

    def reset(self, seed=None, options=None):
        if seed is not None:
            self.random = np.random.default_rng(seed)
        self.agents, self.count = list(self.possible_agents), 0
        return self._ask(), {agent: {} for agent in self.agents}

    def step(self, actions):
        rewards = {agent: float(actions[agent] == self.asked[agent]) for agent in self.agents}
        self.count += 1
        ended = self.count == 20
        observations, infos = self._ask(), {agent: {} for agent in self.agents}
        terminations, truncations = dict.fromkeys(self.agents, False), dict.fromkeys(self.agents, ended)
        if ended:
            self.agents = []
        return observations, rewards, terminations, truncations, infos

    def _ask(self):
        self.asked = dict(zip(self.agents, self.random.integers(0, 4, len(self.agents)).tolist(), strict=True))
        return self.asked
