"""Operations of oneDNN, the CPU's library of products and convolutions, that torch keeps for its own compiler.

They apply ReLU in the same pass, and take weights that already lie in oneDNN's order. Otherwise oneDNN brings them into
it at every call, which takes a NatureCNN 0.2 to 0.6 ms (docs/decisions/008-convolutions-by-onednn.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


@cache
def computes(dtype: torch.dtype) -> bool:
    """Whether these operations are at hand for a dtype on this machine's CPU."""
    if not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.mkldnn, "_convolution_pointwise"):
        return False
    return dtype == torch.float32 or (dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())


class LoweredLinear(NamedTuple):
    """A linear layer's weights in another dtype, if possible in oneDNN's order, ready to be applied; without a
    gradient."""

    weight: Tensor
    bias: Tensor

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor, dtype: torch.dtype) -> LoweredLinear:
        weight = weight.to(dtype)
        return cls(torch.ops.mkldnn._reorder_linear_weight(weight) if computes(dtype) else weight, bias.to(dtype))

    def __call__(self, x: Tensor) -> Tensor:
        x = x.to(self.bias.dtype)
        if self.weight.is_mkldnn:
            return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", (), "")
        return F.linear(x, self.weight, self.bias)


class Convolution(NamedTuple):
    """The operands of a convolution besides its input."""

    weight: Tensor
    bias: Tensor
    stride: Sequence[int]
    padding: Sequence[int]

    def lowered(self, dtype: torch.dtype) -> Convolution:
        """The same in another dtype, if possible in oneDNN's order, and then only for :meth:`with_relu`; without a
        gradient."""
        weight = self.weight.to(dtype, memory_format=torch.channels_last)
        if computes(dtype):
            weight = torch.ops.mkldnn._reorder_convolution_weight(weight, self.padding, self.stride, (1, 1), 1)
        return self._replace(weight=weight, bias=self.bias.to(dtype))

    def with_relu(self, x: Tensor) -> Tensor:
        """Convolve and cut off below zero in one pass, where oneDNN :func:`computes` in the dtype of `x`."""
        weight, bias = self.weight.to(x.dtype), self.bias.to(x.dtype)
        return torch.ops.mkldnn._convolution_pointwise(
            x, weight, bias, self.padding, self.stride, (1, 1), 1, "relu", (), ""
        )
