"""Steps an environment on the device, and writes its tensors where the learner reads them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import gymnasium
import numpy as np
import torch
from gymnasium.vector import AutoresetMode
from torch import Tensor, nn

from sfactory.envs.faults import close_quietly, environment_fault
from sfactory.envs.interface import FINAL_OBS, GOES_ON_KEY, EnvSpec, StepBuffers
from sfactory.envs.observations import LATE_MASK, is_extra
from sfactory.errors import EnvironmentFault, shown
from sfactory.spaces import MASK_KEY, Leaf
from sfactory.spaces.tensors import action_parts

TensorStep = StepBuffers[Tensor]
"""One time step, from which the policy chooses actions; views, written in place."""


class TensorOutcome(NamedTuple):
    """Tensors for the results of one time step's actions; views, written in place.

    Attributes:
        reward: float32 ``[rows]``.
        terminated, truncated: bool ``[rows]``, never set together.
        finals: One tensor ``[rows, *leaf.shape]`` per leaf: the last observations of rows that were truncated and have
            been reset since, and anything in other rows. Empty for environments that rest.
    """

    reward: Tensor
    terminated: Tensor
    truncated: Tensor
    finals: tuple[Tensor, ...]


class TensorGroup:
    """One environment on the device, without a wait for it.

    Episode ends are those of :mod:`sfactory.envs.interface`. A row with an observation or a reward that is not finite,
    or with a category, a bit or a byte outside its space, gets 0 there; it is not active, and marked in `faulty`. So is
    a row whose action mask allows nothing in some component.

    Args:
        env: The environment.
        spec: Its spaces and properties.
        name: Of the environment, in messages.
        validate: Whether values are checked.
        device: Of its tensors.

    Attributes:
        spec: Its spaces and properties.
        name: In messages.
        rows: Number of its environments.
        rests: Whether rows rest for a step after an episode (``NEXT_STEP``), so that no final observations are kept.
        goes_on: bool ``[rows]``, the rows whose termination in the last step was not the end of their game; None if
            there are none.
        extras: Numeric entries ``[rows]`` of the last step's info, which mean something in rows that ended.
        faulty: bool ``[rows]``, the rows with a bad value since the reader cleared it.
    """

    def __init__(
        self, env: gymnasium.vector.VectorEnv, spec: EnvSpec, name: str, validate: bool, device: torch.device
    ) -> None:
        self._env, self.spec, self.name, self._validate = env, spec, name, validate
        mode = env.metadata.get("autoreset_mode")
        self._mode = AutoresetMode(getattr(mode, "value", mode))
        self.rows, self.rests = env.num_envs, self._mode is AutoresetMode.NEXT_STEP
        self._masks_in_info = spec.masked and spec.observation.mask_path is None
        self._actions = nn.ModuleList(action_parts(spec.action)).to(device)
        self._leaves = [_TensorLeaf(leaf, device) for leaf in spec.observation.leaves]
        self._resting, self.faulty = (torch.zeros(self.rows, dtype=torch.bool, device=device) for _ in range(2))
        self.goes_on: Tensor | None = None
        self.extras: dict[str, Tensor] = {}

    def reset(self, seed: int, after: TensorStep) -> None:
        """Begin the first episode of every row.

        Args:
            seed: Of all rows together.
            after: All of it is written.

        Raises:
            EnvironmentFault: If the environment raises, or returns something else than its spaces say.
        """
        observation, info = self._ask("reset()", lambda: self._env.reset(seed=seed), 2)
        self._resting.zero_()
        after.first.fill_(True)
        after.active.fill_(True)
        self._write(observation, info, after)

    def step(self, categorical: Tensor, continuous: Tensor, outcome: TensorOutcome, after: TensorStep) -> None:
        """Step every row once.

        Args:
            categorical: int32 ``[rows, K]``.
            continuous: float32 ``[rows, D]``, before squashing.
            outcome: All of it is written.
            after: All of it is written.

        Raises:
            EnvironmentFault: As :meth:`reset`.
        """
        parts = zip(self.spec.action.parts, self._actions, strict=True)
        actions = self.spec.action.nested({part.path: action(categorical, continuous) for part, action in parts})
        observation, reward, terminated, truncated, info = self._ask("step()", lambda: self._env.step(actions), 5)
        self._copy("reward", reward, outcome.reward)
        self._copy("terminated", terminated, outcome.terminated)
        self._copy("truncated", truncated, outcome.truncated)
        outcome.truncated.logical_and_(~outcome.terminated)
        self._read_info(info.get("final_info") if self._mode is AutoresetMode.SAME_STEP else info, outcome.terminated)
        if self.rests:
            self._rest(outcome, after)
        else:
            ended = outcome.terminated | outcome.truncated
            after.first.copy_(ended)
            after.active.fill_(True)
            if self._mode is AutoresetMode.DISABLED:
                self._write_obs(observation, outcome.finals, after.active, outcome.truncated)
                masks, reset = info.get(MASK_KEY), self._env.reset
                observation, info = self._ask("reset()", lambda: reset(options={"reset_mask": ended.clone()}), 2)
                if self._masks_in_info and masks is not None:  # reset() tells those of the rows that it has reset
                    masks, fresh = self._flat(masks), info.get(MASK_KEY)
                    info = {MASK_KEY: masks if fresh is None else torch.where(ended[:, None], self._flat(fresh), masks)}
            elif (finals := self._finals(info, outcome.truncated)) is not None:
                self._write_obs(finals, outcome.finals, after.active, outcome.truncated)
        if self._validate:
            self._exclude(outcome.reward.isfinite(), after.active)
            outcome.reward.nan_to_num_(0.0, 0.0, 0.0)
        self._write(observation, info, after)

    def _rest(self, outcome: TensorOutcome, after: TensorStep) -> None:
        """Rows that ended in the step before have been reset in this one, whose action had no effect."""
        playing = ~self._resting
        outcome.reward.masked_fill_(self._resting, 0.0)
        outcome.terminated.logical_and_(playing)
        outcome.truncated.logical_and_(playing)
        after.first.copy_(self._resting)
        torch.logical_or(outcome.terminated, outcome.truncated, out=self._resting)
        torch.logical_not(self._resting, out=after.active)

    def close(self) -> None:
        """Close the environment, whatever it raises."""
        close_quietly(self._env)

    def _ask(self, call: str, ask: Callable[[], Any], values: int) -> Any:
        """What the environment returns, a tuple of so many values."""
        try:
            result = ask()
        except BaseException as error:
            raise environment_fault(self.name, call, error) from error
        if not isinstance(result, tuple) or len(result) != values:
            wanted = "observation, info" if values == 2 else "observation, reward, terminated, truncated, info"
            raise EnvironmentFault(f"{self.name}: {call} returned {shown(result)}; it must return {wanted}")
        if not isinstance(result[-1], Mapping):
            raise EnvironmentFault(f"{self.name}: {call} returned {shown(result[-1])} as info; it must be a dict")
        if MASK_KEY in result[-1] and not self.spec.masked:
            raise EnvironmentFault(f"{self.name}: {LATE_MASK}")
        return result

    def _read_info(self, last: Any, terminated: Tensor) -> None:
        """Read what the last info of episodes that ended says of them, in tensors ``[rows]``; all else is left alone.

        Args:
            last: A mapping, or anything.
            terminated: bool ``[rows]``.
        """
        entries = {
            name: value
            for name, value in (last.items() if isinstance(last, Mapping) else ())
            if isinstance(value, Tensor) and value.shape == (self.rows,) and not value.is_complex()
        }
        goes_on = entries.get(GOES_ON_KEY)
        self.goes_on = None if goes_on is None else terminated & goes_on.bool()
        self.extras = {
            name: value if (has := entries.get(f"_{name}")) is None else torch.where(has, value.float(), torch.nan)
            for name, value in entries.items()
            if is_extra(name) and not name.startswith("_")  # _NAME says who has a NAME
        }

    def _finals(self, info: Mapping[str, Any], truncated: Tensor) -> Any:
        """The last observations of all rows; None, after a wait for the device, if there are none and nobody needs
        them."""
        found = next((info[key] for key in FINAL_OBS if key in info), None)
        if found is None and truncated.any():
            raise EnvironmentFault(
                f"{self.name}: info has no final_obs, and row {int(truncated.nonzero()[0])} was truncated; an "
                "environment on the device with autoreset SAME_STEP must give the last observations of all rows at "
                "each step that truncates one; giving them at every step saves a wait for the device"
            )
        return found

    def _write(self, observation: Any, info: Mapping[str, Any], after: TensorStep) -> None:
        self._write_obs(observation, after.obs, after.active)
        if after.mask is not None:
            masks = info.get(MASK_KEY) if self._masks_in_info else self.spec.observation.mask(observation)
            if masks is None:
                raise EnvironmentFault(f"{self.name}: info has no {MASK_KEY}, though the first reset() gave one")
            self._copy(MASK_KEY, self._flat(masks), after.mask)
            if self._validate:
                components = after.mask.split(self.spec.action.sizes, 1)
                allows = torch.stack([component.any(1) for component in components], 1).all(1)
                self._exclude(allows | ~after.active, after.active)
            after.mask.logical_or_(~after.active[:, None])  # nothing is chosen there

    def _flat(self, masks: Any) -> Tensor:
        """Action masks of all rows, a tensor or a tuple or Dict of tensors, as ``[rows, logits]``."""
        try:
            parts = [part.reshape(self.rows, -1) for part in self.spec.action.mask_parts(masks)]
            return parts[0] if len(parts) == 1 else torch.cat(parts, 1)
        except (ValueError, RuntimeError, AttributeError) as error:
            raise EnvironmentFault(f"{self.name}: {error}; the action masks are {shown(masks)}") from error

    def _write_obs(
        self, observation: Any, out: tuple[Tensor, ...], active: Tensor, meant: Tensor | None = None
    ) -> None:
        """Write an observation, and take rows without a good one from those that are active.

        Args:
            meant: bool ``[rows]``, those whose values mean anything; None: all.
        """
        values = self.spec.observation.values(observation)
        for leaf, target in zip(self._leaves, out, strict=True):
            try:
                value = next(values)
            except (KeyError, IndexError, TypeError) as error:
                raise EnvironmentFault(f"{self.name}: the observation has no {leaf.name}: {shown(error)}") from error
            self._copy(leaf.name, value, target)
            if value.dtype.is_floating_point and not target.dtype.is_floating_point:
                raise EnvironmentFault(
                    f"{self.name}: {leaf.name} is {value.dtype}; its space says integers; return those, or change the "
                    "observation space"
                )
            if leaf.start is not None:
                target.sub_(leaf.start)
            if self._validate and (good := leaf.correct(value, target)) is not None:
                self._exclude(good if meant is None else good | ~meant, active)

    def _exclude(self, good: Tensor, active: Tensor) -> None:
        """Take the rows that are not good from those that are learned from."""
        self.faulty.logical_or_(~good)
        active.logical_and_(good)

    def _copy(self, name: str, value: Any, target: Tensor) -> None:
        if not isinstance(value, Tensor) or value.shape != target.shape or value.device != target.device:
            what = (
                f"has shape {tuple(value.shape)} on {value.device}"
                if isinstance(value, Tensor)
                else f"is {shown(value)}"
            )
            raise EnvironmentFault(
                f"{self.name}: {name} {what}; it must be a tensor of shape {tuple(target.shape)} on {target.device}"
            )
        target.copy_(value)


class _TensorLeaf:
    """What one leaf's values are corrected by."""

    def __init__(self, leaf: Leaf, device: torch.device) -> None:
        self.name = leaf.name

        def tensor(values: tuple[int, ...]) -> Tensor:
            return torch.tensor(values, dtype=torch.int32, device=device).reshape(leaf.shape)

        self.start = tensor(leaf.start) if any(leaf.start) else None
        self._most = tensor(leaf.sizes) - 1 if leaf.sizes else None
        self._is_float, self._high = leaf.dtype == np.float32, leaf.high

    def correct(self, value: Tensor, target: Tensor) -> Tensor | None:
        """Replace what cannot be learned from; gives bool ``[rows]``, the rows without any of it, or None where
        nothing can be wrong.

        Args:
            value: As the environment gave it.
            target: Its copy, in the leaf's dtype.
        """
        if self._most is not None:
            good = (target >= 0) & (target <= self._most)
        elif self._is_float:
            good = target.isfinite()
        elif value.dtype not in (target.dtype, torch.bool):
            good = (value >= 0) & (value <= self._high)  # others are other numbers there
        else:
            return None
        target.masked_fill_(~good, 0)
        return good.flatten(1).all(1) if good.dim() > 1 else good
