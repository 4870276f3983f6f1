"""Environments that are each broken in one way, for the checks that must find it."""

from __future__ import annotations

import mmap
import os
import threading
import time

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv
from gymnasium.vector.utils import batch_space
from pettingzoo import ParallelEnv


class Sound(gym.Env):
    """Nothing is wrong with it: a walk on a line, whose end to the right pays."""

    observation_space = spaces.Box(-5, 5, (2,), np.float32)
    action_space = spaces.Discrete(2)
    longest = 30

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place, self.count = float(self.np_random.uniform(-1, 1)), 0
        return self._observation(), {}

    def step(self, action):
        self.place = float(np.clip(self.place + (0.5 if action else -0.5) + self.np_random.normal(0, 0.1), -5, 5))
        self.count += 1
        return self._observation(), self._reward(), self._terminated(), self.count >= self.longest, {}

    def _observation(self):
        return np.array([self.place, self.count / self.longest], np.float32)

    def _reward(self):
        return self.place

    def _terminated(self):
        return abs(self.place) >= 4


class Masked(Sound):
    """Allows one of its actions, and refuses the other."""

    def reset(self, *, seed=None, options=None):
        observation, _ = super().reset(seed=seed)
        return observation, self._masks()

    def step(self, action):
        assert action == self.allowed, "a masked action"
        observation, *rest, _ = super().step(action)
        return (observation, *rest, self._masks())

    def _masks(self):
        self.allowed = int(self.np_random.integers(2))
        return {"action_mask": np.arange(2) == self.allowed}


class WrongShape(Sound):
    def step(self, action):
        observation, *rest = super().step(action)
        return (observation[:1] if self.count > 3 else observation, *rest)


class WrongDtype(Sound):
    def _observation(self):
        return super()._observation().astype(np.float64)


class OutOfBounds(Sound):
    def _observation(self):
        return super()._observation() * (10 if self.count == 5 else 1)


class NotFinite(Sound):
    def _reward(self):
        return np.nan if self.count == 5 else 1.0


class NoReset(Sound):
    """Its end is an attribute that reset() forgets."""

    over = False

    def _terminated(self):
        self.over = self.over or self.count >= 7
        return self.over


class Raises(Sound):
    def step(self, action):
        if self.count == 5:
            raise KeyError("mistake in my environment")
        return super().step(action)


class FourValues(Sound):
    def step(self, action):
        return super().step(action)[:4]


class GlobalRandomness(Sound):
    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place = float(np.random.uniform(-1, 1))
        return self._observation(), {}


class SeedForgotten(Sound):
    """Goes on with its own generator, whatever the seed."""

    def __init__(self):
        self.generator = np.random.default_rng(0)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place = float(self.generator.uniform(-1, 1))
        return self._observation(), {}


class Unseeded(Sound):
    def reset(self, *, seed=None, options=None):
        return super().reset(seed=0)

    def step(self, action):
        self.place, self.count = self.place + 0.1, self.count + 1
        return self._observation(), 1.0 * self.count, False, self.count >= self.longest, {}


class Endless(Sound):
    longest = 10**9

    def _terminated(self):
        return False


class Leaks(Sound):
    """Keeps a page for each step: memory of its own, since memory that this process has freed before would not grow."""

    kept: list[mmap.mmap]

    def step(self, action):
        self.kept = [*getattr(self, "kept", [])] if self.count == 0 else self.kept
        self.kept.append(mmap.mmap(-1, mmap.PAGESIZE))
        self.kept[-1][0] = 1
        return super().step(action)


class Sparse(Sound):
    def _reward(self):
        return 0.0


class Prints(Sound):
    def step(self, action):
        print("stepping", action)
        return super().step(action)


class Slow(Sound):
    """Waits for something else than the processor."""

    def step(self, action):
        time.sleep(0.02)
        return super().step(action)


class VerySlow(Sound):
    def step(self, action):
        time.sleep(2)
        return super().step(action)


class HangsInConstructor(Sound):
    def __init__(self):
        time.sleep(1000)


class HangsInStep(Sound):
    def step(self, action):
        time.sleep(1000)


class RaisesInConstructor(Sound):
    def __init__(self):
        raise RuntimeError("no simulator")


class PrintsInConstructor(Sound):
    def __init__(self):
        print("welcome to my simulator")

    def _reward(self):
        return 1e5 * self.place  # there is advice for such rewards, whatever the machine


class Exits(Sound):
    def step(self, action):
        print("the simulator has crashed")
        os._exit(7)


class TextActions(Sound):
    action_space = spaces.Text(5)


class Holder:
    """Makes environments, and holds what cannot be sent to another process."""

    def __init__(self):
        self.lock = threading.Lock()

    def __call__(self):
        return Sound()


holder = Holder()


