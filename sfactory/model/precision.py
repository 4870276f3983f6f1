"""Where mixed precision begins and ends."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn


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


class Lowered(nn.Module):
    """Base of modules that can keep a copy of their weights in autocast's dtype, ready for use, between batches.

    Autocast casts float32 weights at every call, and oneDNN brings them into its own order, which at the batch sizes of
    inference costs as much as a fifth of the products.
    """

    _lowered: Any = None

    def lower(self, dtype: torch.dtype | None) -> None:
        """Copy the present weights for use where gradients are off; None goes back to the weights themselves."""
        with torch.no_grad():
            self._lowered = None if dtype is None else self._cast_weights(dtype)

    @property
    def lowered(self) -> Any:
        """The copy, if there is one and gradients are off."""
        return None if torch.is_grad_enabled() else self._lowered

    def _cast_weights(self, dtype: torch.dtype) -> Any:
        raise NotImplementedError


def lower_weights(model: nn.Module, dtype: torch.dtype | None) -> None:
    """Let those modules of a model that can keep a copy of their present weights in autocast's dtype, used only while
    gradients are off.

    A policy worker that computes under autocast calls this after each change of the weights; None drops the copies.
    """
    for module in model.modules():
        if isinstance(module, Lowered):
            module.lower(dtype)


def compute_dtype(weight: Tensor) -> torch.dtype:
    """The dtype in which a product with a weight runs: autocast's where it is on, else the weight's own."""
    device = weight.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype
