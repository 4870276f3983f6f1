"""How weights begin."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from contextvars import ContextVar
from typing import TypeVar

from torch import Tensor, nn

HIDDEN_GAIN = math.sqrt(2)
Layer = TypeVar("Layer", nn.Linear, nn.Conv2d)
_skipping_orthogonal = ContextVar("_skipping_orthogonal", default=False)


def orthogonal_(weight: Tensor) -> None:
    """Make a matrix orthogonal, in place; within :func:`skip_orthogonal` small random numbers, quickly drawn."""
    if _skipping_orthogonal.get():
        bound = weight.shape[-1] ** -0.5
        nn.init.uniform_(weight, -bound, bound)
    else:
        nn.init.orthogonal_(weight)


def orthogonal(layer: Layer, gain: float = HIDDEN_GAIN) -> Layer:
    """Give a layer orthogonal weights of a gain and a zero bias (Saxe et al. 2014), in place; nothing within
    :func:`skip_orthogonal`."""
    if not _skipping_orthogonal.get():
        nn.init.orthogonal_(layer.weight, gain)
        if layer.bias is not None:
            nn.init.zeros_(layer.bias)
    return layer


@contextlib.contextmanager
def skip_orthogonal() -> Iterator[None]:
    """Give what is made within it quickly drawn weights: to make a layer of 3136 x 512 orthogonal takes a tenth of a
    second."""
    token = _skipping_orthogonal.set(True)
    try:
        yield
    finally:
        _skipping_orthogonal.reset(token)
