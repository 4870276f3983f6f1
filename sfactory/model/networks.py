"""How the learner runs a network over chunks of a batch: to its outputs, and back from their gradients to those of the
weights."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor

from sfactory.data.batch import Batch, Samples
from sfactory.data.chunks import ChunkKind, Columns
from sfactory.model.interface import Model
from sfactory.model.precision import mixed_precision


class Outputs(NamedTuple):
    """Of a chunk of n columns, with as many steps as it has observations.

    Attributes:
        params: Policy parameters float32 ``[T, n, P]``.
        value: Values float32 ``[T, n]``.
        kept: Activations saved for backward.
        auxiliary: Other outputs of a user's model ``[T, n, ...]``, by name.
    """

    params: Tensor
    value: Tensor
    kept: Any = None
    auxiliary: Mapping[str, Tensor] = MappingProxyType({})


class Network(Protocol):
    """A model in training. Several threads may be at work on chunks of their own.

    Attributes:
        chunk_kind: Which limits of :func:`sfactory.data.chunks.chunk_columns` suit it.
    """

    chunk_kind: ChunkKind

    def refresh(self) -> None:
        """Take note that the weights have changed."""

    def outputs(self, samples: Batch | Samples, columns: Columns) -> Outputs:
        """What the present weights make of some columns."""

    def backward(
        self, outputs: Outputs, of_params: Tensor, of_value: Tensor, of_auxiliary: Mapping[str, Tensor]
    ) -> None:
        """Add to the parameters' ``grad``, given the gradients with respect to the outputs, which may be
        overwritten."""


class TorchNetwork:
    """Any model, by autograd.

    Args:
        autocast: torch dtype to compute in, or None for float32.
        compiled: By torch.compile.
    """

    def __init__(self, model: Model, device: torch.device, autocast: torch.dtype | None, compiled: bool) -> None:
        self._unroll = torch.compile(model.unroll) if compiled else model.unroll
        self._device, self._autocast = device, autocast
        self.chunk_kind: ChunkKind = "image" if model.observation.has_images else "flat"

    def refresh(self) -> None:
        pass

    def outputs(self, samples: Batch | Samples, columns: Columns) -> Outputs:
        obs, first, state = samples.inputs(columns)
        with mixed_precision(self._device.type, self._autocast):
            params, value, *auxiliary = cast(tuple[Any, ...], self._unroll(obs, first, state))
        others = {name: tensor.float() for each in auxiliary for name, tensor in each.items()}
        return Outputs(params.float(), value.float(), auxiliary=others)

    def backward(
        self, outputs: Outputs, of_params: Tensor, of_value: Tensor, of_auxiliary: Mapping[str, Tensor]
    ) -> None:
        found = [(outputs.params, of_params), (outputs.value, of_value)]
        found += [(outputs.auxiliary[name], gradient) for name, gradient in of_auxiliary.items()]
        # The same as torch.autograd.backward with gradients, which imports sympy first: 0.4 s of every start.
        torch.stack([(x * gradient).sum() for x, gradient in found if x.requires_grad]).sum().backward()
