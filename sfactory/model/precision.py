"""Where mixed precision begins and ends."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def mixed_precision(device_type: str, dtype: torch.dtype | None, *, keep_casts: bool = True) -> AbstractContextManager:
    """A context in which autocast computes in a dtype; None: no autocast.

    Args:
        keep_casts: Autocast casts each weight once and keeps the result until the context ends.
    """
    return nullcontext() if dtype is None else torch.autocast(device_type, dtype, cache_enabled=keep_casts)


def full_precision(device: torch.device) -> AbstractContextManager:
    """A context in which autocast is off."""
    if torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()


def compute_dtype(weight: Tensor) -> torch.dtype:
    """The dtype in which a product with a weight runs: autocast's where it is on, else the weight's own."""
    device = weight.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype
