"""Steps of Gymnasium's classic control for many rows in one compiled pass, in float64. Imports numba, so its users
import it when they are made.

Each function steps all rows of `state`, float64 ``[rows, ...]``, in place, and writes float32 rewards and whether a row
has terminated. `constants` are the attributes of Gymnasium's environment that its :class:`Task` names.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numba import njit

_GRAVITY = 9.8
"""Of Acrobot, which has no attribute for it."""


class Task(NamedTuple):
    """One of the environments.

    Attributes:
        size: Numbers of a row's state.
        constants: Attributes of Gymnasium's environment, numbers, in the order in which `step` takes them.
        step: Called with state, actions ``[rows]`` or ``[rows, 1]``, constants, rewards and terminations.
        observe: Called with state and the observations, float32 ``[rows, ...]``, that it writes.
    """

    size: int
    constants: tuple[str, ...]
    step: Callable[..., None]
    observe: Callable[..., None]


@njit(cache=True, nogil=True)
def _step_acrobot(state, actions, constants, reward, terminated):
    dt, max_speed_1, max_speed_2 = constants[0], constants[6], constants[7]
    for row in range(len(state)):
        torque = float(actions[row] - 1)
        y = (state[row, 0], state[row, 1], state[row, 2], state[row, 3])
        k1 = _acrobot_rates(y, torque, constants)
        k2 = _acrobot_rates(_along(y, dt / 2.0, k1), torque, constants)
        k3 = _acrobot_rates(_along(y, dt / 2.0, k2), torque, constants)
        k4 = _acrobot_rates(_along(y, dt, k3), torque, constants)
        for i in range(4):
            state[row, i] = y[i] + dt / 6.0 * (k1[i] + 2 * k2[i] + 2 * k3[i] + k4[i])
        state[row, 0] = _wrapped(state[row, 0])
        state[row, 1] = _wrapped(state[row, 1])
        state[row, 2] = min(max(state[row, 2], -max_speed_1), max_speed_1)
        state[row, 3] = min(max(state[row, 3], -max_speed_2), max_speed_2)
        terminated[row] = -math.cos(state[row, 0]) - math.cos(state[row, 1] + state[row, 0]) > 1.0
        reward[row] = 0.0 if terminated[row] else -1.0


@njit(cache=True, nogil=True)
def _acrobot_rates(y, torque, constants):
    """Time derivatives of the two angles and of their velocities (Sutton and Barto, Reinforcement Learning, section
    11.3 of the first edition)."""
    _, mass_1, mass_2, length, centre_1, centre_2, _, _, inertia = constants
    angle_1, angle_2, speed_1, speed_2 = y
    sin, cos = math.sin(angle_2), math.cos(angle_2)
    coupling = mass_2 * length * centre_2
    d1 = mass_1 * centre_1**2 + mass_2 * (length**2 + centre_2**2) + 2 * coupling * cos + 2 * inertia
    d2 = mass_2 * centre_2**2 + coupling * cos + inertia
    phi2 = mass_2 * centre_2 * _GRAVITY * math.sin(angle_1 + angle_2)
    phi1 = phi2 + (mass_1 * centre_1 + mass_2 * length) * _GRAVITY * math.sin(angle_1)
    phi1 -= coupling * sin * speed_2 * (speed_2 + 2 * speed_1)
    pull = torque + d2 / d1 * phi1 - coupling * speed_1**2 * sin - phi2
    acceleration_2 = pull / (mass_2 * centre_2**2 + inertia - d2**2 / d1)
    return speed_1, speed_2, -(d2 * acceleration_2 + phi1) / d1, acceleration_2


@njit(cache=True, nogil=True)
def _along(y, dt, rates):
    return y[0] + dt * rates[0], y[1] + dt * rates[1], y[2] + dt * rates[2], y[3] + dt * rates[3]


@njit(cache=True, nogil=True)
def _wrapped(angle):
    while angle > math.pi:
        angle -= 2 * math.pi
    while angle < -math.pi:
        angle += 2 * math.pi
    return angle


@njit(cache=True, nogil=True)
def _observe_acrobot(state, out):
    for row in range(len(state)):
        out[row, 0], out[row, 1] = math.cos(state[row, 0]), math.sin(state[row, 0])
        out[row, 2], out[row, 3] = math.cos(state[row, 1]), math.sin(state[row, 1])
        out[row, 4], out[row, 5] = state[row, 2], state[row, 3]


@njit(cache=True, nogil=True)
def _step_mountain_car(state, actions, constants, reward, terminated):
    force, gravity, max_speed, least, most, goal, goal_velocity = constants
    for row in range(len(state)):
        push = (actions[row] - 1) * force
        velocity = state[row, 1] + (push + math.cos(3 * state[row, 0]) * (-gravity))
        velocity = min(max(velocity, -max_speed), max_speed)
        _move_car(state, row, velocity, least, most)
        terminated[row] = state[row, 0] >= goal and state[row, 1] >= goal_velocity
        reward[row] = -1.0


@njit(cache=True, nogil=True)
def _step_continuous_mountain_car(state, actions, constants, reward, terminated):
    power, least_force, most_force, max_speed, least, most, goal, goal_velocity = constants
    for row in range(len(state)):
        action = float(actions[row, 0])
        push = min(max(action, least_force), most_force) * power
        velocity = state[row, 1] + (push - 0.0025 * math.cos(3 * state[row, 0]))
        velocity = min(max(velocity, -max_speed), max_speed)
        _move_car(state, row, velocity, least, most)
        terminated[row] = state[row, 0] >= goal and state[row, 1] >= goal_velocity
        reward[row] = (100.0 if terminated[row] else 0.0) - action**2 * 0.1
        state[row, 0], state[row, 1] = np.float32(state[row, 0]), np.float32(state[row, 1])  # as Gymnasium keeps it


@njit(cache=True, nogil=True)
def _move_car(state, row, velocity, least, most):
    position = min(max(state[row, 0] + velocity, least), most)
    state[row, 0] = position
    state[row, 1] = 0.0 if position == least and velocity < 0 else velocity


@njit(cache=True, nogil=True)
def _observe_car(state, out):
    for row in range(len(state)):
        out[row, 0], out[row, 1] = state[row, 0], state[row, 1]


_CAR = "max_speed", "min_position", "max_position", "goal_position", "goal_velocity"
_LINKS = "LINK_MASS_1", "LINK_MASS_2", "LINK_LENGTH_1", "LINK_COM_POS_1", "LINK_COM_POS_2"
ACROBOT = Task(4, ("dt", *_LINKS, "MAX_VEL_1", "MAX_VEL_2", "LINK_MOI"), _step_acrobot, _observe_acrobot)
MOUNTAIN_CAR = Task(2, ("force", "gravity", *_CAR), _step_mountain_car, _observe_car)
CONTINUOUS_MOUNTAIN_CAR = Task(
    2, ("power", "min_action", "max_action", *_CAR), _step_continuous_mountain_car, _observe_car
)
