"""``sfactory/Pendulum``: swing up a pendulum with too weak a motor, as in Gymnasium's Pendulum-v1."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import gymnasium
import numpy as np
from numba import njit

from sfactory.envs.interface import Outcome, StepBuffers
from sfactory.envs.native.base import RESTING, NativeGroup, uniform
from sfactory.envs.native.drawing import canvas, draw_segment

_MAX_SPEED = 8.0
_MAX_TORQUE = 2.0
_SECONDS_PER_STEP = 0.05
_GRAVITY = 10.0


class Pendulum(NativeGroup):
    """Apply a torque in [-2, 2] N m to a pendulum of 1 kg and 1 m that begins anywhere.

    Observations are float32 ``[3]``: cosine and sine of the angle (0 is upright), angular velocity (rad/s). The reward
    is ``-(angle^2 + 0.1 velocity^2 + 0.001 torque^2)`` with the angle in [-pi, pi). Episodes only end by truncation.
    """

    render_fps = 20.0

    def __init__(
        self, seeds: Sequence[int], squash: Literal["clip", "tanh"] = "clip", max_episode_steps: int = 200
    ) -> None:
        super().__init__(seeds, squash, max_episode_steps)
        high = np.array([1.0, 1.0, _MAX_SPEED], np.float32)
        self.observation_space = gymnasium.spaces.Box(-high, high)
        self.action_space = gymnasium.spaces.Box(-_MAX_TORQUE, _MAX_TORQUE, (1,))
        self._state = np.zeros((self.rows, 2))

    def step(self, categorical: np.ndarray, continuous: np.ndarray, outcome: Outcome, after: StepBuffers) -> None:
        state = (self._state, self._elapsed, self._random)
        is_tanh = self._squash == "tanh"
        _step(*state, self._max_steps, is_tanh, continuous, *outcome, after.obs[0], after.first, after.active)

    def render(self) -> list[np.ndarray]:
        return [_draw(theta) for theta in self._state[:, 0]]


@njit(cache=True, nogil=True)
def _step(state, elapsed, random, max_steps, is_tanh, actions, reward, terminated, truncated, obs, first, active):
    for row in range(len(state)):
        fresh = elapsed[row] == RESTING
        if fresh:
            state[row, 0] = math.pi * (2.0 * uniform(random, row) - 1.0)
            state[row, 1] = 2.0 * uniform(random, row) - 1.0
            elapsed[row] = 0
            reward[row] = 0.0
        else:
            theta, speed = state[row, 0], state[row, 1]
            action = np.float64(actions[row, 0])
            torque = _MAX_TORQUE * (math.tanh(action) if is_tanh else min(max(action, -1.0), 1.0))
            angle = (theta + math.pi) % (2.0 * math.pi) - math.pi
            reward[row] = -(angle * angle + 0.1 * speed * speed + 0.001 * torque * torque)
            speed += (1.5 * _GRAVITY * math.sin(theta) + 3.0 * torque) * _SECONDS_PER_STEP
            speed = min(max(speed, -_MAX_SPEED), _MAX_SPEED)
            state[row, 0] = theta + speed * _SECONDS_PER_STEP
            state[row, 1] = speed
            elapsed[row] += 1
        timed_out = not fresh and elapsed[row] >= max_steps
        terminated[row] = False
        truncated[row] = timed_out
        first[row] = fresh
        active[row] = not timed_out
        if timed_out:
            elapsed[row] = RESTING
        obs[row, 0] = math.cos(state[row, 0])
        obs[row, 1] = math.sin(state[row, 0])
        obs[row, 2] = state[row, 1]


def _draw(theta: float) -> np.ndarray:
    """An RGB picture uint8 ``[200, 200, 3]`` of the pendulum, upright at angle 0."""
    image = canvas(200, 200)
    draw_segment(image, (100, 100), (100 - 80 * math.cos(theta), 100 - 80 * math.sin(theta)), 7, (204, 77, 77))
    draw_segment(image, (100, 100), (100, 100), 3, (0, 0, 0))
    return image
