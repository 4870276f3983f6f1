"""Fully connected actor-critics on the CPU without tensor operations, in training and inference, by
:mod:`sfactory.kernels.dense`.

Much of what a small network costs in tensor operations is Python's share, and a product of 64 by 64 costs less there
than by a BLAS. For two layers of 64 a step of 32 rows is 6 times as fast, one of 1,024 twice; training 3.7 times with
128 samples, 1.8 times with 16,384.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import accumulate
from threading import Lock
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from sfactory.data.batch import Batch, Samples
from sfactory.data.chunks import ChunkKind, Columns, select_columns
from sfactory.kernels import dense
from sfactory.kernels.dense import TILE, Array, Inputs, Layer, Pass
from sfactory.model import ActorCritic
from sfactory.model.actor_critic import Trunk
from sfactory.model.encoders import MLPEncoder
from sfactory.model.heads import LOG_STD_RANGE, PolicyHead
from sfactory.model.interface import Model
from sfactory.model.layers import FlatInput
from sfactory.model.networks import Outputs
from sfactory.model.normalizer import OBSERVATION_LIMIT, ObservationNormalizer
from sfactory.spaces import Leaf

Codes = NDArray[np.int32]
Layers = tuple[Layer, ...]

ACTIVATIONS = ("tanh", "relu")
WIDEST = 256
"""Above this width a matrix product of the BLAS is faster than the loops here."""
MOST_NUMBERS = 1024
"""Of an observation; with more, a tile does not stay in the cache."""
MOST_ENTRIES = 8192
"""Of the table of categories, which is written anew for each update."""


class DenseNetwork:
    """An :class:`ActorCritic` with fully connected encoders and no core.

    The passes are one for trunk and both heads, or where the critic has a trunk of its own, the policy's and the
    critic's. Categories are not multiplied one-hot: each adds its line of a table, the transpose of its columns of the
    first weight.

    Args:
        model: One that :meth:`fits`, whose parameters stay where they are in memory. For training they have their
            gradients' memory, too.

    Attributes:
        matrices: Makes matrices of observations.
        passes: Of the present weights.
        tanh: Whether that is the activation; else relu.
        own_log_std: Log standard deviations ``[D]`` that do not depend on observations; else ``[0]``.
        log_std: The same within their bounds.
        bounded: How many of the policy's parameters are log standard deviations that do.
    """

    chunk_kind: ChunkKind = "dense"

    def __init__(self, model: Model) -> None:
        assert isinstance(model, ActorCritic) and isinstance(model.policy, PolicyHead)
        self._action, self._lock = model.action, Lock()
        encoders = [_encoder(trunk) for trunk in (model.actor, model.critic) if trunk is not None]
        self.matrices = _Matrices(encoders[0].flat, model.observation.leaves, model.normalizer)
        self.tanh = encoders[0].activation == "tanh"
        policy, dims = model.policy, model.action.continuous
        self._log_std_parameter = policy.log_std
        self.own_log_std = np.zeros(0, np.float32) if policy.log_std is None else policy.log_std.detach().numpy()
        self.log_std = np.empty_like(self.own_log_std)
        self.bounded = dims - len(self.log_std)
        hidden, heads = [encoder.linears for encoder in encoders], [policy.linear, model.value.linear]
        params = policy.linear.out_features
        self._linears, shares = [(hidden[0], heads)], [(params, 1)]
        if len(hidden) == 2:
            self._linears, shares = [(hidden[0], heads[:1]), (hidden[1], heads[1:])], [(params, 0), (0, 1)]
        self._copies, passes, self._first_weights = [], [], []
        for ((first, *others), last), share in zip(self._linears, shares, strict=True):
            inputs = [self.matrices.numbers, *(linear.in_features for linear in (*others, last[0]))]
            stacks = [
                _side_by_side(*stack)
                for stack in zip(([first], *([linear] for linear in others), last), inputs, strict=True)
            ]
            self._copies += [copy for _, copies in stacks for copy in copies]
            weight, (_, bias) = first.weight.detach().numpy(), stacks[0][0]
            table = np.zeros((weight.shape[1] - self.matrices.numbers, len(bias)), np.float32)
            self._first_weights.append(weight)
            passes.append(Pass(self.matrices.hot, table, tuple(layer for layer, _ in stacks), *share))
        self.passes = tuple(passes)
        self.refresh()
        self._scratch = self.tiles(1)

    @staticmethod
    def fits(model: Model, autocast: torch.dtype | None) -> bool:
        """Whether this class can stand in for a model."""
        if type(model) is not ActorCritic or autocast is not None or next(model.parameters()).device.type != "cpu":
            return False
        if type(model.policy) is not PolicyHead or model.state_size:
            return False
        return all(map(_is_small, (trunk for trunk in (model.actor, model.critic) if trunk is not None)))

    def refresh(self) -> None:
        """Take over the model's present weights and moments; to be called after each change of them."""
        self.matrices.refresh()
        self.refresh_weights()

    def refresh_weights(self) -> None:
        """Take over the present weights alone."""
        for place, source in self._copies:
            np.copyto(place, source)
        for weight, each in zip(self._first_weights, self.passes, strict=True):
            if len(each.table):
                dense.transpose(weight, each.hot, each.table)
        np.clip(self.own_log_std, *LOG_STD_RANGE, out=self.log_std)

    def __call__(self, obs: tuple[np.ndarray, ...]) -> tuple[np.ndarray, np.ndarray]:
        """One step.

        Args:
            obs: Leaves ``[N, *shape]`` as they are stored.

        Returns:
            Policy parameters float32 ``[N, P]`` and values ``[N]``, as the model's forward gives them.
        """
        return self._forward(*self.matrices(obs), self._scratch)

    def outputs(self, samples: Batch | Samples, columns: Columns) -> Outputs:
        """As :class:`sfactory.model.networks.Network` has it."""
        obs = [select_columns(leaf, columns, 1) for leaf in samples.obs]
        steps, width = obs[0].shape[:2]
        numbers, codes = self.matrices(tuple(leaf.numpy().reshape(steps * width, -1) for leaf in obs))
        kept = self.tiles(steps * width)
        params, value = self._forward(numbers, codes, kept)
        return Outputs(
            torch.from_numpy(params.reshape(steps, width, -1)),
            torch.from_numpy(value.reshape(steps, width)),
            (codes, kept),
        )

    def backward(
        self, outputs: Outputs, of_params: Tensor, of_value: Tensor, of_auxiliary: Mapping[str, Tensor]
    ) -> None:
        """As :class:`sfactory.model.networks.Network` has it."""
        codes, kept = outputs.kept
        params, own = (x.numpy().reshape(-1, x.shape[-1]) for x in (outputs.params, of_params))
        dense.without_bounded(params, own, self.bounded)
        found = self.gradients_like()
        dense.backward(own, of_value.numpy().reshape(-1, 1), codes, self.passes, self.tanh, kept, found)
        with self._lock:
            for of_both, places in zip(found, self.gradients, strict=True):
                dense.add_to(*of_both, *places)
            dense.add_to_log_std(self.own_log_std, own, self.log_std_gradient)

    def _forward(self, numbers: Array, codes: Codes, kept: tuple[Array, ...]) -> tuple[Array, Array]:
        """Policy parameters ``[N, P]`` and values ``[N]`` of numbers ``[N, F]`` and categories ``[N, K]``."""
        action = self._action
        params = np.empty((len(numbers), action.logits + 2 * action.continuous), np.float32)
        value = np.empty((len(numbers), 1), np.float32)
        inputs = self.matrices.inputs
        dense.forward(numbers, codes, inputs, self.passes, self.tanh, self.log_std, kept, params, value)
        dense.bound(params, self.bounded)
        return params, value[:, 0]

    def tiles(self, rows: int) -> tuple[Array, ...]:
        """Memory of each pass for the activations of so many rows."""
        count = -(-rows // TILE)
        features = [each.layers[0][0].shape[1] + sum(len(bias) for _, bias in each.layers) for each in self.passes]
        return tuple(np.empty((count, each, TILE), np.float32) for each in features)

    def gradients_like(self) -> tuple[tuple[Array, Layers], ...]:
        """Memory for the gradients of each pass: of its table and of its layers."""
        return tuple(
            (np.empty_like(each.table), tuple((np.empty_like(w), np.empty_like(b)) for w, b in each.layers))
            for each in self.passes
        )

    @cached_property
    def gradients(self) -> tuple[tuple[Layers, Layers], ...]:
        """For each pass the memory of the gradients of its layers' parameters, and of its heads'."""
        return tuple((_gradients_of(hidden), _gradients_of(heads)) for hidden, heads in self._linears)

    @cached_property
    def log_std_gradient(self) -> Array:
        """The memory of the gradient of the log standard deviations that do not depend on observations."""
        return self.log_std if self._log_std_parameter is None else _gradient_of(self._log_std_parameter)


class _Matrices:
    """The leaves of observations as matrices: numbers, and categories that are counted through all leaves.

    Attributes:
        numbers: Columns of numbers.
        hot: What stands for a category.
        inputs: What is subtracted from these, and what they are then multiplied with.
    """

    def __init__(self, flat: FlatInput, leaves: Sequence[Leaf], normalizer: ObservationNormalizer | None) -> None:
        self._normalizer, self._number_leaves, self._category_leaves = normalizer, flat.numbers, flat.categories
        self._offsets, self.hot = flat.offsets.numpy().astype(np.int32), np.float32(flat.hot)
        scales = zip(flat.numbers, flat.scales, strict=True)
        parts = [np.full(math.prod(leaves[i].shape), scale, np.float32) for i, scale in scales]
        scale = np.concatenate(parts) if parts else np.zeros(0, np.float32)
        limit = np.float32(np.inf if normalizer is None else OBSERVATION_LIMIT)
        self.inputs, self.numbers = Inputs(np.zeros_like(scale), scale, limit), len(scale)
        ends = accumulate(map(len, parts))
        self._spans = [slice(end - len(part), end) for part, end in zip(parts, ends, strict=True)]
        self._as_they_are = [leaves[i].dtype for i in flat.numbers] == ["float32"]

    def refresh(self) -> None:
        """Take over the normaliser's present moments."""
        if self._normalizer is None:
            return
        for i, span in zip(self._number_leaves, self._spans, strict=True):
            if self._normalizer.floats[i]:
                moments = self._normalizer.mean_and_scale(i)
                self.inputs.mean[span], self.inputs.scale[span] = (moment.numpy().reshape(-1) for moment in moments)

    def __call__(self, obs: Sequence[np.ndarray]) -> tuple[Array, Codes]:
        """Numbers float32 ``[N, F]`` and categories int32 ``[N, K]`` of leaves ``[N, ...]``."""
        rows = len(obs[0])
        numbers, codes = np.empty((rows, 0), np.float32), np.empty((rows, 0), np.int32)
        if self._as_they_are:
            numbers = np.ascontiguousarray(obs[self._number_leaves[0]].reshape(rows, -1))
        elif self._number_leaves:
            numbers = np.concatenate([obs[i].reshape(rows, -1) for i in self._number_leaves], 1, dtype=np.float32)
        if self._category_leaves:
            codes = np.concatenate([obs[i].reshape(rows, -1) for i in self._category_leaves], 1, dtype=np.int32)
            codes += self._offsets
        return numbers, codes


def _encoder(trunk: Trunk) -> MLPEncoder:
    """The one encoder of a trunk that :func:`_is_small`."""
    encoder = trunk.encoders[0]
    assert isinstance(encoder, MLPEncoder)
    return encoder


def _gradient_of(parameter: Tensor) -> Array:
    """The memory of a parameter's gradient."""
    return cast(Tensor, parameter.grad).numpy()


def _gradients_of(linears: Sequence[nn.Linear]) -> Layers:
    return tuple((_gradient_of(linear.weight), _gradient_of(linear.bias)) for linear in linears)


def _is_small(trunk: Trunk) -> bool:
    """Whether a trunk is one MLP of narrow layers."""
    encoder = trunk.encoders[0]
    if type(encoder) is not MLPEncoder or len(trunk.encoders) > 1 or encoder.activation not in ACTIVATIONS:
        return False
    widths = [linear.out_features for linear in encoder.linears]
    numbers = encoder.flat.out_features - encoder.flat.entries
    small = numbers <= MOST_NUMBERS and encoder.flat.entries <= MOST_ENTRIES
    return bool(widths) and max(widths) <= WIDEST and small


def _side_by_side(linears: Sequence[nn.Linear], columns: int) -> tuple[Layer, list[tuple[Array, Array]]]:
    """The first columns of layers of the same input as one layer, filled up with zeros to multiples of four: views of
    the parameters if they are all of it.

    Returns:
        The layer, and the places in it with the parameters that have to be copied there when they change.
    """
    parameters = [(linear.weight.detach().numpy()[:, :columns], linear.bias.detach().numpy()) for linear in linears]
    rows = sum(len(bias) for _, bias in parameters)
    shape = -(-rows // 4) * 4, -(-columns // 4) * 4
    if len(linears) == 1 and shape == linears[0].weight.shape and columns == shape[1]:
        return parameters[0], []
    weight, bias = np.zeros(shape, np.float32), np.zeros(shape[0], np.float32)
    copies, row = [], 0
    for own_weight, own_bias in parameters:
        own = slice(row, row + len(own_bias))
        copies += [(weight[own, :columns], own_weight), (bias[own], own_bias)]
        row += len(own_bias)
    return (weight, bias), copies
