"""An update of a small fully connected network in one compiled call: forward pass, objective, backward pass, clipping
and Adam.

For 128 samples and two layers of 64 the compiled passes take a third of a millisecond; what calls them one by one from
Python takes as long again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numba import njit
from numpy.typing import NDArray
from torch import Tensor

from sfactory.config import Config
from sfactory.data.batch import Samples
from sfactory.data.chunks import ChunkThreads, Columns
from sfactory.data.plane import Laps
from sfactory.data.weights import FlatWeights
from sfactory.kernels import dense
from sfactory.kernels.dense import Array
from sfactory.kernels.dense_network import DenseNetwork
from sfactory.kernels.objective import (
    CompiledObjective,
    Taken,
    TargetArrays,
    chunk_densities,
    chunk_gradients,
    chunk_rows,
    chunk_totals,
    indices,
)
from sfactory.losses import SUMS
from sfactory.update import Update


class _Weights(NamedTuple):
    """The flat parameters, their gradient and its moments, each float32 ``[size]``, and counts ``[1]``: of steps, of
    skipped updates, and of those skipped in a row."""

    parameters: Array
    gradient: Array
    first: Array
    second: Array
    steps: Array
    skipped: NDArray[np.int64]
    skipped_in_a_row: NDArray[np.int64]


class _Network(NamedTuple):
    """What an update needs of a :class:`DenseNetwork`, and memory of its own for that network's gradients."""

    inputs: dense.Inputs
    passes: tuple[dense.Pass, ...]
    tanh: bool
    bounded: int
    own_log_std: Array
    of_log_std: Array
    found: tuple
    places: tuple


class CompiledUpdate(Update):
    """:class:`Update` for a :class:`DenseNetwork` and a :class:`CompiledObjective`, where a minibatch is one chunk of
    single samples."""

    def __init__(
        self,
        config: Config,
        network: DenseNetwork,
        objective: CompiledObjective,
        weights: FlatWeights,
        threads: ChunkThreads,
        watch: Laps,
    ) -> None:
        super().__init__(config, network, objective, weights, threads, watch)
        self._dense, self._compiled = network, objective
        parameters, state = weights.parameters, self.optimizer.state_dict()
        flat = parameters.detach(), parameters.grad, state["first"], state["second"]
        counts = state["steps"], self.skipped, self.skipped_in_a_row
        self._weights = _Weights(*(tensor.numpy() for tensor in (*flat, *(count.view(1) for count in counts))))
        self._of_network = _Network(
            network.matrices.inputs, network.passes, network.tanh, network.bounded, network.own_log_std,
            network.log_std_gradient, network.gradients_like(), network.gradients,
        )  # fmt: skip
        self._kept, self._rows = network.tiles(0), 0
        self._samples: Samples | None = None

    def __call__(self, samples: Samples, columns: Sequence[Columns]) -> Tensor:
        if len(columns) > 1 or len(samples.reward) > 1:
            return super().__call__(samples, columns)
        if samples is not self._samples:  # the moments of observations change between batches alone
            self._samples = samples
            self._dense.matrices.refresh()
            count = samples.reward.shape[1]
            leaves = tuple(leaf.numpy().reshape(count, -1) for leaf in samples.obs)
            self._matrices = [matrix[None] for matrix in self._dense.matrices(leaves)]
        self._dense.refresh_weights()
        rows = indices(columns[0])
        if len(rows) != self._rows:
            self._rows, self._kept = len(rows), self._dense.tiles(len(rows))
        objective, optimizer = self._compiled, self.optimizer
        row = np.empty(SUMS + 1)
        _update(
            rows, *self._matrices, self._of_network, self._dense.log_std, self._kept,
            objective.arrays(Taken, samples), objective.arrays(TargetArrays, samples.targets), objective.sizes,
            objective.from_uniform, objective.shift_limit, *objective.of_loss, self._weights, self._max_norm,
            float(optimizer.lr), *optimizer.betas, optimizer.eps, row,
        )  # fmt: skip
        self._watch.lap("update")
        return torch.from_numpy(row)


@njit(cache=True, nogil=True)
def _update(
    rows, numbers, codes, network, log_std, kept, taken, targets, sizes, from_uniform, shift_limit, surrogate, clip,
    value_clip, value_coef, exploration_coef, weights, max_norm, lr, beta1, beta2, eps, row,
):  # fmt: skip
    """One update on some rows of samples ``[1, B]``. Fills `row` as :meth:`Update.after` gives it."""
    numbers, codes = chunk_rows(numbers, rows, 1), chunk_rows(codes, rows, 1)
    params = np.empty((1, rows.size, sizes.sum() + 2 * taken.continuous.shape[2]), np.float32)
    value = np.empty((1, rows.size), np.float32)
    flat, flat_value = params[0], value.reshape(rows.size, 1)
    dense.forward(numbers, codes, network.inputs, network.passes, network.tanh, log_std, kept, flat, flat_value)
    dense.bound(flat, network.bounded)
    actions, log_prob, exploration = chunk_densities(rows, params, taken, sizes, from_uniform)
    count, shift = chunk_totals(rows, log_prob, targets, shift_limit < np.inf)
    far = shift > shift_limit * count
    of_params, of_value, sums = chunk_gradients(
        rows, actions, value, log_prob, exploration, targets, sizes, from_uniform, far, np.float64(count), surrogate,
        clip, value_clip, value_coef, exploration_coef,
    )  # fmt: skip
    dense.without_bounded(flat, of_params[0], network.bounded)
    of_value = of_value.reshape(rows.size, 1)
    dense.backward(of_params[0], of_value, codes, network.passes, network.tanh, kept, network.found)
    weights.gradient[:] = 0
    for i in range(len(network.found)):
        dense.add_to(network.found[i][0], network.found[i][1], network.places[i][0], network.places[i][1])
    dense.add_to_log_std(network.own_log_std, of_params[0], network.of_log_std)
    row[:-1] = sums
    row[-1] = norm = _norm(weights.gradient)
    if math.isfinite(norm):
        scale = min(1.0, max_norm / norm) if max_norm > 0 and norm > 0 else 1.0
        if count > 0:
            _adam(weights, np.float32(scale), lr, beta1, beta2, eps)
        weights.skipped_in_a_row[0] = 0
    else:
        weights.skipped[0] += 1
        weights.skipped_in_a_row[0] += 1


@njit(cache=True, nogil=True, fastmath={"contract", "reassoc"}, error_model="numpy")
def _norm(x):
    total = 0.0
    for i in range(x.size):
        total += np.float64(x[i]) * np.float64(x[i])
    return math.sqrt(total)


@njit(cache=True, nogil=True, fastmath={"contract"}, error_model="numpy")
def _adam(weights, scale, lr, beta1, beta2, eps):
    """A step of :class:`sfactory.update.Adam` along the gradient times `scale`."""
    weights.steps[0] += np.float32(1)
    step = weights.steps[0]
    parameters, gradient, first, second = weights.parameters, weights.gradient, weights.first, weights.second
    b1, b2, epsilon = np.float32(beta1), np.float32(beta2), np.float32(eps)
    rate = np.float32(lr / (1 - beta1**step))
    root = np.float32(math.sqrt(1 - beta2**step))
    for i in range(parameters.size):
        g = gradient[i] * scale
        first[i] += (np.float32(1) - b1) * (g - first[i])
        second[i] = b2 * second[i] + (np.float32(1) - b2) * g * g
        parameters[i] -= rate * first[i] / (np.sqrt(second[i]) / root + epsilon)
