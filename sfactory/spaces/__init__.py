"""Observation and action spaces as flat lists of arrays.

An observation space, however nested, becomes a tuple of :class:`Leaf`; an action space becomes an :class:`ActionSpec`:
K categorical components and D Gaussian dimensions, whatever the structure of the space. Arenas, models and environments
all speak of these.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast

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
MOST_CATEGORIES = 32
"""An integer Box of at most so many values holds categories; of more, quantities or brightness."""
LEAST_SIDE = 7
"""Pixels of each side from which an array may be a picture."""


class Reading(NamedTuple):
    """How a model reads what a space leaves open.

    Attributes:
        categories: Values of an integer Box that holds categories though its bounds allow for more; 0: no Box holds
            categories; None: those of small bounds do.
        channels: Where an image's channels are: first, last, or auto, by its shape.
        images: Whether any leaf may be an image; off where everything is flattened.
    """

    categories: int | None = None
    channels: Literal["auto", "first", "last"] = "auto"
    images: bool = True

    @classmethod
    def of(cls, model: Any) -> Reading:
        """That of a :class:`sfactory.config.ModelConfig`."""
        return cls(model.categories, model.channels, model.encoder != "mlp")


AS_DECLARED = Reading()
"""By the space alone."""


@dataclass(frozen=True)
class Leaf:
    """One array of an observation.

    Attributes:
        name: Path joined with "/", for example ``obs`` (a bare space), ``obs/screen`` or ``obs/0/pos``.
        path: Keys and indices that lead from the observation to this leaf.
        shape: Of one observation, without batch dimensions.
        dtype: As stored: uint8 (images, bits, categories of a uint8 Box), int32 (other categories) or float32
            (everything else).
        sizes: Numbers of categories of each entry, flattened; empty where entries are quantities.
        start: Smallest category of each entry, subtracted when stored; same length as `sizes`.
        high: Largest value of a uint8 leaf without categories (255 for most images, 1 for bits): a model divides by it.
        layout: hwc or chw for an image, whose categories, if it has any, are as many in every entry; flat for all else.
    """

    name: str
    path: tuple[str | int, ...]
    shape: tuple[int, ...]
    dtype: np.dtype
    sizes: tuple[int, ...] = ()
    start: tuple[int, ...] = ()
    high: int = 255
    layout: Literal["flat", "hwc", "chw"] = "flat"

    @property
    def is_image(self) -> bool:
        """Whether an image encoder suits."""
        return self.layout != "flat"

    @property
    def is_flat_picture(self) -> bool:
        """Whether these are bytes like a picture's, which has two dimensions or four where an image has three."""
        return self.dtype == np.uint8 and len(self.shape) in (2, 4) and sorted(self.shape)[-2] >= LEAST_SIDE

    @property
    def channels_last(self) -> bool:
        """Whether an image's channels are its last dimension (H, W, C); else (C, H, W)."""
        return self.layout == "hwc"

    @property
    def channels(self) -> int:
        """Channels of an image as it is stored."""
        return self.shape[2] if self.channels_last else self.shape[0]

    @property
    def sides(self) -> tuple[int, int]:
        """Height and width of an image."""
        height, width = self.shape[:2] if self.channels_last else self.shape[1:]
        return height, width


@dataclass(frozen=True)
class ObservationSpec:
    """The leaves of an observation space, in a fixed order, and where an action mask is found in it."""

    leaves: tuple[Leaf, ...]
    mask_path: tuple[str | int, ...] | None = None
    ignored: tuple[str, ...] = ()
    """Leaves that cannot be learned from (Text) and are left out."""
    space: spaces.Space | None = field(default=None, compare=False)
    """The space as the environment has it."""
    reading: Reading = field(default=AS_DECLARED, compare=False)
    """How the leaves were made of it."""

    @property
    def has_images(self) -> bool:
        """Whether an image encoder suits any of the leaves."""
        return any(leaf.is_image for leaf in self.leaves)

    @property
    def has_floats(self) -> bool:
        """Whether any of the leaves are floating-point numbers."""
        return any(leaf.dtype == "float32" for leaf in self.leaves)

    @classmethod
    def from_space(cls, space: spaces.Space, reading: Reading = AS_DECLARED) -> ObservationSpec:
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
                leaves.append(_leaf(path, leaf_space, reading))
        if not leaves:
            raise ConfigError(
                f"the observation space {space} has nothing to learn from; supported: Box, Discrete, MultiDiscrete, "
                "MultiBinary, and Dict or Tuple of them"
            )
        names = [leaf.name for leaf in leaves]
        if twice := [name for name in dict.fromkeys(names) if names.count(name) > 1]:
            raise ConfigError(
                f"two entries of the observation space have the name {twice[0]}; rename a key of its Dicts"
            )
        return cls(tuple(leaves), mask_path, tuple(ignored), space, reading)

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


def _leaf(path: tuple[str | int, ...], space: spaces.Space, reading: Reading) -> Leaf:
    name = "/".join(("obs", *map(str, path)))
    if isinstance(space, spaces.Discrete):
        return Leaf(name, path, (), np.dtype(np.int32), (int(space.n),), (int(space.start),))
    if isinstance(space, spaces.MultiDiscrete):
        sizes, start = tuple(map(int, space.nvec.flat)), tuple(map(int, space.start.flat))
        layout = _layout(space.shape, reading) if len({*zip(sizes, start, strict=True)}) == 1 else "flat"
        return Leaf(name, path, space.shape, np.dtype(np.int32), sizes, start, layout=layout)
    if isinstance(space, spaces.MultiBinary):
        return Leaf(name, path, space.shape, np.dtype(np.uint8), high=1, layout=_layout(space.shape, reading))
    if isinstance(space, spaces.Box):
        if 0 in space.shape:
            raise ConfigError(f"the observation {name} has an empty shape {space.shape}; remove it from the space")
        return _box_leaf(name, path, space, reading)
    raise ConfigError(
        f"the observation space of {name}, {space}, is not supported; use Box, Discrete, MultiDiscrete, MultiBinary, "
        "and Dict or Tuple of them, or a gymnasium.ObservationWrapper that makes one of them"
    )


def _box_leaf(name: str, path: tuple[str | int, ...], space: spaces.Box, reading: Reading) -> Leaf:
    """A Box's leaf: bits, categories, bytes or floats.

    An image's categories have the bounds of the whole image, so that all of its pixels are of one kind.
    """
    layout, is_bytes = _layout(space.shape, reading), space.dtype in (np.dtype(np.uint8), np.dtype(bool))
    lowest, highest, size = space.low.min(), space.high.max(), int(np.prod(space.shape))
    integers = space.dtype.kind in "iu"
    if space.dtype == bool or (integers and lowest >= 0 and highest <= 1):
        return Leaf(name, path, space.shape, np.dtype(np.uint8), high=1, layout=layout)
    stored = np.dtype(np.uint8 if is_bytes else np.int32)
    if integers and reading.categories != 0:
        if int(highest) - int(lowest) < MOST_CATEGORIES:
            low, high = ([int(value) for value in bound.flat] for bound in (space.low, space.high))
            if layout != "flat":
                low, high = [int(lowest)] * size, [int(highest)] * size
            sizes = tuple(above - below + 1 for below, above in zip(low, high, strict=True))
            return Leaf(name, path, space.shape, stored, sizes, tuple(low), layout=layout)
        if reading.categories is not None:
            sizes = (reading.categories,) * size
            return Leaf(name, path, space.shape, stored, sizes, (0,) * size, layout=layout)
    if is_bytes:
        return Leaf(name, path, space.shape, stored, high=max(1, int(highest)), layout=layout)
    return Leaf(name, path, space.shape, np.dtype(np.float32), layout=layout)


def _layout(shape: tuple[int, ...], reading: Reading) -> Literal["flat", "hwc", "chw"]:
    """Whether three dimensions are an image, two of them with at least LEAST_SIDE pixels, and where its channels are.

    Of a square image they are what is beside the two equal sides, of another the smaller of the first and the last
    dimension; where all are equal the last, as Gymnasium's images have it.
    """
    if not reading.images or len(shape) != 3 or sorted(shape)[1] < LEAST_SIDE:
        return "flat"
    first, middle, last = shape
    if reading.channels != "auto":
        return "hwc" if reading.channels == "last" else "chw"
    if first == middle:
        return "hwc"
    return "hwc" if middle != last and last < first else "chw"


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
            elif any(not isinstance(leaf, spaces.Box) for _, leaf in _walk(child)):
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
