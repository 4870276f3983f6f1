"""Action spaces as categorical components and Gaussian dimensions, whatever their structure."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import numpy as np

from sfactory.errors import ConfigError
from sfactory.spaces.structure import spaces, walk


@dataclass(frozen=True)
class _Part:
    """A leaf of an action space and the slice of the flat action that it owns."""

    path: tuple[str | int, ...]
    space: spaces.Space
    begin: int
    end: int

    @functools.cached_property
    def scale(self) -> BoxScale:
        """How Gaussian samples get into a Box."""
        return BoxScale(cast(spaces.Box, self.space))


@dataclass(frozen=True)
class ActionSpec:
    """An action space as K independent categorical components and D Gaussian dimensions.

    Discrete is one component; MultiDiscrete one per entry; MultiBinary one of size 2 per bit; Box one Gaussian
    dimension per entry. Tuple and Dict concatenate their members'. A sample is a pair (categorical int32 ``[..., K]``,
    continuous float32 ``[..., D]``); continuous values are the Gaussian's own ``u``, before squashing, so that
    probabilities of stored actions are exact.
    """

    space: spaces.Space
    sizes: tuple[int, ...]
    continuous: int
    squash: Literal["clip", "tanh"] = "clip"
    parts: tuple[_Part, ...] = ()

    @classmethod
    def from_space(cls, space: spaces.Space, squash: Literal["clip", "tanh"] = "clip") -> ActionSpec:
        """Flatten an action space.

        Raises:
            ConfigError: On a leaf that is not Discrete, MultiDiscrete, MultiBinary or a float Box.
        """
        sizes: list[int] = []
        parts: list[_Part] = []
        continuous = 0
        for path, sub in walk(space):
            if isinstance(sub, spaces.Box) and np.issubdtype(sub.dtype, np.floating):
                count = int(np.prod(sub.shape))
                parts.append(_Part(path, sub, continuous, continuous + count))
                continuous += count
                continue
            if isinstance(sub, spaces.Discrete):
                own = [int(sub.n)]
            elif isinstance(sub, spaces.MultiDiscrete):
                own = [int(n) for n in sub.nvec.flat]
            elif isinstance(sub, spaces.MultiBinary):
                own = [2] * int(np.prod(sub.shape))
            else:
                raise ConfigError(
                    f"the action space {sub} is not supported; use Discrete, MultiDiscrete, MultiBinary, a Box of "
                    "floats, or Tuple and Dict of them"
                )
            parts.append(_Part(path, sub, len(sizes), len(sizes) + len(own)))
            sizes += own
        if not sizes and not continuous:
            raise ConfigError(f"the action space {space} is empty")
        return cls(space, tuple(sizes), continuous, squash, tuple(parts))

    @property
    def logits(self) -> int:
        """Total number of categories: the width of the categorical logits and of an action mask."""
        return sum(self.sizes)

    def batch(self, categorical: np.ndarray, continuous: np.ndarray) -> Any:
        """Environment actions for all rows at once: arrays with a leading row dimension, nested as the space is.

        Args:
            categorical: int32 ``[rows, K]``.
            continuous: float32 ``[rows, D]``, unsquashed.
        """
        return self.nested({part.path: self._convert(part, categorical, continuous) for part in self.parts})

    def nested(self, values: dict[tuple[str | int, ...], Any]) -> Any:
        """The parts' values, by their paths, in the structure of the space."""
        return values[()] if not self.parts[0].path else _nest(self.space, values)

    def rows(self, categorical: np.ndarray, continuous: np.ndarray) -> Sequence[Any] | np.ndarray:
        """Environment actions as a sequence with one entry per row. A bare Discrete gives Python ints."""
        if isinstance(self.space, spaces.Discrete):
            values = categorical[:, 0]
            return (values + self.space.start if self.space.start else values).tolist()
        batch = self.batch(categorical, continuous)
        if isinstance(batch, np.ndarray) and batch.ndim > 1:
            return batch
        return [_row(batch, i) for i in range(len(categorical))]

    def _convert(self, part: _Part, categorical: np.ndarray, continuous: np.ndarray) -> np.ndarray:
        space, rows = part.space, len(categorical)
        if isinstance(space, spaces.Box):
            u = continuous[:, part.begin : part.end].reshape(rows, *space.shape)
            return part.scale(u, self.squash)
        values = categorical[:, part.begin : part.end]
        if isinstance(space, spaces.Discrete):
            actions = values[:, 0].astype(np.int64)
            return actions + int(space.start) if space.start else actions
        values = values.reshape(rows, *(space.shape or ())).astype(space.dtype)
        return values + space.start if isinstance(space, spaces.MultiDiscrete) else values

    def flat_mask(self, mask: Any) -> np.ndarray:
        """One environment's action mask (an array, or a tuple or Dict of arrays, one per component) as bool
        ``[logits]``.

        Raises:
            ValueError: If its size is not that of the logits, or an entry of a Dict is missing.
        """
        flat = np.concatenate([np.ravel(part) for part in self.mask_parts(mask)]).astype(bool)
        if flat.size != self.logits:
            raise ValueError(f"the action mask has {flat.size} entries, the action space has {self.logits} categories")
        return flat

    def flat_masks(self, masks: Any, present: np.ndarray) -> np.ndarray:
        """The action masks of several rows as bool ``[rows, *]``, where `*` is `logits` if they fit.

        Args:
            masks: An array, or a tuple or Dict of arrays, with a leading dimension; or one mask for each row, in a list
                or an array of objects.
            present: bool ``[rows]``; the row has a mask. In a list others are allowed everything.

        Raises:
            ValueError: If there are not as many as rows, or one of several does not fit the action space.
        """
        rows = len(present)
        if isinstance(masks, list) or (isinstance(masks, np.ndarray) and masks.dtype == object):
            if len(masks) != rows:
                raise ValueError(f"there are {len(masks)} action masks for {rows} rows; give one for each")
            allowed = np.ones(self.logits, bool)
            return np.stack([self.flat_mask(masks[row]) if present[row] else allowed for row in range(rows)])
        parts = [np.asarray(part) for part in self.mask_parts(masks)]
        if any(part.shape[:1] != (rows,) for part in parts):
            raise ValueError(
                f"the action mask has the shape {', '.join(str(part.shape) for part in parts)}; it needs a leading "
                f"dimension of {rows}, one row for each observation"
            )
        return np.concatenate([part.reshape(rows, -1) for part in parts], axis=1).astype(bool)

    def mask_parts(self, mask: Any) -> list[Any]:
        """The arrays of an action mask, one environment's or a batch of them, in the order of the logits: those of a
        Dict are found by the names in the space, whose order Gymnasium chooses.

        Raises:
            ValueError: If an entry of a Dict is missing, or the actions are numbers alone.
        """
        if not self.sizes:
            raise ValueError(
                f"an action_mask forbids categories, and the action space {self.space} has none; leave it out, or give "
                "it another name"
            )
        return list(_mask_parts(self.space, mask))


class BoxScale:
    """Maps unbounded Gaussian samples into a Box.

    Where both bounds are finite, clip(u, -1, 1) or tanh(u) is scaled linearly to [low, high]; elsewhere u itself is
    clipped to the bounds and to the numbers of the dtype. Bounds so far apart that twice their distance overflows count
    as none.

    Attributes:
        low, high: Of the Box, or the ends of what its dtype holds.
        bounded: bool ``[*space.shape]``.
        centre, half_width: Of the bounded dimensions, 0 elsewhere.
    """

    def __init__(self, space: spaces.Box) -> None:
        self._dtype: np.dtype[Any] = space.dtype
        ends = np.finfo(cast(Any, space.dtype))
        self.low, self.high = np.maximum(space.low, ends.min), np.minimum(space.high, ends.max)
        with np.errstate(over="ignore", invalid="ignore"):
            self.bounded = (
                space.bounded_below
                & space.bounded_above
                & np.isfinite(np.float32(2) * (space.high - space.low).astype(np.float32))
            )
        low, high = (np.where(self.bounded, bound, 0) for bound in (self.low, self.high))
        self.centre, self.half_width = (high + low) / 2, (high - low) / 2
        self._all, self._any = bool(self.bounded.all()), bool(self.bounded.any())

    def __call__(self, u: np.ndarray, squash: Literal["clip", "tanh"]) -> np.ndarray:
        """The actions for samples float32 ``[rows, *space.shape]``."""
        if self._any:
            unit = np.tanh(u) if squash == "tanh" else np.minimum(np.maximum(u, -1.0), 1.0)
            scaled = self.centre + self.half_width * unit
            u = scaled if self._all else np.where(self.bounded, scaled, u)
        return np.minimum(np.maximum(u, self.low), self.high).astype(self._dtype, copy=False)


def _nest(space: spaces.Space, by_path: dict[tuple[str | int, ...], Any]) -> Any:
    """Put leaf values back into the structure of a space."""

    def build(sub: spaces.Space, path: tuple[str | int, ...]) -> Any:
        if isinstance(sub, spaces.Dict):
            return {key: build(child, (*path, key)) for key, child in sub.spaces.items()}
        if isinstance(sub, spaces.Tuple):
            return tuple(build(child, (*path, i)) for i, child in enumerate(sub.spaces))
        return by_path[path]

    return build(space, ())


def _mask_parts(space: spaces.Space | None, mask: Any) -> Iterator[Any]:
    """The arrays of an action mask, nested as the space is, in which a Box needs none."""
    if isinstance(mask, Mapping) and isinstance(space, spaces.Dict):
        for key, child in space.spaces.items():
            if key in mask:
                yield from _mask_parts(child, mask[key])
            elif any(not isinstance(leaf, spaces.Box) for _, leaf in walk(child)):
                raise ValueError(f"the action mask has no {key!r}, an entry of the action space; it has {list(mask)}")
    elif isinstance(mask, Mapping | list | tuple):
        parts = (
            list(mask) if not isinstance(mask, Mapping) else [mask[key] for key in mask if not str(key).startswith("_")]
        )
        same = isinstance(space, spaces.Tuple) and len(space.spaces) == len(parts)
        children: Sequence[spaces.Space | None] = cast(spaces.Tuple, space).spaces if same else [None] * len(parts)
        for of_space, part in zip(children, parts, strict=True):
            yield from _mask_parts(of_space, part)
    elif not isinstance(space, spaces.Box):
        yield mask


def _row(batch: Any, index: int) -> Any:
    if isinstance(batch, dict):
        return {key: _row(value, index) for key, value in batch.items()}
    if isinstance(batch, tuple):
        return tuple(_row(value, index) for value in batch)
    # A Box without dimensions has arrays for actions, a Discrete has numbers.
    return batch[index, ...] if batch.dtype.kind == "f" else batch[index]
