"""What each of Gymnasium's MuJoCo environments observes and rewards, for many of them at once.

Formulas, arguments and the names in ``info`` are those of ``gymnasium.envs.mujoco``. Sums are taken in the same order,
so that observations are the same to the last bit, and rewards where they take no norms and powers.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np

Judged = tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]
"""Rewards ``[rows]``, whether episodes terminate, and the numbers ``[rows]`` that Gymnasium tells in ``info``."""

_NOT_NEEDED: Any = None
"""In place of an array that no task reads."""


@dataclass(frozen=True)
class Scene:
    """Where everything is: arrays with a row for each environment, under MuJoCo's names and in its units. The
    simulation keeps them up to date; all but the first two only where a task `needs` them.

    Attributes:
        qpos, qvel: Positions and velocities of the joints.
        xpos, xipos, site_xpos: Positions of the bodies' frames, of their centers of mass, and of sites.
        cinert, cvel, cfrc_ext: The bodies' inertias, velocities, and external forces on them.
        qfrc_actuator, qfrc_constraint: Forces of actuators and constraints on the joints.
    """

    qpos: np.ndarray
    qvel: np.ndarray
    xpos: np.ndarray = _NOT_NEEDED
    xipos: np.ndarray = _NOT_NEEDED
    site_xpos: np.ndarray = _NOT_NEEDED
    cinert: np.ndarray = _NOT_NEEDED
    cvel: np.ndarray = _NOT_NEEDED
    cfrc_ext: np.ndarray = _NOT_NEEDED
    qfrc_actuator: np.ndarray = _NOT_NEEDED
    qfrc_constraint: np.ndarray = _NOT_NEEDED


class Task:
    """Observations and rewards of one MuJoCo environment.

    Args:
        env: Gymnasium's environment.
        scene: Kept up to date by whoever simulates.
        arguments: Those of the environment's class.
    """

    needs: ClassVar[tuple[str, ...]] = ()

    def __init__(self, env: Any, scene: Scene, **arguments: Any) -> None:
        self.env, self.scene = env, scene
        self.given = SimpleNamespace(**arguments)

    def observations(self) -> np.ndarray:
        """float64 ``[rows, size]``."""
        return np.concatenate([part.reshape(len(part), -1) for part in self.senses()], axis=1)

    def senses(self) -> list[np.ndarray]:
        """The parts of observations, each ``[rows, ...]``."""
        return [self.scene.qpos, self.scene.qvel]

    def places(self) -> np.ndarray | None:
        """What `judge` compares with a step later."""
        return None

    def judge(self, before: np.ndarray | None, actions: np.ndarray) -> Judged:
        """What is earned by having come from the places `before` by `actions` ``[rows, D]``."""
        raise NotImplementedError

    def _alive(self) -> np.ndarray:
        return np.zeros(len(self.scene.qpos), bool)

    def _body(self, name: int | str) -> np.ndarray:
        return self.scene.xpos[:, self.env.data.body(name).id]


class InvertedPendulum(Task):
    """A pole on a cart."""

    def judge(self, before: np.ndarray | None, actions: np.ndarray) -> Judged:
        terminated = ~_finite(self.scene) | (np.abs(self.scene.qpos[:, 1]) > 0.2)
        reward = (~terminated).astype(np.float64)
        return reward, terminated, {"reward_survive": reward}


class InvertedDoublePendulum(Task):
    """Two poles on a cart, one on top of the other."""

    needs = ("site_xpos", "qfrc_constraint")

    def senses(self) -> list[np.ndarray]:
        cart, angles = np.split(self.scene.qpos, [1], axis=1)
        return [
            cart,
            np.sin(angles),
            np.cos(angles),
            self.scene.qvel.clip(-10, 10),
            self.scene.qfrc_constraint[:, :1].clip(-10, 10),
        ]

    def judge(self, before: np.ndarray | None, actions: np.ndarray) -> Judged:
        x, _, y = self.scene.site_xpos[:, 0].T
        _, upper, lower = self.scene.qvel.T
        terminated = y <= 1
        survive = self.given.healthy_reward * ~terminated
        distance = 0.01 * x**2 + (y - 2) ** 2
        velocity = 1e-3 * upper**2 + 5e-3 * lower**2
        quantities = {"reward_survive": survive, "distance_penalty": -distance, "velocity_penalty": -velocity}
        return survive - distance - velocity, terminated, quantities


class Reacher(Task):
    """An arm in a plane that reaches for a target."""

    needs = ("xpos",)

    def senses(self) -> list[np.ndarray]:
        angles, target = np.split(self.scene.qpos, [2], axis=1)
        return [np.cos(angles), np.sin(angles), target, self.scene.qvel[:, :2], self._distance()[:, :2]]

    def judge(self, before: np.ndarray | None, actions: np.ndarray) -> Judged:
        distance = -_norms(self._distance()) * self.given.reward_dist_weight
        control = -_squares(actions) * self.given.reward_control_weight
        return distance + control, self._alive(), {"reward_dist": distance, "reward_ctrl": control}

    def _distance(self) -> np.ndarray:
        return self._body("fingertip") - self._body("target")


class Pusher(Task):
    """An arm that pushes a cylinder to its goal."""

    needs = ("xpos",)

    def senses(self) -> list[np.ndarray]:
        bodies = [self._body(name) for name in ("tips_arm", "object", "goal")]
        return [self.scene.qpos[:, :7], self.scene.qvel[:, :7], *bodies]

    def judge(self, before: np.ndarray | None, actions: np.ndarray) -> Judged:
        near = -_norms(self._body("object") - self._body("tips_arm")) * self.given.reward_near_weight
        distance = -_norms(self._body("object") - self._body("goal")) * self.given.reward_dist_weight
        control = -_squares(actions) * self.given.reward_control_weight
        return (
            distance + control + near,
            self._alive(),
            {"reward_dist": distance, "reward_ctrl": control, "reward_near": near},
        )


class Locomotion(Task):
    """Robots that earn their velocity along x, and something for being healthy where they can fall, and pay for what
    actuators do."""

    axes = 1
    """Coordinates of a robot's place: 1 in a plane, else 2. Not observed unless asked for."""

    def senses(self) -> list[np.ndarray]:
        hidden = self.axes if self.given.exclude_current_positions_from_observation else 0
        return [self.scene.qpos[:, hidden:], self.scene.qvel]

    def places(self) -> np.ndarray:
        return self.scene.qpos[:, : self.axes].copy()

    def healthy(self) -> np.ndarray | None:
        """Whether each robot is; None where they always are and earn nothing for it."""
        return None

    def costs(self, actions: np.ndarray) -> dict[str, np.ndarray]:
        """Parts of the reward ``[rows]``, by name."""
        return {"ctrl": self.given.ctrl_cost_weight * _squares(actions)}

    def judge(self, before: np.ndarray | None, actions: np.ndarray) -> Judged:
        qpos = self.scene.qpos
        velocity = (self.places() - before) / self.env.dt
        forward = self.given.forward_reward_weight * velocity[:, 0]
        healthy, costs = self.healthy(), self.costs(actions)
        survive = 0.0 if healthy is None else healthy * self.given.healthy_reward
        reward = forward + survive - sum(costs.values())
        quantities = {"x_position": qpos[:, 0].copy(), "x_velocity": velocity[:, 0], "reward_forward": forward}
        quantities |= {f"reward_{name}": -cost for name, cost in costs.items()}
        if self.axes == 2:
            quantities |= {
                "y_position": qpos[:, 1].copy(),
                "y_velocity": velocity[:, 1],
                "distance_from_origin": _norms(qpos[:, :2]),
            }
        if healthy is None:
            return reward, self._alive(), quantities
        return reward, ~healthy & self.given.terminate_when_unhealthy, {**quantities, "reward_survive": survive}


class HalfCheetah(Locomotion):
    """Two legs and a back in a plane."""


class Swimmer(Locomotion):
    """Three links in a viscous fluid."""

    axes = 2


class Walker2d(Locomotion):
    """Two legs in a plane."""

    def senses(self) -> list[np.ndarray]:
        positions, velocities = super().senses()
        return [positions, velocities.clip(-10, 10)]

    def healthy(self) -> np.ndarray:
        return _within(self.scene.qpos[:, 1], self.given.healthy_z_range) & _within(
            self.scene.qpos[:, 2], self.given.healthy_angle_range
        )

    def judge(self, before: np.ndarray | None, actions: np.ndarray) -> Judged:
        reward, terminated, quantities = super().judge(before, actions)
        return (
            reward,
            terminated,
            {**quantities, "z_distance_from_origin": self.scene.qpos[:, 1] - self.env.init_qpos[1]},
        )


class Hopper(Walker2d):
    """One leg in a plane."""

    def healthy(self) -> np.ndarray:
        states = np.concatenate([self.scene.qpos[:, 2:], self.scene.qvel], axis=1)
        return super().healthy() & _within(states, self.given.healthy_state_range).all(1)


class Ant(Locomotion):
    """Four legs."""

    needs = ("xpos", "cfrc_ext")
    axes = 2

    def senses(self) -> list[np.ndarray]:
        forces = [self._contact_forces()[:, 1:]] if self.given.include_cfrc_ext_in_observation else []
        return [*super().senses(), *forces]

    def places(self) -> np.ndarray:
        return self._body(self.given.main_body)[:, :2].copy()

    def healthy(self) -> np.ndarray:
        least, most = self.given.healthy_z_range
        height = self.scene.qpos[:, 2]
        return _finite(self.scene) & (least <= height) & (height <= most)

    def costs(self, actions: np.ndarray) -> dict[str, np.ndarray]:
        return {**super().costs(actions), "contact": self.given.contact_cost_weight * _squares(self._contact_forces())}

    def _contact_forces(self) -> np.ndarray:
        return self.scene.cfrc_ext.clip(*self.given.contact_force_range)