class Pair(ParallelEnv):
    """Two agents on a line each, and nothing wrong."""

    metadata = {"name": "pair_v0"}  # noqa: RUF012
    possible_agents = ["left", "right"]  # noqa: RUF012
    render_mode = None
    single = Sound

    def observation_space(self, agent):
        return Sound.observation_space

    def action_space(self, agent):
        return Sound.action_space

    def reset(self, seed=None, options=None):
        self.agents = self.possible_agents[:]
        self.envs = getattr(self, "envs", None) or {agent: self.single() for agent in self.agents}
        seeds = {agent: None if seed is None else seed + i for i, agent in enumerate(self.agents)}
        results = {agent: env.reset(seed=seeds[agent]) for agent, env in self.envs.items()}
        return tuple({agent: result[i] for agent, result in results.items()} for i in range(2))

    def step(self, actions):
        results = {agent: self.envs[agent].step(action) for agent, action in actions.items()}
        self.agents = [agent for agent, result in results.items() if not (result[2] or result[3])]
        return tuple({agent: result[i] for agent, result in results.items()} for i in range(5))


class MaskedPair(Pair):
    single = Masked


class PairOfNewObservationSpaces(Pair):
    def observation_space(self, agent):
        return spaces.Box(-5, 5, (2,), np.float32)


class PairOfNewActionSpaces(Pair):
    def action_space(self, agent):
        return spaces.Discrete(2)


class MistakenPair(Pair):
    def step(self, actions):
        observations, *rest = super().step(actions)
        return ({agent: observation[:1] for agent, observation in observations.items()}, *rest)


class UnpaidPair(Pair):
    def step(self, actions):
        observations, rewards, *rest = super().step(actions)
        return observations, {f"agent_{agent}": reward for agent, reward in rewards.items()}, *rest


class PairOfAll(Pair):
    """Tells the end of all agents as RLlib's environments do, beside those of each."""

    def step(self, actions):
        observations, rewards, terminations, *rest = super().step(actions)
        return observations, rewards, terminations | {"__all__": not self.agents}, *rest


class PairWithoutLast(Pair):
    """Gives no observation of those that have ended."""

    def step(self, actions):
        observations, *rest = super().step(actions)
        return {agent: observations[agent] for agent in self.agents}, *rest


class PairThatEndsTogether(Pair):
    """Lists its agents also after the end."""

    def step(self, actions):
        observations, rewards, *_, infos = super().step(actions)
        ended = len(self.agents) < 2
        self.agents = self.possible_agents[:]
        return observations, rewards, dict.fromkeys(self.agents, ended), dict.fromkeys(self.agents, False), infos


class LateMask(Sound):
    def step(self, action):
        return (*super().step(action)[:4], {"action_mask": np.ones(2, bool)})


class MaskAtTimes(Sound):
    """Has a mask of everything, except for one of its steps."""

    odd: dict = {}  # noqa: RUF012

    def reset(self, *, seed=None, options=None):
        return super().reset(seed=seed)[0], {"action_mask": np.ones(2, bool)}

    def step(self, action):
        return (*super().step(action)[:4], self.odd if self.count == 3 else {"action_mask": np.ones(2, bool)})


class MaskOfNothing(MaskAtTimes):
    odd = {"action_mask": np.zeros(2, bool)}  # noqa: RUF012


class NoInfo(Sound):
    def step(self, action):
        return (*super().step(action)[:4], None)


class MaskedTensors(VectorEnv):
    """On the device, with nothing wrong: allows one action of each of two components, and refuses the others."""

    metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}  # noqa: RUF012

    def __init__(self, num_envs: int, named: bool):
        self.num_envs, self.named = num_envs, named
        kinds = (spaces.Discrete(2), spaces.Discrete(3))
        self.single_action_space = spaces.Dict(dict(zip("ab", kinds, strict=True))) if named else spaces.Tuple(kinds)
        self.single_observation_space = spaces.Box(-5, 5, (1,), np.float32)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self.observation_space = batch_space(self.single_observation_space, num_envs)

    def reset(self, *, seed=None, options=None):
        if seed is not None:
            self.random = torch.Generator().manual_seed(seed)
        self.count = torch.zeros(self.num_envs)
        return self._see(), self._masks()

    def step(self, actions):
        parts = [actions["a"], actions["b"]] if self.named else actions
        assert (parts[0] == 1).all() and (parts[1] == 2).all(), "a masked action"
        rests = self.count == 20
        self.count = torch.where(rests, 0, self.count + 1)
        ended = self.count == 20
        reward = (~rests) * torch.rand(self.num_envs, generator=self.random)
        return self._see(), reward, ended, torch.zeros_like(ended), self._masks()

    def _see(self):
        return torch.rand(self.num_envs, 1, generator=self.random)

    def _masks(self):
        masks = [torch.tensor([[False, True]]), torch.tensor([[False, False, True]])]
        masks = [mask.repeat(self.num_envs, 1) for mask in masks]
        return {"action_mask": dict(zip("ab", masks, strict=True)) if self.named else tuple(masks)}


def sound_vector(num_envs: int) -> VectorEnv:
    return SyncVectorEnv([Sound] * num_envs)


def lying_vector(num_envs: int) -> VectorEnv:
    """Resets itself in the same step, and says that it does so in the next one."""
    env = SyncVectorEnv([Sound] * num_envs, autoreset_mode=AutoresetMode.SAME_STEP)
    env.metadata = {**env.metadata, "autoreset_mode": AutoresetMode.NEXT_STEP}
    return env
