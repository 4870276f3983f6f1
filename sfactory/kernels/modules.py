"""Fast modules: each is the plain module of :mod:`sfactory.model` with another forward pass.

A fast module has the parameters, the state and the name of the plain one, so it takes its place by
:func:`exchange`, which gives a module another class.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from sfactory.kernels.convolution.layers import lower_convolutions, operands, pixels, relu_convolutions
from sfactory.kernels.convolution.onednn import LoweredLinear
from sfactory.kernels.lowered import Lowered
from sfactory.kernels.recurrence import CompiledGRUScan, CompiledLSTMScan, gru_step, lstm_step
from sfactory.kernels.scans import GRUScan, LSTMScan
from sfactory.kernels.tanh import tanh_
from sfactory.model.cores import GatedCore, GRUCore, LSTMCore
from sfactory.model.encoders import NatureCNN, flatten_pixels
from sfactory.model.layers import Dense, PixelConv
from sfactory.model.precision import full_precision


class _TanhFunction(Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        y = tanh_(x.clone(memory_format=torch.contiguous_format))
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        return torch.ops.aten.tanh_backward(gradient, *ctx.saved_tensors)


class FastTanh(nn.Tanh):
    """The hyperbolic tangent by :func:`sfactory.kernels.tanh.tanh_`."""

    def forward(self, x: Tensor) -> Tensor:
        return _TanhFunction.apply(x) if x.dtype == torch.float32 else super().forward(x)


class LoweredDense(Lowered, Dense):
    """A linear layer that can keep its weights in autocast's dtype."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if self.lowered is None else self.lowered(x)

    def _cast_weights(self, dtype: torch.dtype) -> LoweredLinear:
        return LoweredLinear.of(self.weight, self.bias, dtype)


class BlockPixelConv(PixelConv):
    """A first convolution over blocks of pixels, where its stride and the image's sides allow that."""

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(pixels(self, x), *operands(self))


class FastNatureCNN(Lowered, NatureCNN):
    """A NatureCNN whose convolutions are fused with each other or with ReLU."""

    def forward(self, x: Tensor) -> Tensor:
        convolved = relu_convolutions(x, self._layers) if self.lowered is None else self.lowered(x)
        return F.relu_(self.linear(flatten_pixels(convolved)))

    def _cast_weights(self, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
        return lower_convolutions(self._layers, dtype)

    @property
    def _layers(self) -> Sequence[nn.Conv2d]:
        return cast(Sequence[nn.Conv2d], self.convolutions)


class _ScannedCore(GatedCore):
    """Unrolls layer by layer: one product for the inputs of all steps, then a scan over the states."""

    def unroll(self, x: Tensor, first: Tensor, state: Tensor) -> Tensor:
        keep = None
        for layer, own in enumerate(state.chunk(self.layers, -1)):
            projected = self._project(x, layer)
            keep = (~first).unsqueeze(-1).to(projected.dtype) if keep is None else keep
            with full_precision(x.device):
                x = self._scan(projected, self._parameter("weight_hh", layer), layer, keep, own.to(projected.dtype))
        return x

    def _scan(self, projected: Tensor, weight: Tensor, layer: int, keep: Tensor, state: Tensor) -> Tensor:
        raise NotImplementedError


class ScannedLSTMCore(_ScannedCore, LSTMCore):
    """An LSTM whose gradients are written out."""

    def _scan(self, projected: Tensor, weight: Tensor, layer: int, keep: Tensor, state: Tensor) -> Tensor:
        return LSTMScan.apply(projected, weight, keep, *state.chunk(2, -1))


class ScannedGRUCore(_ScannedCore, GRUCore):
    """A GRU whose gradients are written out."""

    def _scan(self, projected: Tensor, weight: Tensor, layer: int, keep: Tensor, state: Tensor) -> Tensor:
        return GRUScan.apply(projected, weight, self._parameter("bias_hh", layer), keep, state)


class _FastCore(Lowered, _ScannedCore):
    """Keeps the weights of the input products in autocast's dtype."""

    def _project(self, x: Tensor, layer: int) -> Tensor:
        if self.lowered is None:
            return super()._project(x, layer)
        return self.lowered[layer](x).to(self._parameter("weight_ih", layer).dtype)

    def _cast_weights(self, dtype: torch.dtype) -> list[LoweredLinear]:
        return [
            LoweredLinear.of(self._parameter("weight_ih", layer), self._input_bias(layer), dtype)
            for layer in range(self.layers)
        ]


class FastLSTMCore(_FastCore, LSTMCore):
    """An LSTM with the elementwise operations of a step in one pass."""

    def _step(self, projected: Tensor, weight: Tensor, layer: int, state: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            return super()._step(projected, weight, layer, state)
        return lstm_step(torch.addmm(projected, state[:, : self.size], weight.t()), state)

    def _scan(self, projected: Tensor, weight: Tensor, layer: int, keep: Tensor, state: Tensor) -> Tensor:
        return CompiledLSTMScan.apply(projected, weight, keep, *state.chunk(2, -1))


class FastGRUCore(_FastCore, GRUCore):
    """A GRU with the elementwise operations of a step in one pass."""

    def _step(self, projected: Tensor, weight: Tensor, layer: int, state: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            return super()._step(projected, weight, layer, state)
        return gru_step(projected, torch.addmm(self._parameter("bias_hh", layer), state, weight.t()), state)

    def _scan(self, projected: Tensor, weight: Tensor, layer: int, keep: Tensor, state: Tensor) -> Tensor:
        return CompiledGRUScan.apply(projected, weight, self._parameter("bias_hh", layer), keep, state)


def modules_of(model: nn.Module, kind: type) -> list[nn.Module]:
    """The modules of exactly a class."""
    return [module for module in model.modules() if type(module) is kind]


def exchange(modules: list[nn.Module], kind: type[nn.Module]) -> None:
    """Make modules instances of another class, which has the same parameters and state."""
    for module in modules:
        module.__class__ = kind


@contextmanager
def scanned(model: nn.Module) -> Iterator[None]:
    """A model whose cores are unrolled by scans for a while, as on a GPU that trains it."""
    lstms, grus = modules_of(model, LSTMCore), modules_of(model, GRUCore)
    with exchanged(lstms, ScannedLSTMCore), exchanged(grus, ScannedGRUCore):
        yield


@contextmanager
def exchanged(modules: list[nn.Module], kind: type[nn.Module]) -> Iterator[None]:
    """:func:`exchange` for a while."""
    before = [type(module) for module in modules]
    exchange(modules, kind)
    try:
        yield
    finally:
        for module, own in zip(modules, before, strict=True):
            module.__class__ = own
