"""Gymnasium's MuJoCo environments (Ant-v5, HalfCheetah-v5, ...) with env_backend auto.

All environments of a group share one simulation, which is put into each one's state in turn: it stays in the
processor's caches, where as many simulations as environments would not, and there is only one to load. What they
observe and earn is computed for all of them at once (:mod:`sfactory.envs.families.mujoco_tasks`). On two cores
HalfCheetah trains twice as fast as with single environments.
"""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np

from sfactory.envs.families.mujoco_tasks import TASKS, Scene
from sfactory.envs.families.shared_env import SharedEnv


class SharedSimulation(SharedEnv):
    """Environments that share one simulation.

    Args:
        env: One of those that `TASKS` knows, as ``gymnasium.make`` gives it.
        num_envs: How many share it.
    """

    family = "mujoco"
    entry_points = TASKS

    def __init__(self, env: Any, num_envs: int) -> None:
        import mujoco

        super().__init__(env, num_envs)
        self._mujoco = mujoco
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

    def _keep(self, row: int) -> None:
        self._mujoco.mj_getState(self._env.model, self._env.data, self._states[row], self._parts)
        self._keep_needed(row)

    def _play(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]:
        before = self._task.places()
        self._simulate(actions)
        return self._task.judge(before, actions)

    def _observations(self) -> np.ndarray:
        return self._task.observations()

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
