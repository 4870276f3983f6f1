"""Brax's simulations as an environment on the device: JAX steps them, and dlpack passes arrays as they are.

    pip install brax "jax[cuda12]"           # or "jax[cpu]"
    python examples/brax_env.py
    python -m sfactory.train --env examples.brax_env:Brax --env-kwargs '{name: ant}' --run runs/brax-ant

The first steps take seconds, in which JAX compiles them.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # JAX would take three quarters of a GPU's memory

import brax.envs
import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import torch
from gymnasium.vector import AutoresetMode
from torch import Tensor

from sfactory import Config, train


class Brax(gymnasium.vector.VectorEnv):
    """One of Brax's simulations.

    A row that has ended begins again in its first state, as with Brax's own wrapper; the last observations before are
    in ``info["final_obs"]``.

    Args:
        num_envs: Rows.
        device: Of all tensors. JAX computes on it, too.
        name: Of the simulation: inverted_pendulum, ant, humanoid, ...
        episode_length: Env steps after which an episode is truncated.
        backend: Of Brax: generalized, positional, spring or mjx.
    """

    def __init__(
        self,
        num_envs: int = 1,
        device: str = "cpu",
        name: str = "inverted_pendulum",
        episode_length: int = 1000,
        backend: str = "generalized",
    ) -> None:
        self.num_envs = num_envs
        self.metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}
        chosen = torch.device(device)
        self._device = jax.devices("cpu" if chosen.type == "cpu" else "gpu")[chosen.index or 0]
        made = brax.envs.create(name, episode_length, auto_reset=False, batch_size=num_envs, backend=backend)
        self.single_observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (made.observation_size,))
        self.single_action_space = gymnasium.spaces.Box(-1, 1, (made.action_size,))
        self.observation_space = gymnasium.vector.utils.batch_space(self.single_observation_space, num_envs)
        self.action_space = gymnasium.vector.utils.batch_space(self.single_action_space, num_envs)

        def step(state, first, actions):
            after = made.step(state, actions)
            ended = after.done.astype(bool)

            def begun(new, old):
                return jnp.where(ended.reshape(-1, *[1] * (old.ndim - 1)), new, old)

            info = after.info | {"steps": begun(jnp.zeros_like(after.info["steps"]), after.info["steps"])}
            simulated = jax.tree.map(begun, first.pipeline_state, after.pipeline_state)
            begins = after.replace(
                pipeline_state=simulated, obs=begun(first.obs, after.obs), done=jnp.zeros_like(after.done), info=info
            )
            truncated = after.info["truncation"].astype(bool)
            return begins, (begins.obs, after.reward, ended & ~truncated, ended & truncated, after.obs)

        self._reset, self._step = jax.jit(made.reset), jax.jit(step)
        self._key = jax.random.key(0)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Tensor, dict[str, Any]]:
        """Begin all episodes anew."""
        if seed is not None:
            self._key = jax.random.key(seed)
        self._key, drawn = jax.random.split(self._key)
        with jax.default_device(self._device):
            self._state = self._first = self._reset(drawn)
        return torch.from_dlpack(self._state.obs), {}

    def step(self, actions: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, dict[str, Any]]:
        """Step all rows with actions, float ``[num_envs, action_size]``."""
        taken = jnp.from_dlpack(actions.clone())  # JAX reads them later
        self._state, happened = self._step(self._state, self._first, taken)
        obs, reward, terminated, truncated, final = map(torch.from_dlpack, happened)
        return obs, reward, terminated, truncated, {"final_obs": final}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=400_000)
    steps = parser.parse_args().steps
    result = train(Config(env=Brax, envs_per_worker=256, rollout=32, batch_size=8192, steps=steps, run="runs/brax"))
    print(f"return {result.episode_return_mean}")
