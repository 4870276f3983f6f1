"""``sfactory/TensorCartPole``: Gymnasium's CartPole-v1 as tensors."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.vector import AutoresetMode
from torch import Tensor

from sfactory.errors import ConfigError

_X_LIMIT, _ANGLE_LIMIT = 2.4, 12 * 2 * torch.pi / 360
_GRAVITY, _POLE_MASS, _TOTAL_MASS, _HALF_LENGTH, _FORCE, _SECONDS = 9.8, 0.1, 1.1, 0.5, 10.0, 0.02


class CartPole(gymnasium.vector.VectorEnv):
    """Balance poles on carts that are pushed left (0) or right (1). Reward 1 per env step.

    Observations are float32 ``[num_envs, 4]``: position (m), velocity (m/s), angle (rad), angular velocity (rad/s). An
    episode terminates beyond 2.4 m or 12 degrees; the next one begins in the same step, whose info has ``final_obs``.

    Args:
        num_envs: Rows.
        device: Of all tensors.
        max_episode_steps: Env steps after which an episode is truncated.

    Raises:
        ConfigError: If `max_episode_steps` is below 1.
    """

    def __init__(self, num_envs: int = 1, device: str = "cpu", max_episode_steps: int = 500) -> None:
        if max_episode_steps < 1:
            raise ConfigError(f"env_kwargs max_episode_steps is {max_episode_steps}; it must be at least 1")
        self.num_envs, self._most, self._device = num_envs, max_episode_steps, torch.device(device)
        self.metadata = {"autoreset_mode": AutoresetMode.SAME_STEP, "render_fps": 50}
        high = np.array([2 * _X_LIMIT, np.inf, 2 * _ANGLE_LIMIT, np.inf], np.float32)
        self.single_observation_space = gymnasium.spaces.Box(-high, high)
        self.single_action_space = gymnasium.spaces.Discrete(2)
        self.observation_space = gymnasium.vector.utils.batch_space(self.single_observation_space, num_envs)
        self.action_space = gymnasium.vector.utils.batch_space(self.single_action_space, num_envs)
        self._random = torch.Generator(self._device)
        self._state = torch.zeros(num_envs, 4, device=self._device)
        self._elapsed = torch.zeros(num_envs, dtype=torch.int32, device=self._device)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Tensor, dict[str, Any]]:
        """Begin all episodes anew."""
        if seed is not None:
            self._random.manual_seed(seed)
        self._state = self._first_states()
        self._elapsed.zero_()
        return self._state.clone(), {}

    def step(self, actions: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, dict[str, Any]]:
        """Push all carts.

        Args:
            actions: Integers ``[num_envs]``.
        """
        x, x_dot, angle, angle_dot = self._state.unbind(1)
        cos, sin = angle.cos(), angle.sin()
        force = _FORCE * (2.0 * actions - 1.0)
        push = (force + _POLE_MASS * _HALF_LENGTH * angle_dot.square() * sin) / _TOTAL_MASS
        turn = _HALF_LENGTH * (4.0 / 3.0 - _POLE_MASS * cos.square() / _TOTAL_MASS)
        angle_acc = (_GRAVITY * sin - cos * push) / turn
        x_acc = push - _POLE_MASS * _HALF_LENGTH * angle_acc * cos / _TOTAL_MASS
        change = torch.stack((x_dot, x_acc, angle_dot, angle_acc), 1)
        final = self._state + _SECONDS * change
        self._elapsed += 1
        terminated = (final[:, 0].abs() > _X_LIMIT) | (final[:, 2].abs() > _ANGLE_LIMIT)
        truncated = (self._elapsed >= self._most) & ~terminated
        ended = terminated | truncated
        self._state = torch.where(ended[:, None], self._first_states(), final)
        self._elapsed.masked_fill_(ended, 0)
        return self._state.clone(), torch.ones_like(x), terminated, truncated, {"final_obs": final}

    def _first_states(self) -> Tensor:
        return torch.empty_like(self._state).uniform_(-0.05, 0.05, generator=self._random)
