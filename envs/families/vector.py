"""Gymnasium vector environments, in all three of their autoreset modes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode

from sfactory.config import env_name
from sfactory.envs.factory import Maker, declared, own_rows, read_spaces, render_fps
from sfactory.envs.fault_recovery import FaultRecovery
from sfactory.envs.faults import check_reset, close_quietly, environment_fault, environment_name
from sfactory.envs.interface import (
    FINAL_OBS,
    GOES_ON_KEY,
    EnvRequest,
    EnvSpec,
    Finals,
    Group,
    Outcome,
    StepBuffers,
    whole_ends,
)
from sfactory.envs.observations import LATE_MASK, NO_MASK, ObservationWriter, numeric_extras
from sfactory.envs.seeds import env_seed
from sfactory.errors import ConfigError, EnvironmentFault, shown
from sfactory.spaces import MASK_KEY


def read_spec(env: gymnasium.vector.VectorEnv, request: EnvRequest) -> EnvSpec:
    """Read the spec of a vector environment's environments; resets them once.

    Raises:
        ConfigError: If its spaces or its autoreset mode are not supported.
        EnvironmentFault: If reset() raises or returns something else than (observation, info).
    """
    _autoreset_mode(env, request)
    spaces = [declared(env, name, request) for name in ("single_observation_space", "single_action_space")]
    observation, action = read_spaces(spaces[0], spaces[1], request, "single_")
    _, info = check_reset(environment_name(request, 0), lambda: env.reset(seed=0))
    masked = observation.mask_path is not None or MASK_KEY in info
    return EnvSpec(
        observation, action, masked=masked, family="vector", render_fps=render_fps(env), own_rows=own_rows(env, request)
    )


def _autoreset_mode(env: gymnasium.vector.VectorEnv, request: EnvRequest) -> AutoresetMode:
    mode = (env.metadata or {}).get("autoreset_mode")
    try:
        return AutoresetMode(getattr(mode, "value", mode))
    except ValueError:
        raise ConfigError(
            f"{env_name(request.env)}: metadata['autoreset_mode'] is {mode!r}; set it to what the vector environment "
            "does at an episode's end, for example gymnasium.vector.AutoresetMode.NEXT_STEP"
        ) from None


class VectorGroup(Group):
    """A group of one vector environment. One row for each of its environments.

    Args:
        envs: A list of the vector environment alone.
        make: Makes another vector environment.
        request: The request that they were made from.
        spec: Their spaces and properties.
        first_index: Number in the run of the first of them.
        seed: Seed of the run.
    """

    def __init__(
        self,
        envs: Sequence[gymnasium.vector.VectorEnv],
        make: Maker,
        request: EnvRequest,
        spec: EnvSpec,
        first_index: int,
        seed: int,
    ) -> None:
        from sfactory.envs.kernels.steps import settle_step

        env: Any
        (env,) = envs
        self.rows = env.num_envs
        self.extras: list[dict[str, float]] = []
        self._env, self._make = env, make
        self._mode = _autoreset_mode(env, request)
        self._names = [environment_name(request, first_index + row) for row in range(self.rows)]
        self._group_name = (
            f"vector environment {first_index} to {first_index + self.rows - 1} ({env_name(request.env)})"
        )
        self._first_index, self._seed = first_index, seed
        self._spec = spec
        self._writer = ObservationWriter(spec, self._names.__getitem__, request.validate, request.compiled)
        self._settle_step = settle_step
        self._resting = np.zeros(self.rows, bool)
        self._closed = False
        self._faulty_rows: set[int] = set()
        self._recovery = FaultRecovery(request.survive_faults)
        self.faults = self._recovery.faults

    @property
    def env(self) -> gymnasium.vector.VectorEnv:
        """The vector environment itself."""
        return self._env

    @property
    def mode(self) -> AutoresetMode:
        """Its behaviour at an episode's end."""
        return self._mode

    def reset(self, buffers: StepBuffers) -> None:
        try:
            self._reset(buffers)
        except EnvironmentFault as fault:
            self._remake(fault, buffers)

    def step(self, categorical: np.ndarray, continuous: np.ndarray, outcome: Outcome, after: StepBuffers) -> None:
        self._recovery.step += 1
        self.finals = self.goes_on = None
        self._faulty_rows.clear()
        try:
            self._step(categorical, continuous, outcome, after)
        except BaseException as error:
            self._remake(environment_fault(self._group_name, "step()", error), after)
            self.goes_on = None
            for array, value in zip(outcome, (0, True, False), strict=True):
                array.fill(value)

    def _reset(self, buffers: StepBuffers, remade: int = 0) -> None:
        seeds = self._seeds(remade)
        try:
            observation, info = check_reset(self._group_name, lambda: self._env.reset(seed=seeds))
        except EnvironmentFault as fault:
            if not isinstance(fault.__cause__, gymnasium.error.Error | TypeError | ValueError):
                raise
            # its environments share one random stream: one seed for all of them
            observation, info = check_reset(self._group_name, lambda: self._env.reset(seed=seeds[0]))
        self.finals = None
        self._resting[:] = False
        buffers.first.fill(True)
        buffers.active.fill(True)
        self._write(observation, info, buffers)

    def _seeds(self, remade: int) -> list[int]:
        return [env_seed(self._seed, self._first_index + row, remade) for row in range(self.rows)]

    def _step(self, categorical: np.ndarray, continuous: np.ndarray, outcome: Outcome, after: StepBuffers) -> None:
        observation, info, any_ended = self._step_env(categorical, continuous, outcome, after)
        if any_ended:
            ended = outcome.terminated | outcome.truncated
            last = self._final_info(info) if self._mode is AutoresetMode.SAME_STEP else info
            if GOES_ON_KEY in last:
                self.goes_on = outcome.terminated & np.asarray(last[GOES_ON_KEY], bool)
            self._add_extras(last, whole_ends(outcome, self.goes_on))
            if self._mode is AutoresetMode.SAME_STEP:
                self._keep_finals(info, outcome.truncated)
            elif self._mode is AutoresetMode.DISABLED:
                observation, info = self._reset_ended(observation, info, ended, outcome.truncated)
        self._write(observation, info, after)

    def render(self) -> list[Any]:
        return list(self._env.render())

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            close_quietly(self._env)

    def _remake(self, fault: EnvironmentFault, buffers: StepBuffers) -> None:
        """Replace the faulty vector environment by a new one, and write its first observations."""

        def make(times: int) -> None:
            close_quietly(self._env)
            self._env = self._make(self._seeds(times))
            self._reset(buffers, times)

        self._recovery.remake(fault, 0, self._group_name, range(self.rows), make, count=self.rows)

    def _replace_invalid(
        self, check: Callable[[], None], arrays: tuple[np.ndarray, ...], rows: Sequence[int]
    ) -> list[int]:
        """Replace invalid values by 0 and record the faults.

        Args:
            check: Raises EnvironmentFault with the first invalid index as its row.
            arrays: Arrays to correct, with one entry for each of `rows`.
            rows: Rows of the group.

        Returns:
            The indices of invalid entries.
        """
        invalid: list[int] = []
        while True:
            try:
                check()
                return invalid
            except EnvironmentFault as fault:
                row = rows[fault.row]
                if row not in self._faulty_rows:
                    self._recovery.record(fault, self._names[row], [row])
                    self._faulty_rows.add(row)
                for array in arrays:
                    array[fault.row] = 0
                invalid.append(fault.row)

    def _step_env(
        self, categorical: np.ndarray, continuous: np.ndarray, outcome: Outcome, after: StepBuffers
    ) -> tuple[Any, Mapping[str, Any], bool]:
        """Step and fill all but observations and masks; gives the batched observation, info, and whether an episode
        ended."""
        actions = self._spec.action.batch(categorical, continuous)
        try:
            result = self._env.step(actions)
        except BaseException as error:
            raise environment_fault(self._group_name, "step()", error) from error
        try:
            observation, reward, terminated, truncated, info = result
        except (ValueError, TypeError) as error:
            raise EnvironmentFault(
                f"{self._group_name}: step() returned {shown(result)}; it must return the five values observation, "
                "reward, terminated, truncated, info"
            ) from error
        try:
            told = [
                self._row_array(value, target)
                for value, target in zip((reward, terminated, truncated), outcome, strict=True)
            ]
        except (ValueError, TypeError) as error:
            raise EnvironmentFault(
                f"{self._group_name}: step() must return observation, reward, terminated, truncated, info with arrays "
                f"of {self.rows} entries, not {error}"
            ) from error
        if not isinstance(info, Mapping):
            raise EnvironmentFault(f"{self._group_name}: step() returned {shown(info)} as info; it must be a dict")
        rests = self._mode is AutoresetMode.NEXT_STEP
        ended, finite = self._settle_step(*told, rests, self._resting, *outcome, after.first, after.active)
        if not finite:
            self._replace_invalid(
                lambda: self._writer.check_rewards(outcome.reward), (outcome.reward,), range(self.rows)
            )
        return observation, info, ended > 0

    def _row_array(self, value: Any, target: np.ndarray) -> np.ndarray:
        """A result of step() as an array ``[rows]`` of the dtype of `target`. Raises ValueError or TypeError if it does
        not fit."""
        array = np.asarray(value, target.dtype, "C")
        if array.shape != (self.rows,):
            raise ValueError(shown(value))
        return array

    def _reset_ended(
        self, observation: Any, info: Mapping[str, Any], ended: np.ndarray, truncated: np.ndarray
    ) -> tuple[Any, Mapping[str, Any]]:
        """DISABLED: reset the environments that ended; the final observations of truncated ones go to `finals`."""
        if truncated.any():
            rows = np.flatnonzero(truncated)
            whole = self._new_obs(self.rows)
            self._writer.write_batch(observation, whole)
            self._set_finals(rows, tuple(array[rows] for array in whole))
        observation, fresh = check_reset(
            self._group_name, lambda: self._env.reset(options={"reset_mask": ended.copy()})
        )
        if self._spec.masked and self._spec.observation.mask_path is None:
            masks = np.where(ended[:, None], self._masks_of(fresh, ended), self._masks_of(info, ~ended))
            fresh = {MASK_KEY: masks}
        return observation, fresh

    def _keep_finals(self, info: Mapping[str, Any], truncated: np.ndarray) -> None:
        """SAME_STEP: take the final observations of truncated rows from info."""
        rows = np.flatnonzero(truncated)
        if not len(rows):
            return
        final = next((info[key] for key in FINAL_OBS if key in info), None)
        if final is None:
            raise EnvironmentFault(
                f"{self._names[rows[0]]} was truncated, but info has no final_obs; a vector environment with autoreset "
                "SAME_STEP must give it"
            )
        if isinstance(final, np.ndarray) and final.dtype == object:
            whole = self._new_obs(self.rows)
            self._writer.write_rows(rows.tolist(), [final[row] for row in rows], whole)
            self._set_finals(rows, tuple(array[rows] for array in whole))
        else:  # only the truncated rows are sure to hold something
            obs = self._new_obs(len(rows))
            self._writer.write_batch(_take(final, rows), obs)
            self._set_finals(rows, obs)

    def _set_finals(self, rows: np.ndarray, obs: tuple[np.ndarray, ...]) -> None:
        self._replace_invalid(lambda: self._writer.check_values(obs), obs, rows.tolist())
        self.finals = Finals(rows, obs)

    def _new_obs(self, rows: int) -> tuple[np.ndarray, ...]:
        return tuple(np.empty((rows, *leaf.shape), leaf.dtype) for leaf in self._spec.observation.leaves)

    def _final_info(self, info: Mapping[str, Any]) -> Mapping[str, Any]:
        """SAME_STEP: the last infos of episodes, batched; Gymnasium before 1.0 gave an array of one dict for each
        row."""
        final = info.get("final_info", {})
        if isinstance(final, Mapping):
            return final
        if np.shape(final) != (self.rows,):
            raise EnvironmentFault(
                f"{self._group_name}: info has final_info {shown(final)}; it must be a dict of arrays of {self.rows} "
                "entries"
            )
        rows = [each if isinstance(each, Mapping) else {} for each in final]
        names = {key for each in rows for key in each if isinstance(key, str)}
        return {name: np.fromiter((each.get(name) for each in rows), object, self.rows) for name in names}

    def _add_extras(self, info: Mapping[str, Any], ended: np.ndarray) -> None:
        if len(info) == 0:
            return
        for row in np.flatnonzero(ended).tolist():
            if extras := numeric_extras(dict(_entries(info, row, self.rows))):
                self.extras.append(extras)

    def _write(self, observation: Any, info: Mapping[str, Any], buffers: StepBuffers) -> None:
        self._writer.write_batch(observation, buffers.obs)
        if invalid := self._replace_invalid(
            lambda: self._writer.check_values(buffers.obs), buffers.obs, range(self.rows)
        ):
            buffers.active[invalid] = False
        if buffers.mask is not None:
            in_observation = self._spec.observation.mask(observation)
            masks = self._masks_of(info, buffers.active) if in_observation is None else self._flat_masks(in_observation)
            self._writer.write_masks(np.where(buffers.active[:, None], masks, True), buffers.mask)
        elif MASK_KEY in info:
            raise EnvironmentFault(f"{self._group_name}: {LATE_MASK}")

    def _masks_of(self, info: Mapping[str, Any], needed: np.ndarray) -> np.ndarray:
        """The masks ``[rows, logits]`` in an info, which must have those of the rows in `needed`."""
        present = np.asarray(info.get(f"_{MASK_KEY}", np.full(self.rows, MASK_KEY in info)))
        if (missing := needed & ~present).any():
            row = np.flatnonzero(missing)[0]
            raise EnvironmentFault(f"{self._names[row]}: {NO_MASK}")
        if MASK_KEY not in info:
            return np.ones((self.rows, self._spec.action.logits), bool)
        return self._flat_masks(info[MASK_KEY], present)

    def _flat_masks(self, masks: Any, present: np.ndarray | None = None) -> np.ndarray:
        try:
            return self._spec.action.flat_masks(masks, np.ones(self.rows, bool) if present is None else present)
        except ValueError as error:
            raise EnvironmentFault(f"{self._group_name}: {error}; the action masks are {shown(masks)}") from error


def _take(batch: Any, rows: np.ndarray) -> Any:
    """Some rows of a batched, possibly nested observation."""
    if isinstance(batch, Mapping):
        return {key: _take(value, rows) for key, value in batch.items() if not key.startswith("_")}
    if isinstance(batch, tuple):
        return tuple(_take(value, rows) for value in batch)
    return np.asarray(batch)[rows]


def _entries(info: Mapping[str, Any], row: int, rows: int) -> Iterator[tuple[str, Any]]:
    """One environment's entries of Gymnasium's batched info, whose key ``_name`` says who has a ``name``."""
    for key, value in info.items():
        if not key.startswith("_") and isinstance(value, np.ndarray) and value.shape == (rows,):
            present = info.get(f"_{key}")
            if present is None or present[row]:
                yield key, value[row]
