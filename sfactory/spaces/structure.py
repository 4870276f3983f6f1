"""How a space is nested, with Gymnasium's spaces or, where that is not installed, with plain ones."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gymnasium import spaces
else:
    try:
        from gymnasium import spaces
    except ImportError:  # a process that plays a saved policy needs no environment
        from sfactory.spaces import plain as spaces

__all__ = ["MASK_KEY", "spaces", "walk"]

MASK_KEY = "action_mask"
"""Entry of a Dict observation, or of an info, that has the actions which are allowed."""


def walk(space: spaces.Space, path: tuple[str | int, ...] = ()) -> Iterator[tuple[tuple[str | int, ...], spaces.Space]]:
    """The leaf spaces of a nested space with their paths: Dict in the space's own order, Tuple by index."""
    if isinstance(space, spaces.Dict):
        for key, sub in space.spaces.items():
            yield from walk(sub, (*path, key))
    elif isinstance(space, spaces.Tuple):
        for index, sub in enumerate(space.spaces):
            yield from walk(sub, (*path, index))
    else:
        yield path, space
