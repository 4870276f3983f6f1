"""How weights begin."""

from __future__ import annotations

import math
from typing import TypeVar

from torch import nn

HIDDEN_GAIN = math.sqrt(2)
Layer = TypeVar("Layer", nn.Linear, nn.Conv2d)


def orthogonal(layer: Layer, gain: float = HIDDEN_GAIN) -> Layer:
    """Give a layer orthogonal weights of a gain and a zero bias (Saxe et al. 2014), in place."""
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer
