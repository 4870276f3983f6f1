"""Gymnasium's MuJoCo environments (Ant-v5, HalfCheetah-v5, ...) with env_backend auto.

All environments of a group share one simulation, which is put into each one's state in turn: it stays in the
processor's caches, where as many simulations as environments would not, and there is only one to load. What they
observe and earn is computed for all of them at once (:mod:`sfactory.envs.families.mujoco_tasks`). On two cores
HalfCheetah trains twice as fast as with single environments.

Gymnasium's own environment holds the simulation, takes all its arguments and begins the episodes; each row plays as it
would there.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from sfactory.envs.factory import find_spec, make_environment
from sfactory.envs.families import vector
from sfactory.envs.families.mujoco_tasks import TASKS, Scene
from sfactory.envs.families.vector import VectorGroup
from sfactory.envs.interface import EnvRequest, EnvSpec
from sfactory.errors import ConfigError, EnvironmentFault


def handles(request: EnvRequest) -> bool:
    """Ids of these environments; a video needs environments that draw one by one."""
    if (
        not isinstance(request.env, str)
        or request.backend != "auto"
        or request.render_mode is not None
        or "render_mode" in request.kwargs
    ):
        return False
    spec = find_spec(request.env)
    return spec.entry_point in TASKS and not spec.additional_wrappers


def probe(request: EnvRequest) -> EnvSpec:
    """Make one environment, read its spec, and close it.

    Raises:
        ConfigError: If mujoco is missing or `env_kwargs` do not fit.
    """
    env = _make(request, 1)
    try:
        return dataclasses.replace(vector.read_spec(env, request), family="mujoco")
    except EnvironmentFault as fault:
        raise ConfigError(str(fault)) from fault
    finally:
        env.close()


def make_group(request: EnvRequest, spec: EnvSpec, count: int, first_index: int, seed: int) -> VectorGroup:
    """A group of `count` environments. Raises as `probe` does."""
    return VectorGroup([_make(request, count)], lambda seeds: _make(request, count), request, spec, first_index, seed)


def _make(request: EnvRequest, count: int) -> SharedSimulation:
    return SharedSimulation(make_environment(request, 1), count)


class SharedSimulation(VectorEnv):
    """Environments that share one simulation. Each begins its next episode in the step that ends the one before
    (SAME_STEP).

    Args:
        env: One of those that `TASKS` knows, as ``gymnasium.make`` gives it.
        num_envs: How many share it.
    """

    def __init__(self, env: gymnasium.Env, num_envs: int) -> None:
        import mujoco

        self.num_envs = num_envs
        self.metadata = {**env.metadata, "autoreset_mode": AutoresetMode.SAME_STEP}
        self.single_observation_space, self.single_action_space = env.observation_space, env.action_space
        self.observation_space = batch_space(env.observation_space, num_envs)
        self.action_space = batch_space(env.action_space, num_envs)
        self._mujoco = mujoco
        self._env = env.unwrapped
        self._limit = env.spec.max_episode_steps or np.inf
        self._ages = np.zeros(num_envs, np.int64)
        self._randoms: list[np.random.Generator] = []
        model, data, parts = self._env.model, self._env.data, mujoco.mjtState
        self._parts = parts.mjSTATE_FULLPHYSICS.value | parts.mjSTATE_WARMSTART.value
        self._states = np.zeros((num_envs, mujoco.mj_stateSize(model, self._parts)))
        begin = mujoco.mj_stateSize(model, parts.mjSTATE_TIME.value)
        qpos, qvel = np.split(self._states[:, begin : begin + model.nq + model.nv], [model.nq], axis=1)
        task = TASKS[env.spec.entry_point]
        needed = {name: np.zeros((num_envs, *getattr(data, name).shape)) for name in task.needs}
        self._needed = [(getattr(data, name), array) for name, array in needed.items()]
        self._forces_needed = "cfrc_ext" in needed
        arguments = inspect.signature(type(self._env)).bind(**env.spec.kwargs)
        arguments.apply_defaults()
        self._task = task(self._env, Scene(qpos, qvel, **needed), **arguments.arguments)

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict[str, Any]]:
        """Begin all first episodes. A list has a seed for each environment; one number is the first one's, the others
        follow from it."""
        seeds = (
            seed
            if isinstance(seed, Sequence)
            else [None if seed is None else seed + row for row in range(self.num_envs)]
        )
        self._randoms = [np.random.default_rng() for _ in range(self.num_envs)]
        for row, own in enumerate(seeds):
            self._begin(row, own)
        return self._task.observations(), {}

    def step(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        before = self._task.places()
        self._simulate(actions)
        self._ages += 1
        reward, terminated, quantities = self._task.judge(before, actions)
        truncated = self._ages >= self._limit
        observations = self._task.observations()
        ended = np.flatnonzero(terminated | truncated)
        if not len(ended):
            return observations, reward, terminated, truncated, {}
        for row in ended.tolist():
            self._begin(row)
        return (
            self._task.observations(),
            reward,
            terminated,
            truncated,
            {"final_obs": observations, "final_info": quantities},
        )

    def close_extras(self, **kwargs: Any) -> None:
        self._env.close()

    def _simulate(self, actions: np.ndarray) -> None:
        put, get, step, parts = self._mujoco.mj_setState, self._mujoco.mj_getState, self._mujoco.mj_step, self._parts
        model, data, substeps = self._env.model, self._env.data, self._env.frame_skip
        control = data.ctrl
        for row, (state, action) in enumerate(zip(self._states, actions, strict=True)):
            put(model, data, state, parts)
            control[:] = action
            step(model, data, nstep=substeps)
            get(model, data, state, parts)
            if self._forces_needed:
                self._mujoco.mj_rnePostConstraint(model, data)  # what a step leaves out: external forces
            self._keep_needed(row)

    def _keep_needed(self, row: int) -> None:
        """Copy what the task needs of the simulation besides its state."""
        for field, kept in self._needed:
            kept[row] = field

    def _begin(self, row: int, seed: int | None = None) -> None:
        """Begin an environment's next episode, its first one with a seed."""
        env = self._env
        env.np_random = self._randoms[row]
        env.reset(seed=seed)
        self._randoms[row] = env.np_random
        self._ages[row] = 0
        self._mujoco.mj_getState(env.model, env.data, self._states[row], self._parts)
        self._keep_needed(row)
