"""Single Gymnasium environments, stepped one after the other in one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import gymnasium
import numpy as np

from sfactory.envs.group import EnvRequest, EnvSpec, Finals, Frame, Outcome
from sfactory.envs.making import check_reset, environment_name, fault_of, read_spaces, render_fps
from sfactory.envs.observations import FrameWriter, numeric_extras
from sfactory.envs.seeds import env_seed
from sfactory.errors import EnvironmentFault
from sfactory.spaces import MASK_KEY

StepResult = tuple[Any, float, bool, bool, dict[str, Any]]


def read_spec(env: gymnasium.Env, request: EnvRequest) -> EnvSpec:
    """What one environment says of itself; resets it once, to find out whether its info holds action masks.

    Raises:
        ConfigError: If its spaces are not supported or reset() does not return (observation, info).
        EnvironmentFault: If reset() raises.
    """
    observation, action = read_spaces(env.observation_space, env.action_space, request)
    name = environment_name(request, 0)
    _, info = check_reset(name, lambda: env.reset(seed=0))
    masked = observation.mask_path is not None or MASK_KEY in info
    return EnvSpec(observation, action, frameskip=frameskip(env), masked=masked, family="gymnasium", render_fps=render_fps(env))


def frameskip(env: gymnasium.Env) -> int:
    """Simulator frames per env step. MuJoCo's ``frame_skip`` counts integration steps, so it is 1 there."""
    base = env.unwrapped
    if any("mujoco" in cls.__module__ for cls in type(base).__mro__):
        return 1
    for name in ("frame_skip", "frameskip", "_frameskip"):
        if isinstance(frames := getattr(base, name, None), int | np.integer):
            return max(1, int(frames))
    return 1


class SingleGroup:
    """A :class:`Group` of single environments. One row each.

    Args:
        envs: All different objects.
        first_index: Number, in the run, of the first of them.
        seed: Of the run.
    """

    def __init__(self, envs: Sequence[gymnasium.Env], request: EnvRequest, spec: EnvSpec, first_index: int, seed: int) -> None:
        self.rows = len(envs)
        self.finals: Finals | None = None
        self.extras: list[dict[str, float]] = []
        self._envs = [_without_order_check(env) for env in envs]
        self._names = [environment_name(request, first_index + row) for row in range(self.rows)]
        self._seeds = [env_seed(seed, first_index + row) for row in range(self.rows)]
        self._action = spec.action
        self._mask_in_observation = spec.observation.mask_path is not None
        self._writer = FrameWriter(spec, self._names.__getitem__, request.validate)
        self._wakers = [self._waker(row) for row in range(self.rows)]
        self._calls: list[Callable[[Any], StepResult]] = [env.step for env in self._envs]
        self._resting: list[int] = []

    @property
    def envs(self) -> list[gymnasium.Env]:
        """The environments themselves, in the order of their rows."""
        return self._envs

    def reset(self, frame: Frame) -> None:
        self._calls = [env.step for env in self._envs]
        self._resting = []
        observations, infos = zip(*(self._reset_row(row, seed) for row, seed in enumerate(self._seeds)), strict=True)
        frame.first.fill(True)
        frame.active.fill(True)
        self._write(observations, infos, frame)

    def step(self, categorical: np.ndarray, continuous: np.ndarray, outcome: Outcome, after: Frame) -> None:
        results = self._call(self._action.rows(categorical, continuous))
        try:
            observations, rewards, terminated, truncated, infos = zip(*results, strict=True)
            outcome.reward[:] = rewards
            outcome.terminated[:] = terminated
            outcome.truncated[:] = truncated
        except (ValueError, TypeError) as error:
            raise self._bad_result(results) from error
        self._writer.check_rewards(outcome.reward)
        after.first.fill(False)
        after.active.fill(True)
        if self._resting:  # they were reset in place of a step
            after.first[self._resting] = True
            self._resting = []
        if any(terminated) or any(truncated):
            observations, infos = self._end(list(observations), list(infos), outcome, after)
        self._write(observations, infos, after)

    def render(self) -> list[Any]:
        return [env.render() for env in self._envs]

    def close(self) -> None:
        envs, self._envs = self._envs, []
        for env in envs:
            env.close()

    def _call(self, actions: Sequence[Any]) -> list[StepResult]:
        """Step every environment; a resting one is reset instead."""
        results: list[StepResult] = []
        try:
            for call, action in zip(self._calls, actions, strict=True):
                results.append(call(action))
        except EnvironmentFault:
            raise
        except Exception as error:
            row = len(results)
            raise fault_of(self._names[row], f"step({actions[row]!r})", error) from error
        return results

    def _end(self, observations: list[Any], infos: list[Any], outcome: Outcome, after: Frame) -> tuple[list[Any], list[Any]]:
        """Reset the terminated environments and let the truncated ones rest; gives the group's new observations and infos."""
        outcome.truncated[outcome.terminated] = False
        for row in np.flatnonzero(outcome.terminated | outcome.truncated).tolist():
            if extras := numeric_extras(infos[row]):
                self.extras.append(extras)
            if outcome.terminated[row]:
                observations[row], infos[row] = self._reset_row(row)
                after.first[row] = True
            else:
                self._calls[row] = self._wakers[row]
                self._resting.append(row)
                after.active[row] = False
        return observations, infos

    def _waker(self, row: int) -> Callable[[Any], StepResult]:
        """What a resting row does in place of a step."""

        def wake(action: Any) -> StepResult:
            self._calls[row] = self._envs[row].step
            observation, info = self._reset_row(row)
            return observation, 0.0, False, False, info

        return wake

    def _reset_row(self, row: int, seed: int | None = None) -> tuple[Any, dict[str, Any]]:
        env = self._envs[row]
        return check_reset(self._names[row], lambda: env.reset(seed=seed))

    def _write(self, observations: Sequence[Any], infos: Sequence[Any], frame: Frame) -> None:
        self._writer.write(observations, frame.obs)
        if frame.mask is None:
            return
        masks = [holder.get(MASK_KEY) for holder in (observations if self._mask_in_observation else infos)]
        for row in self._resting:
            masks[row] = self._writer.all_allowed
        self._writer.write_masks(masks, frame.mask)

    def _bad_result(self, results: Sequence[Any]) -> EnvironmentFault:
        for row, result in enumerate(results):
            if not isinstance(result, tuple) or len(result) != 5:
                what = f"a tuple of {len(result)}" if isinstance(result, tuple) else repr(result)
                return EnvironmentFault(
                    f"{self._names[row]}: step() returned {what}; it must return the five values observation, reward, "
                    "terminated, truncated, info"
                )
            for what, value in zip(("reward", "terminated", "truncated"), result[1:4], strict=True):
                if np.shape(value) != () or not isinstance(value, bool | int | float | np.generic | np.ndarray):
                    return EnvironmentFault(f"{self._names[row]}: step() returned {value!r} as {what}; it must be one number")
        return EnvironmentFault(f"{self._names[0]}: step() returned {results[0]!r}, not observation, reward, terminated, truncated, info")


def _without_order_check(env: gymnasium.Env) -> gymnasium.Env:
    """Drop the wrapper that makes sure of a reset before the first step, which a group keeps anyway."""
    outer: Any = env
    while isinstance(outer, gymnasium.Wrapper):
        if isinstance(outer.env, gymnasium.wrappers.OrderEnforcing):
            outer.env = outer.env.env
        outer = outer.env
    return env.env if isinstance(env, gymnasium.wrappers.OrderEnforcing) else env
