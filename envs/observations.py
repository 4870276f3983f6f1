"""Copies what environments return into step buffers, and names the environment that returned something wrong.

Whole groups are written and checked with a few NumPy calls; only when one of them fails are the rows looked at one by
one.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NoReturn

import numpy as np

from sfactory.envs.interface import GOES_ON_KEY, EnvSpec, StepBuffers
from sfactory.errors import EnvironmentFault, shown
from sfactory.spaces import MASK_KEY, Leaf

NO_MASK = "info has no action_mask, though the first reset() gave one; give it at every reset() and step()"
LATE_MASK = "info has an action_mask, though the first reset() gave none, so masks are not used; give it at reset() too"
_NO_EXTRAS = ("TimeLimit.truncated", "episode", MASK_KEY, GOES_ON_KEY)
_MISFIT = Exception
"""Exceptions of a value that is no array. Objects of a user's class may raise anything when they are converted."""


class ObservationWriter:
    """Writes observations and action masks in place, and checks them.

    Args:
        spec: Spaces of the environments.
        name: Gives the name of a row in error messages, for example ``environment 3 (CartPole-v1)``.
        validate: Check values too (finite, within a Discrete space); shapes and dtypes are always checked.
        compiled: Check them in a compiled pass, which imports numba.
    """

    def __init__(self, spec: EnvSpec, name: Callable[[int], str], validate: bool, compiled: bool = True) -> None:
        self._all_finite, self._all_known = _all_finite, _all_known
        if compiled:
            from sfactory.envs.kernels.steps import all_finite, all_known

            self._all_finite, self._all_known = all_finite, all_known
        self._observation = spec.observation
        self._action = spec.action
        self._name = name
        self._validate = validate
        self._stores = [_LeafStore(leaf) for leaf in spec.observation.leaves]
        self._component_begins = np.cumsum([0, *spec.action.sizes[:-1]])
        self.all_allowed = np.ones(spec.action.logits, bool)

    def write(self, observations: Sequence[Any], out: tuple[np.ndarray, ...]) -> None:
        """Write one observation per row. Values are checked by :meth:`check_values`.

        Args:
            observations: One observation per row.
            out: One array ``[rows, *leaf.shape]`` per leaf, contiguous.

        Raises:
            EnvironmentFault: If an observation has another shape or dtype than its space. Its `row` is set.
        """
        try:
            for store, target in zip(self._stores, out, strict=True):
                values = observations
                for key in store.path:
                    values = [value[key] for value in values]
                store.write(values, target)
        except _MISFIT:  # one does not fit, or they have several dtypes that do
            self._write_each(range(len(observations)), observations, out)

    def write_rows(self, rows: Sequence[int], observations: Sequence[Any], out: tuple[np.ndarray, ...]) -> None:
        """Write observations of some rows; the others become zero. Arguments and errors are those of `write`."""
        for target in out:
            target.fill(0)
        self._write_each(rows, observations, out)

    def write_batch(self, observation: Any, out: tuple[np.ndarray, ...]) -> None:
        """Write a batched observation, whose leaves have a leading row dimension. Errors are those of `write`; one of
        the batch as a whole has no `row`."""
        for leaf, store, target in zip(self._observation.leaves, self._stores, out, strict=True):
            try:
                value = np.asarray(_value(observation, leaf))
            except _MISFIT as error:
                raise EnvironmentFault(
                    f"{self._name(0)}: the batched observation has no {leaf.name}: {shown(error)}"
                ) from error
            if value.shape != target.shape or not _fits(value.dtype, leaf):
                raise EnvironmentFault(
                    f"{self._name(0)}: the batched observation {leaf.name} has shape {value.shape} and dtype "
                    f"{value.dtype}; its space says {target.shape} and {leaf.dtype}; return that, or change the "
                    "observation space"
                )
            if (wrong := _beyond_bytes(value, leaf)) is not None:
                raise EnvironmentFault(f"{self._name(0)}: {wrong}")
            np.copyto(target, value, casting="unsafe")
            if store.start is not None:
                target -= store.start

    def write_masks(self, masks: Sequence[Any] | np.ndarray, out: np.ndarray) -> None:
        """Write one action mask per row: an array, or a tuple or Dict of arrays.

        Args:
            out: bool ``[rows, logits]``, contiguous.

        Raises:
            EnvironmentFault: If a mask is missing, has the wrong size, or forbids every action.
        """
        try:
            flat = [mask if isinstance(mask, np.ndarray) else self._action.flat_mask(mask) for mask in masks]
            if any(mask.size != self._action.logits for mask in flat):
                raise ValueError("masks of several sizes")  # whose sum may be right
            np.concatenate(flat, axis=None, out=out.reshape(-1), casting="unsafe")
        except _MISFIT:
            self._name_mask(masks)
        if self._validate and not (allows := np.logical_or.reduceat(out, self._component_begins, axis=1)).all():
            row = int(np.flatnonzero(~allows.all(1))[0])
            raise EnvironmentFault(
                f"{self._name(row)}: the action mask {out[row].astype(int)} allows no action; it must allow at least "
                "one in each component of the action space",
                row,
            )

    def check_rewards(self, reward: np.ndarray) -> None:
        """Check that all rewards ``[rows]`` are finite.

        Raises:
            EnvironmentFault: If one is not. Its `row` is set.
        """
        if self._validate and not self._all_finite(reward):
            row = int(np.flatnonzero(~np.isfinite(reward))[0])
            raise EnvironmentFault(
                f"{self._name(row)}: the reward is {reward[row]}; it must be a finite number. Correct the "
                "environment's reward",
                row,
            )

    def check_values(self, out: tuple[np.ndarray, ...]) -> None:
        """Check that all observations are finite and within their Discrete spaces.

        Raises:
            EnvironmentFault: If one is not. Its `row` is set.
        """
        if not self._validate:
            return
        for leaf, store, target in zip(self._observation.leaves, self._stores, out, strict=True):
            if leaf.sizes:
                if self._all_known(target.reshape(-1), store.sizes):
                    continue
                good = (target >= 0) & (target < np.reshape(leaf.sizes, leaf.shape))
                kinds, first = (x[0] if len({*x}) == 1 else x for x in (leaf.sizes, leaf.start))
                remedy = (
                    f"its space has {kinds} categories from {first} on; enlarge the space or correct the value, or set "
                    "model.categories where a Box's integers are amounts (0) or have more values"
                )
            elif leaf.dtype == np.float32:
                if self._all_finite(target.reshape(-1)):
                    continue
                good = np.isfinite(target)
                remedy = "return finite numbers"
            else:
                continue
            if not good.all():
                row, *index = map(int, np.argwhere(~good)[0])
                value = target[row][tuple(index)]
                if leaf.sizes:
                    value = value + np.reshape(leaf.start, leaf.shape)[tuple(index)]
                where = f" at {index}" if index else ""
                raise EnvironmentFault(
                    f"{self._name(row)}: the observation {leaf.name} is {value}{where}; {remedy}", row
                )

    def _write_each(self, rows: Sequence[int], observations: Sequence[Any], out: tuple[np.ndarray, ...]) -> None:
        """Write observations one by one, each of a dtype of its own, and name the first that does not fit."""
        for row, observation in zip(rows, observations, strict=True):
            for leaf, store, target in zip(self._observation.leaves, self._stores, out, strict=True):
                try:
                    value = np.asarray(_value(observation, leaf))
                except _MISFIT as error:
                    text = f"{self._name(row)}: the observation {shown(observation)} has no {leaf.name}: {shown(error)}"
                    raise EnvironmentFault(text, row) from error
                if value.shape != leaf.shape or not _fits(value.dtype, leaf):
                    raise EnvironmentFault(
                        f"{self._name(row)}: the observation {leaf.name} has shape {value.shape} and dtype "
                        f"{value.dtype}; its space says {leaf.shape} and {leaf.dtype}; return that, or change the "
                        f"observation space. It is {shown(value)}",
                        row,
                    )
                if (wrong := _beyond_bytes(value, leaf)) is not None:
                    raise EnvironmentFault(f"{self._name(row)}: {wrong}", row)
                target[row] = value
                if store.start is not None:
                    target[row] -= store.start

    def _name_mask(self, masks: Sequence[Any] | np.ndarray) -> NoReturn:
        """Raise an EnvironmentFault that names the first bad action mask."""
        for row, mask in enumerate(masks):
            if mask is None:
                raise EnvironmentFault(f"{self._name(row)}: {NO_MASK}", row)
            try:
                self._action.flat_mask(mask)
            except _MISFIT as error:
                raise EnvironmentFault(f"{self._name(row)}: {error}; it is {shown(mask)}", row) from error
        raise EnvironmentFault(f"{self._name(0)}: the action masks do not fit the action space: {shown(masks[0])}", 0)


def _all_finite(values: np.ndarray) -> bool:
    """Whether there is neither NaN nor infinity among float32 ``[N]``."""
    return bool(np.isfinite(values).all())


def _all_known(categories: np.ndarray, sizes: np.ndarray) -> bool:
    """Whether categories ``[N * K]``, K for each row, are all at least 0 and below int64 ``sizes [K]``."""
    rows = categories.reshape(-1, len(sizes))
    return bool(((rows >= 0) & (rows < sizes)).all())


def _value(observation: Any, leaf: Leaf) -> Any:
    for key in leaf.path:
        observation = observation[key]
    return observation


class _LeafStore:
    """Writes one leaf's values, one per row, into its array."""

    def __init__(self, leaf: Leaf) -> None:
        self.path = leaf.path
        self.start = np.array(leaf.start).astype(leaf.dtype).reshape(leaf.shape) if any(leaf.start) else None
        self.sizes = np.array(leaf.sizes, np.int64)
        self._is_scalar = not leaf.shape
        self._joined, self._lengths = (-1, *leaf.shape[1:]), {*leaf.shape[:1]}
        self._is_bytes, self._high = leaf.dtype == np.uint8, leaf.high

    def write(self, values: Sequence[Any], target: np.ndarray) -> None:
        """Raises ValueError or TypeError if the values have another shape or cannot be cast."""
        if self._is_scalar or (self._is_bytes and np.asarray(values[0]).dtype.char not in _BYTES):
            block = np.asarray(values)
            if block.shape != target.shape or (self._is_bytes and not _are_bytes(block, self._high)):
                raise ValueError(block.shape)
            np.copyto(target, block, casting="unsafe" if self._is_bytes else "same_kind")
        else:  # unlike an assignment, concatenation does not broadcast
            if {*map(len, values)} != self._lengths:
                raise ValueError("rows of several lengths")  # whose sum may be right
            casting: Literal["safe", "same_kind"] = "safe" if self._is_bytes else "same_kind"
            np.concatenate(values, out=target.reshape(self._joined), casting=casting)
        if self.start is not None:
            target -= self.start


def _fits(dtype: np.dtype, leaf: Leaf) -> bool:
    return dtype.kind in "biu" or (dtype.kind == "f" and leaf.dtype.kind == "f")


_BYTES = "B?"
"""Characters of dtypes that have no values outside 0 to 255: uint8 and bool."""


def _are_bytes(integers: np.ndarray, high: int) -> bool:
    """Whether all are integers from 0 to `high`; at no cost, and so unknown, of those that are bytes already."""
    if integers.dtype.char in _BYTES or not integers.size:
        return True
    return integers.dtype.kind in "iu" and bool(integers.min() >= 0 and integers.max() <= high)


def _beyond_bytes(value: np.ndarray, leaf: Leaf) -> str | None:
    """What is wrong with integers for a leaf of bytes, if anything is."""
    if leaf.dtype != np.uint8 or _are_bytes(value, leaf.high):
        return None
    return (
        f"the observation {leaf.name} has values from {value.min()} to {value.max()}, and its space none outside 0 to "
        f"{leaf.high}; correct the values, or widen the space. It is {shown(value)}"
    )


def mask_in(holder: Any) -> Any:
    """The action mask in an info or a Dict observation, or None."""
    return holder.get(MASK_KEY) if isinstance(holder, Mapping) else None


def is_extra(key: Any) -> bool:
    """Whether an entry of an info is the environment's own, and not one of those that Gymnasium puts there."""
    return isinstance(key, str) and key not in _NO_EXTRAS and not key.startswith("final_")


def numeric_extras(info: Mapping[str, Any]) -> dict[str, float]:
    """The finite numeric scalars of an episode's last info, without the entries that Gymnasium itself puts there."""
    extras = {}
    for key, value in info.items():
        if not is_extra(key):
            continue
        if isinstance(value, bool | int | float | np.number | np.bool_) and not isinstance(value, np.complexfloating):
            with contextlib.suppress(OverflowError, TypeError):  # of a number beyond all floats, and of a time
                if math.isfinite(number := float(value)):
                    extras[key] = number
    return extras


def new_step_buffers(spec: EnvSpec, rows: int) -> StepBuffers:
    """Step buffers of zeros that are no views into a slot."""
    mask = np.zeros((rows, spec.action.logits), bool) if spec.masked else None
    obs = tuple(np.zeros((rows, *leaf.shape), leaf.dtype) for leaf in spec.observation.leaves)
    return StepBuffers(obs, mask, np.zeros(rows, bool), np.zeros(rows, bool))
