"""In which ways observations are not what their spaces promise."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from gymnasium import spaces

from sfactory.errors import shown


def misfits(name: str, space: spaces.Space, value: Any) -> Iterator[str]:
    """In which ways a value is not in its space."""
    match space:
        case spaces.Dict():
            if not isinstance(value, Mapping) or value.keys() != space.spaces.keys():
                yield (
                    f"{name} has the keys {shown(list(value) if isinstance(value, Mapping) else value, 80)}; its "
                    f"space has {list(space.spaces)}"
                )
                return
            for key, part in space.spaces.items():
                yield from misfits(f"{name}[{key!r}]", part, value[key])
        case spaces.Tuple():
            if not isinstance(value, tuple) or len(value) != len(space.spaces):
                yield f"{name} is {shown(value, 80)}; its space is a tuple of {len(space.spaces)}"
                return
            for index, part in enumerate(space.spaces):
                yield from misfits(f"{name}[{index}]", part, value[index])
        case spaces.Box():
            yield from _box_misfits(name, space, value)
        case _ if not space.contains(value):
            yield f"{name} is not in its space {space}"


def _box_misfits(name: str, space: spaces.Box, value: Any) -> Iterator[str]:
    array = np.asarray(value)
    if array.shape != space.shape:
        yield f"{name} has shape {array.shape}; its space has {space.shape}"
        return
    if not isinstance(value, np.ndarray):
        yield f"{name} is a {type(value).__name__}; its space promises an array of {space.dtype}"
    elif array.dtype != space.dtype:
        yield f"{name} has dtype {array.dtype}; its space has {space.dtype}"
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        yield f"{name} has entries that are not finite (NaN or infinity)"
    elif array.dtype.kind in "fiub" and ((array < space.low) | (array > space.high)).any():
        yield f"{name} leaves the bounds of its space"
