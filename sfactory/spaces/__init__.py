"""Observation and action spaces as flat lists of arrays.

An observation space, however nested, becomes a tuple of :class:`Leaf`; an action space becomes an :class:`ActionSpec`:
K categorical components and D Gaussian dimensions, whatever the structure of the space. Arenas, models and environments
all speak of these.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from sfactory.errors import ConfigError

if TYPE_CHECKING:
    from gymnasium import spaces
else:
    try:
        from gymnasium import spaces
    except ImportError:  # a process that plays a saved policy needs no environment
        from sfactory.spaces import plain as spaces

MASK_KEY = "action_mask"


@dataclass(frozen=True)
class Leaf:
    """One array of an observation.

    Attributes:
        name: Path joined with "/", for example ``obs`` (a bare space), ``obs/screen`` or ``obs/0/pos``.
        path: Keys and indices that lead from the observation to this leaf.
        shape: Of one observation, without batch dimensions.
        dtype: As stored: uint8 (images, bits), int32 (categories) or float32 (everything else).
        sizes: Numbers of categories of a Discrete or MultiDiscrete leaf, flattened; empty for a Box.
        start: Smallest category of each component, subtracted when stored; same length as `sizes`.
        high: Largest value of a uint8 leaf (255 for most images, 1 for bits): a model divides by it.
    """

    name: str
    path: tuple[str | int, ...]
    shape: tuple[int, ...]
    dtype: np.dtype
    sizes: tuple[int, ...] = ()
    start: tuple[int, ...] = ()
    high: int = 255

    @property
    def is_image(self) -> bool:
        """Whether an image encoder suits: three dimensions of which two have at least 7 pixels."""
        return len(self.shape) == 3 and sorted(self.shape)[1] >= 7 and not self.sizes

    @property
    def channels_last(self) -> bool:
        """Whether an image's channels are its last dimension (H, W, C); else (C, H, W)."""
        return self.is_image and self.shape[2] < self.shape[0]

    @property
    def sides(self) -> tuple[int, int]:
        """Height and width of an image."""
        return self.shape[:2] if self.channels_last else self.shape[1:]


@dataclass(frozen=True)
class ObservationSpec:
    """The leaves of an observation space, in a fixed order, and where an action mask is found in it."""

    leaves: tuple[Leaf, ...]
    mask_path: tuple[str | int, ...] | None = None
    ignored: tuple[str, ...] = ()
    """Leaves that cannot be learned from (Text) and are left out."""
    space: spaces.Space | None = field(default=None, compare=False)
    """The space as the environment has it."""

    @property
    def has_images(self) -> bool:
        """Whether an image encoder suits any of the leaves."""
        return any(leaf.is_image for leaf in self.leaves)

    @classmethod
    def from_space(cls, space: spaces.Space) -> ObservationSpec:
        """Flatten an observation space.

        A top-level Dict's ``action_mask`` entry is taken as the mask, not as an observation. Text leaves are left out.

        Raises:
            ConfigError: On a space without usable leaves, or with leaves that cannot be learned from.
        """
        leaves: list[Leaf] = []
        ignored: list[str] = []
        mask_path = None
        for path, leaf_space in _walk(space):
            if path == (MASK_KEY,):
                mask_path = path
            elif leaf_space.dtype is not None and leaf_space.dtype.kind == "U":
                ignored.append("/".join(map(str, path)))
            else:
                leaves.append(_leaf(path, leaf_space))
        if not leaves:
            raise ConfigError(
                f"the observation space {space} has nothing to learn from; supported: Box, Discrete, MultiDiscrete, "
                "MultiBinary, and Dict or Tuple of them"
            )
        return cls(tuple(leaves), mask_path, tuple(ignored), space)

    def values(self, observation: Any) -> Iterator[Any]:
        """The leaves' values in one (or a batched) observation, in the order of `leaves`."""
        for leaf in self.leaves:
            value = observation
            for key in leaf.path:
                value = value[key]
            yield value

    def mask(self, observation: Any) -> Any | None:
        """The observation's action mask, or None if the space has none."""
        return None if self.mask_path is None else observation[self.mask_path[0]]


def _walk(
    space: spaces.Space, path: tuple[str | int, ...] = ()
) -> Iterator[tuple[tuple[str | int, ...], spaces.Space]]:
    """The leaf spaces of a nested space with their paths: Dict in the space's own order, Tuple by index."""
    if isinstance(space, spaces.Dict):
        for key, sub in space.spaces.items():
            yield from _walk(sub, (*path, key))
    elif isinstance(space, spaces.Tuple):
        for index, sub in enumerate(space.spaces):
            yield from _walk(sub, (*path, index))
    else:
        yield path, space