class Humanoid(Locomotion):
    """Two legs and two arms."""

    needs = ("xipos", "cinert", "cvel", "cfrc_ext", "qfrc_actuator")
    axes = 2

    def senses(self) -> list[np.ndarray]:
        scene, given = self.scene, self.given
        parts = (
            (scene.cinert[:, 1:], given.include_cinert_in_observation),
            (scene.cvel[:, 1:], given.include_cvel_in_observation),
            (scene.qfrc_actuator[:, 6:], given.include_qfrc_actuator_in_observation),
            (scene.cfrc_ext[:, 1:], given.include_cfrc_ext_in_observation),
        )
        return [*super().senses(), *(part for part, included in parts if included)]

    def places(self) -> np.ndarray:
        masses = self.env.model.body_mass
        return (np.einsum("b,nbj->nj", masses, self.scene.xipos) / masses.sum())[:, :2]

    def healthy(self) -> np.ndarray:
        return _within(self.scene.qpos[:, 2], self.given.healthy_z_range)

    def costs(self, actions: np.ndarray) -> dict[str, np.ndarray]:
        contact = self.given.contact_cost_weight * _squares(self.scene.cfrc_ext)
        return {**super().costs(actions.astype(np.float64)), "contact": contact.clip(*self.given.contact_cost_range)}


class HumanoidStandup(Humanoid):
    """A humanoid that lies on its back and is to rise."""

    def judge(self, before: np.ndarray | None, actions: np.ndarray) -> Judged:
        qpos, given = self.scene.qpos, self.given
        rise = qpos[:, 2] / self.env.model.opt.timestep
        control = given.ctrl_cost_weight * _squares(actions.astype(np.float64))
        impact = (given.impact_cost_weight * _squares(self.scene.cfrc_ext)).clip(*given.impact_cost_range)
        quantities = {"reward_linup": rise, "reward_quadctrl": -control, "reward_impact": -impact}
        quantities |= {"x_position": qpos[:, 0].copy(), "y_position": qpos[:, 1].copy()}
        quantities["z_distance_from_origin"] = qpos[:, 2] - self.env.init_qpos[2]
        return rise - control - impact + 1, self._alive(), quantities


TASKS: dict[str, type[Task]] = {
    "gymnasium.envs.mujoco.ant_v5:AntEnv": Ant,
    "gymnasium.envs.mujoco.half_cheetah_v5:HalfCheetahEnv": HalfCheetah,
    "gymnasium.envs.mujoco.hopper_v5:HopperEnv": Hopper,
    "gymnasium.envs.mujoco.humanoid_v5:HumanoidEnv": Humanoid,
    "gymnasium.envs.mujoco.humanoidstandup_v5:HumanoidStandupEnv": HumanoidStandup,
    "gymnasium.envs.mujoco.inverted_double_pendulum_v5:InvertedDoublePendulumEnv": InvertedDoublePendulum,
    "gymnasium.envs.mujoco.inverted_pendulum_v5:InvertedPendulumEnv": InvertedPendulum,
    "gymnasium.envs.mujoco.pusher_v5:PusherEnv": Pusher,
    "gymnasium.envs.mujoco.reacher_v5:ReacherEnv": Reacher,
    "gymnasium.envs.mujoco.swimmer_v5:SwimmerEnv": Swimmer,
    "gymnasium.envs.mujoco.walker2d_v5:Walker2dEnv": Walker2d,
}
"""By the entry point of Gymnasium's environment."""


def _within(values: np.ndarray, bounds: tuple[float, float]) -> np.ndarray:
    least, most = bounds
    return (least < values) & (values < most)


def _finite(scene: Scene) -> np.ndarray:
    return np.isfinite(scene.qpos).all(1) & np.isfinite(scene.qvel).all(1)


def _squares(values: np.ndarray) -> np.ndarray:
    """Each row's sum of squares."""
    return np.square(values).reshape(len(values), -1).sum(1)


def _norms(vectors: np.ndarray) -> np.ndarray:
    return np.linalg.norm(vectors, axis=1)
