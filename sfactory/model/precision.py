"""Where mixed precision begins and ends."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def full_precision(device: torch.device) -> AbstractContextManager:
    """A context in which autocast is off."""
    if torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()


def compute_dtype(weight: Tensor) -> torch.dtype:
    """The dtype in which a product with a weight runs: autocast's where it is on, else the weight's own."""
    device = weight.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype
