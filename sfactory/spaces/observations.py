"""Observation spaces as flat lists of arrays: one :class:`Leaf` for each, however nested the space is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np

from sfactory.errors import ConfigError
from sfactory.spaces.structure import MASK_KEY, spaces, walk

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
        for path, leaf_space in walk(space):
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
