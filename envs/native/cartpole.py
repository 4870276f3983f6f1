"""``sfactory/CartPole``: the cart-pole of Barto, Sutton and Anderson (1983) as in Gymnasium's CartPole-v1."""

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

_X_LIMIT = 2.4
_THETA_LIMIT = 12 * 2 * math.pi / 360
_GRAVITY = 9.8
_POLE_MASS = 0.1
_TOTAL_MASS = 1.1
_HALF_LENGTH = 0.5
_FORCE = 10.0
_SECONDS_PER_STEP = 0.02


class CartPole(NativeGroup):
    """Balance a pole on a cart that is pushed left (0) or right (1). Reward 1 per env step.

    Observations are float32 ``[4]``: position (m), velocity (m/s), angle (rad), angular velocity (rad/s). An episode
    terminates beyond 2.4 m or 12 degrees.
    """

    render_fps = 50.0

    def __init__(
        self, seeds: Sequence[int], squash: Literal["clip", "tanh"] = "clip", max_episode_steps: int = 500
    ) -> None:
        super().__init__(seeds, squash, max_episode_steps)
        high = np.array([2 * _X_LIMIT, np.inf, 2 * _THETA_LIMIT, np.inf], np.float32)
        self.observation_space = gymnasium.spaces.Box(-high, high)
        self.action_space = gymnasium.spaces.Discrete(2)
        self._state = np.zeros((self.rows, 4))

    def step(self, categorical: np.ndarray, continuous: np.ndarray, outcome: Outcome, after: StepBuffers) -> None:
        state = (self._state, self._elapsed, self._random)
        _step(*state, self._max_steps, categorical, *outcome, after.obs[0], after.first, after.active)

    def render(self) -> list[np.ndarray]:
        return [_draw(x, theta) for x, theta in self._state[:, [0, 2]]]


@njit(cache=True, nogil=True)
def _begin(state, elapsed, random, row):
    for i in range(4):
        state[row, i] = 0.1 * uniform(random, row) - 0.05
    elapsed[row] = 0


@njit(cache=True, nogil=True, error_model="numpy")
def _step(state, elapsed, random, max_steps, actions, reward, terminated, truncated, obs, first, active):
    for row in range(len(state)):
        ended = False
        fresh = elapsed[row] == RESTING
        reward[row] = 0.0 if fresh else 1.0
        if not fresh:
            x, x_dot, theta, theta_dot = state[row, 0], state[row, 1], state[row, 2], state[row, 3]
            force = _FORCE if actions[row, 0] == 1 else -_FORCE
            cos, sin = math.cos(theta), math.sin(theta)
            push = (force + _POLE_MASS * _HALF_LENGTH * theta_dot * theta_dot * sin) / _TOTAL_MASS
            theta_acc = (_GRAVITY * sin - cos * push) / (
                _HALF_LENGTH * (4.0 / 3.0 - _POLE_MASS * cos * cos / _TOTAL_MASS)
            )
            x_acc = push - _POLE_MASS * _HALF_LENGTH * theta_acc * cos / _TOTAL_MASS
            x += _SECONDS_PER_STEP * x_dot
            theta += _SECONDS_PER_STEP * theta_dot
            state[row, 0] = x
            state[row, 1] = x_dot + _SECONDS_PER_STEP * x_acc
            state[row, 2] = theta
            state[row, 3] = theta_dot + _SECONDS_PER_STEP * theta_acc
            elapsed[row] += 1
            ended = abs(x) > _X_LIMIT or abs(theta) > _THETA_LIMIT
        timed_out = not fresh and not ended and elapsed[row] >= max_steps
        if fresh or ended:
            _begin(state, elapsed, random, row)
        terminated[row] = ended
        truncated[row] = timed_out
        first[row] = fresh or ended
        active[row] = not timed_out
        if timed_out:
            elapsed[row] = RESTING
        for i in range(4):
            obs[row, i] = state[row, i]


def _draw(x: float, theta: float) -> np.ndarray:
    """An RGB picture uint8 ``[200, 300, 3]`` of the cart between its two limits."""
    image = canvas(200, 300)
    scale = 300 / (2 * _X_LIMIT)
    cart, ground = 150 + scale * x, 150.0
    draw_segment(image, (ground, 0), (ground, 300), 1, (0, 0, 0))
    draw_segment(image, (ground, cart - 18), (ground, cart + 18), 9, (40, 40, 40))
    length = 2 * _HALF_LENGTH * scale
    draw_segment(
        image, (ground, cart), (ground - length * math.cos(theta), cart + length * math.sin(theta)), 4, (202, 152, 101)
    )
    return image