def _leaf(path: tuple[str | int, ...], space: spaces.Space) -> Leaf:
    name = "/".join(("obs", *map(str, path)))
    if isinstance(space, spaces.Discrete):
        return Leaf(name, path, (), np.dtype(np.int32), (int(space.n),), (int(space.start),))
    if isinstance(space, spaces.MultiDiscrete):
        return Leaf(
            name,
            path,
            space.shape,
            np.dtype(np.int32),
            tuple(map(int, space.nvec.flat)),
            tuple(map(int, space.start.flat)),
        )
    if isinstance(space, spaces.MultiBinary):
        return Leaf(name, path, space.shape, np.dtype(np.uint8), high=1)
    if isinstance(space, spaces.Box):
        if 0 in space.shape:
            raise ConfigError(f"the observation {name} has an empty shape {space.shape}; remove it from the space")
        stored = np.uint8 if space.dtype in (np.dtype(np.uint8), np.dtype(bool)) else np.float32
        high = max(1, int(space.high.max())) if stored is np.uint8 else 255
        return Leaf(name, path, space.shape, np.dtype(stored), high=high)
    raise ConfigError(
        f"the observation space of {name}, {space}, is not supported; use Box, Discrete, MultiDiscrete, MultiBinary, "
        "and "
        "Dict or Tuple of them, or a gymnasium.ObservationWrapper that makes one of them"
    )


@dataclass(frozen=True)
class _Part:
    """A leaf of an action space and the slice of the flat action that it owns."""

    path: tuple[str | int, ...]
    space: spaces.Space
    begin: int
    end: int

    @functools.cached_property
    def scale(self) -> _BoxScale:
        """How Gaussian samples get into a Box."""
        return _BoxScale(self.space)


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
        for path, sub in _walk(space):
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
        if not parts:
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
        if not self.parts[0].path:
            return self._convert(self.parts[0], categorical, continuous)
        return _nest(self.space, [(part.path, self._convert(part, categorical, continuous)) for part in self.parts])

    def rows(self, categorical: np.ndarray, continuous: np.ndarray) -> Sequence[Any]:
        """Environment actions as a sequence with one entry per row. A bare Discrete gives Python ints."""
        if isinstance(self.space, spaces.Discrete):
            values = categorical[:, 0]
            return (values + self.space.start if self.space.start else values).tolist()
        batch = self.batch(categorical, continuous)
        if isinstance(batch, np.ndarray):
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
        values = values.reshape(rows, *space.shape).astype(space.dtype)
        return values + space.start if isinstance(space, spaces.MultiDiscrete) else values

    def flat_mask(self, mask: Any) -> np.ndarray:
        """One environment's action mask (an array, or a tuple or Dict of arrays, one per component) as bool
        ``[logits]``.

        Raises:
            ValueError: If its size is not that of the logits.
        """
        if isinstance(mask, Mapping):
            mask = [mask[key] for key in mask]
        if isinstance(mask, list | tuple):
            mask = np.concatenate([np.ravel(m) for m in mask])
        flat = np.asarray(mask).ravel().astype(bool)
        if flat.size != self.logits:
            raise ValueError(f"the action mask has {flat.size} entries, the action space has {self.logits} categories")
        return flat


class _BoxScale:
    """Maps unbounded Gaussian samples into a Box.

    Where both bounds are finite, clip(u, -1, 1) or tanh(u) is scaled linearly to [low, high]; elsewhere u itself is
    clipped to the bounds.
    """

    def __init__(self, space: spaces.Box) -> None:
        self._low, self._high, self._dtype = space.low, space.high, space.dtype
        self._bounded = space.bounded_below & space.bounded_above
        low, high = (np.where(self._bounded, bound, 0) for bound in (self._low, self._high))
        self._centre, self._half = (high + low) / 2, (high - low) / 2
        self._all, self._any = bool(self._bounded.all()), bool(self._bounded.any())

    def __call__(self, u: np.ndarray, squash: Literal["clip", "tanh"]) -> np.ndarray:
        """The actions for samples float32 ``[rows, *space.shape]``."""
        if self._any:
            unit = np.tanh(u) if squash == "tanh" else np.minimum(np.maximum(u, -1.0), 1.0)
            scaled = self._centre + self._half * unit
            u = scaled if self._all else np.where(self._bounded, scaled, u)
        return np.minimum(np.maximum(u, self._low), self._high).astype(self._dtype, copy=False)


def _nest(space: spaces.Space, values: list[tuple[tuple[str | int, ...], Any]]) -> Any:
    """Put leaf values back into the structure of a space."""
    by_path = dict(values)

    def build(sub: spaces.Space, path: tuple[str | int, ...]) -> Any:
        if isinstance(sub, spaces.Dict):
            return {key: build(child, (*path, key)) for key, child in sub.spaces.items()}
        if isinstance(sub, spaces.Tuple):
            return tuple(build(child, (*path, i)) for i, child in enumerate(sub.spaces))
        return by_path[path]

    return build(space, ())


def _row(batch: Any, index: int) -> Any:
    if isinstance(batch, dict):
        return {key: _row(value, index) for key, value in batch.items()}
    if isinstance(batch, tuple):
        return tuple(_row(value, index) for value in batch)
    return batch[index]
