"""Heads: features to policy parameters and values, always in float32."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from sfactory.model.initialization import orthogonal
from sfactory.spaces import ActionSpec

LOG_STD_RANGE = (-5.0, 2.0)


class PolicyHead(nn.Module):
    """Features to ``params [..., P]``: categorical logits, Gaussian means and log standard deviations, clamped to [-5,
    2].

    Args:
        in_features: Width of the features.
        action: The action space.
        adaptive_std: The log standard deviations depend on the features; else they are one learned vector.
        initial_log_std: Where they begin.
    """

    def __init__(
        self, in_features: int, action: ActionSpec, adaptive_std: bool = False, initial_log_std: float = 0.0
    ) -> None:
        super().__init__()
        self.dims, fixed = action.continuous, action.logits + action.continuous
        self.linear = orthogonal(nn.Linear(in_features, fixed + (self.dims if adaptive_std else 0)), 0.01)
        self.log_std = (
            nn.Parameter(torch.full((self.dims,), initial_log_std)) if self.dims and not adaptive_std else None
        )
        if adaptive_std:
            nn.init.constant_(self.linear.bias[fixed:], initial_log_std)

    @torch.no_grad()
    def restrain(self) -> None:
        """Return to their range the log standard deviations that an optimizer has taken out of it. Beyond it they have
        no gradient, and would stay there."""
        if self.log_std is not None:
            self.log_std.clamp_(*LOG_STD_RANGE)

    def forward(self, x: Tensor) -> Tensor:
        out = self.linear(x)
        if not self.dims:
            return out
        if self.log_std is None:
            out, log_std = out[..., : -self.dims], out[..., -self.dims :]
        else:
            log_std = self.log_std.expand(*out.shape[:-1], self.dims)
        return torch.cat((out, log_std.clamp(*LOG_STD_RANGE)), -1)


class ValueHead(nn.Module):
    """Features to a value ``[...]``, in the units that the learner trains it in."""

    def __init__(self, in_features: int) -> None:
        super().__init__()
        self.linear = orthogonal(nn.Linear(in_features, 1), 1.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).squeeze(-1)

    def rescale(self, scale: Tensor, shift: Tensor) -> None:
        """From here on every value is what it was, times `scale`, plus `shift`; both ``[]``."""
        self.linear.weight.mul_(scale)
        self.linear.bias.mul_(scale).add_(shift)
