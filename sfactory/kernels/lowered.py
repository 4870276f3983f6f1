"""Weights kept in autocast's dtype between forward passes."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


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
    """Copy a model's present weights into autocast's dtype where its modules can keep such copies, which they use only
    while gradients are off. To be called after each change of the weights; None drops the copies."""
    for module in model.modules():
        if isinstance(module, Lowered):
            module.lower(dtype)
