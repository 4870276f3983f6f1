"""Single Gymnasium environments, stepped one after the other in one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import gymnasium
import numpy as np

from sfactory.envs.factory import Maker, declared, read_spaces, render_fps
from sfactory.envs.fault_recovery import FaultRecovery
from sfactory.envs.faults import check_reset, close_quietly, environment_fault, environment_name
from sfactory.envs.interface import GOES_ON_KEY, EnvRequest, EnvSpec, Group, Outcome, StepBuffers
from sfactory.envs.observations import LATE_MASK, ObservationWriter, mask_in, numeric_extras
from sfactory.envs.seeds import env_seed
from sfactory.errors import EnvironmentFault, shown
from sfactory.spaces import MASK_KEY

_FRAMESKIP = ("frame_skip", "frameskip", "_frameskip")
"""Attributes by which environments and wrappers say how often they repeat an action."""
StepResult = tuple[Any, Any, bool, bool, dict[str, Any]]


def read_spec(env: gymnasium.Env, request: EnvRequest) -> EnvSpec:
    """Read the spec of an environment; resets it once, to find out whether its info holds action masks.

    Raises:
        ConfigError: If its spaces are not supported or reset() does not return (observation, info).
        EnvironmentFault: If reset() raises.
    """
    spaces = [declared(env, name, request) for name in ("observation_space", "action_space")]
    observation, action = read_spaces(spaces[0], spaces[1], request)
    name = environment_name(request, 0)
    _, info = check_reset(name, lambda: env.reset(seed=0))
    masked = observation.mask_path is not None or MASK_KEY in info
    return EnvSpec(
        observation, action, frameskip=frameskip(env), masked=masked, family="gymnasium", render_fps=render_fps(env)
    )


def frameskip(env: gymnasium.Env) -> int:
    """Simulator frames per env step: those of the environment's own steps, times those of each wrapper that repeats
    actions. MuJoCo's ``frame_skip`` counts integration steps, so it is 1 there."""
    frames, layer = 1, env
    while isinstance(layer, gymnasium.Wrapper):  # _skip: MaxAndSkipObservation
        frames, layer = frames * _frames_of(layer, (*_FRAMESKIP, "_skip")), layer.env
    if any("mujoco" in cls.__module__ for cls in type(layer).__mro__):
        return frames
    return frames * _frames_of(layer, _FRAMESKIP)


def _frames_of(layer: gymnasium.Env, names: Sequence[str]) -> int:
    """What an environment or a wrapper says, by the first of these names that is a number; 1 if none is."""
    values = (getattr(layer, name, None) for name in names)
    return max(1, int(next((value for value in values if isinstance(value, int | np.integer)), 1)))


class SingleGroup(Group):
    """A group of single environments. One row each.

    Args:
        envs: The environments, all different objects.
        make: Makes one more environment.
        request: The request that they were made from.
        spec: Their spaces and properties.
        first_index: Number in the run of the first of them.
        seed: Seed of the run.
    """

    def __init__(
        self,
        envs: Sequence[gymnasium.Env],
        make: Maker,
        request: EnvRequest,
        spec: EnvSpec,
        first_index: int,
        seed: int,
    ) -> None:
        self.rows = len(envs)
        self.extras: list[dict[str, float]] = []
        self._renders = request.render_mode is not None
        self._envs = [_without_order_check(env) for env in envs]
        self._make = make
        self._names = [environment_name(request, first_index + row) for row in range(self.rows)]
        self._first_index, self._seed = first_index, seed
        self._action = spec.action
        self._masked = spec.masked
        self._mask_in_observation = spec.observation.mask_path is not None
        self._writer = ObservationWriter(spec, self._names.__getitem__, request.validate, request.compiled)
        self._wakers = [self._waker(row) for row in range(self.rows)]
        self._calls: list[Callable[[Any], StepResult]] = [env.step for env in self._envs]
        self._resting: list[int] = []
        self._recovery = FaultRecovery(request.survive_faults)
        self._remade: list[int] = []
        self.faults = self._recovery.faults

    @property
    def envs(self) -> list[gymnasium.Env]:
        """The environments themselves, in the order of their rows."""
        return self._envs

    def reset(self, buffers: StepBuffers) -> None:
        self._calls = [env.step for env in self._envs]
        self._resting = []
        seeds = [env_seed(self._seed, self._first_index + row) for row in range(self.rows)]
        observations, infos = zip(*(self._begin(row, seed) for row, seed in enumerate(seeds)), strict=True)
        buffers.first.fill(True)
        buffers.active.fill(True)
        self._write(observations, infos, buffers)
        self._remade = []

    def step(self, categorical: np.ndarray, continuous: np.ndarray, outcome: Outcome, after: StepBuffers) -> None:
        self._recovery.step += 1
        self.goes_on = self.last_picture = None
        results = self._call(self._action.rows(categorical, continuous))
        observations, infos, ended = self._take(results, outcome)
        after.first.fill(False)
        after.active.fill(True)
        if self._resting:  # they were reset in place of a step
            after.first[self._resting] = True
            self._resting = []
        if ended:
            observations, infos = self._end(list(observations), list(infos), outcome, after)
        self._write(observations, infos, after)
        if self._remade:
            for array, value in zip((*outcome, after.first, after.active), (0, True, False, True, True), strict=True):
                array[self._remade] = value
            if self.goes_on is not None:
                self.goes_on[self._remade] = False
            self._remade = []

    def render(self) -> list[Any]:
        return [env.render() for env in self._envs]

    def close(self) -> None:
        envs, self._envs = self._envs, []
        for env in envs:
            close_quietly(env)

    def _call(self, actions: Sequence[Any] | np.ndarray) -> list[StepResult]:
        """Step every environment; a resting one is reset instead."""
        results: list[StepResult] = []
        for call, action in zip(self._calls, actions, strict=True):
            try:
                results.append(call(action))
            except EnvironmentFault:
                raise
            except BaseException as error:
                row = len(results)
                results.append(self._new_result(environment_fault(self._names[row], f"step({action!r})", error, row)))
        return results

    def _take(
        self, results: list[StepResult], outcome: Outcome
    ) -> tuple[Sequence[Any], Sequence[dict[str, Any]], bool]:
        """Fill `outcome`; gives the observations, the infos, and whether any episode has ended."""
        while True:
            try:
                observations, rewards, terminated, truncated, infos = zip(*results, strict=True)
                outcome.reward[:] = rewards
                outcome.terminated[:] = terminated
                outcome.truncated[:] = truncated
                self._writer.check_rewards(outcome.reward)
                if not self._masked and isinstance(infos[0], dict) and MASK_KEY in infos[0]:
                    raise EnvironmentFault(f"{self._names[0]}: {LATE_MASK}", 0)  # as do the others of its kind
                return observations, infos, any(terminated) or any(truncated)
            except EnvironmentFault as error:  # None as a reward has become NaN
                fault = error if _is_number(results[error.row][1]) else self._bad_result(results)
            except Exception:  # values may raise anything when they are looked at
                fault = self._bad_result(results)
            results[fault.row] = self._new_result(fault)

    def _end(
        self, observations: list[Any], infos: list[Any], outcome: Outcome, after: StepBuffers
    ) -> tuple[list[Any], list[Any]]:
        """Reset terminated environments and let truncated ones rest; gives the new observations and infos of the
        group."""
        outcome.truncated[outcome.terminated] = False
        goes_on = np.zeros(self.rows, bool)
        for row in np.flatnonzero(outcome.terminated | outcome.truncated).tolist():
            if not isinstance(infos[row], dict):
                fault = EnvironmentFault(
                    f"{self._names[row]}: step() returned {shown(infos[row])} as info; it must be a dict", row
                )
                observations[row], infos[row] = self._remake(fault)
                continue
            if MASK_KEY in infos[row] and not self._masked:
                fault = EnvironmentFault(f"{self._names[row]}: {LATE_MASK}", row)
                observations[row], infos[row] = self._remake(fault)
                continue
            goes_on[row] = outcome.terminated[row] and bool(infos[row].get(GOES_ON_KEY))
            if not goes_on[row] and (extras := numeric_extras(infos[row])):
                self.extras.append(extras)
            if outcome.terminated[row]:
                if self._renders and row == 0 and not goes_on[row]:
                    self.last_picture = self._last_picture()
                observations[row], infos[row] = self._begin(row)
                after.first[row] = True
            else:
                self._calls[row] = self._wakers[row]
                self._resting.append(row)
                after.active[row] = False
        self.goes_on = goes_on
        return observations, infos

    def _last_picture(self) -> Any:
        try:
            return self._envs[0].render()
        except BaseException as error:
            raise environment_fault(self._names[0], "render()", error, 0) from error

    def _waker(self, row: int) -> Callable[[Any], StepResult]:
        """A function that resets a resting row in place of its step."""

        def wake(action: Any) -> StepResult:
            self._calls[row] = self._envs[row].step
            observation, info = self._begin(row)
            return observation, 0.0, False, False, info

        return wake

    def _begin(self, row: int, seed: int | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin a row's next episode."""
        try:
            return self._reset_row(row, seed)
        except EnvironmentFault as fault:
            return self._remake(fault)

    def _reset_row(self, row: int, seed: int | None) -> tuple[Any, dict[str, Any]]:
        env = self._envs[row]
        return check_reset(self._names[row], lambda: env.reset(seed=seed), row)

    def _remake(self, fault: EnvironmentFault) -> tuple[Any, dict[str, Any]]:
        """Replace the faulty environment by a new one; gives the result of its reset()."""
        row = fault.row

        def make(times: int) -> tuple[Any, dict[str, Any]]:
            close_quietly(self._envs[row])
            seed = env_seed(self._seed, self._first_index + row, times)
            self._envs[row] = _without_order_check(self._make([seed]))
            self._calls[row] = self._envs[row].step
            return self._reset_row(row, seed)

        first = self._recovery.remake(fault, row, self._names[row], [row], make)
        self._remade.append(row)
        self._resting = [other for other in self._resting if other != row]
        return first

    def _new_result(self, fault: EnvironmentFault) -> StepResult:
        """Remake the faulty environment; gives a result in place of that of its step."""
        observation, info = self._remake(fault)
        return observation, 0.0, False, False, info

    def _write(self, observations: Sequence[Any], infos: Sequence[Any], buffers: StepBuffers) -> None:
        while True:
            try:
                self._writer.write(observations, buffers.obs)
                self._writer.check_values(buffers.obs)
                if buffers.mask is not None:
                    self._write_masks(observations, infos, buffers.mask)
                return
            except EnvironmentFault as fault:
                observations, infos = list(observations), list(infos)
                observations[fault.row], infos[fault.row] = self._remake(fault)

    def _write_masks(self, observations: Sequence[Any], infos: Sequence[Any], mask: np.ndarray) -> None:
        holders = observations if self._mask_in_observation else infos
        masks = [mask_in(holder) for holder in holders]
        for row in self._resting:
            masks[row] = self._writer.all_allowed
        self._writer.write_masks(masks, mask)

    def _bad_result(self, results: Sequence[Any]) -> EnvironmentFault:
        for row, result in enumerate(results):
            if not isinstance(result, tuple) or len(result) != 5:
                what = f"a tuple of {len(result)}" if isinstance(result, tuple) else shown(result)
                return EnvironmentFault(
                    f"{self._names[row]}: step() returned {what}; it must return the five values observation, reward, "
                    "terminated, truncated, info",
                    row,
                )
            for what, value in zip(("reward", "terminated", "truncated"), result[1:4], strict=True):
                if not _is_number(value):
                    return EnvironmentFault(
                        f"{self._names[row]}: step() returned {shown(value)} as {what}; it must be one number", row
                    )
        return EnvironmentFault(
            f"{self._names[0]}: step() returned {shown(results[0])}, not observation, reward, terminated, truncated, "
            "info",
            row=0,
        )


def _is_number(value: Any) -> bool:
    """Whether a value is one number of ordinary size."""
    if not isinstance(value, bool | int | float | np.generic | np.ndarray):
        return False
    try:
        return np.shape(value) == () and isinstance(float(value), float)
    except (ValueError, TypeError, OverflowError):
        return False


def _without_order_check(env: gymnasium.Env) -> gymnasium.Env:
    """Remove the wrapper that enforces a reset before the first step, which the group does anyway."""
    outer: Any = env
    while isinstance(outer, gymnasium.Wrapper):
        if isinstance(outer.env, gymnasium.wrappers.OrderEnforcing):
            outer.env = outer.env.env
        outer = outer.env
    return env.env if isinstance(env, gymnasium.wrappers.OrderEnforcing) else env
