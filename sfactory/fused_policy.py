"""Inference of small fully connected policies on the CPU by compiled loops.

For two layers of 64 a request of 32 rows takes 11 us and one of 128 rows 34, where tensor operations take 55 and 70, most of it
Python's share. Observations are read in the slot where they lie, so that requests need not be put together.
"""

from __future__ import annotations

import math

import numba
import numpy as np
import torch
from torch import nn

from sfactory.model import ActorCritic
from sfactory.model.actor_critic import Trunk
from sfactory.model.encoders import MLPEncoder
from sfactory.model.fused import FUSED_ACTIVATIONS, tanh_of
from sfactory.model.heads import LOG_STD_RANGE
from sfactory.model.normalizer import OBSERVATION_LIMIT

WIDEST = 256
"""Above this width a matrix product of the BLAS is faster than the loops here."""


class FusedPolicy:
    """The forward pass of an :class:`ActorCritic` with fully connected encoders of one float leaf and no core.

    Args:
        model: One that :meth:`fits`.
    """

    def __init__(self, model: ActorCritic) -> None:
        self._model = model
        features = math.prod(model.observation.leaves[0].shape)
        self._mean, self._scale = np.zeros(features, np.float32), np.ones(features, np.float32)
        self._limit = np.float32(np.inf if model.normalizer is None else OBSERVATION_LIMIT)
        self._tanh = model.actor.encoders[0].activation == "tanh"
        self._log_std = np.zeros(0 if model.policy.log_std is None else model.action.continuous, np.float32)
        self.refresh()

    @staticmethod
    def fits(model: nn.Module, autocast: torch.dtype | None) -> bool:
        """Whether this class can stand in for a model's forward."""
        if type(model) is not ActorCritic or autocast is not None or next(model.parameters()).device.type != "cpu":
            return False
        leaves = model.observation.leaves
        encoders = [trunk.encoders[0] for trunk in (model.actor, model.critic) if trunk is not None]
        return not model.state_size and len(leaves) == 1 and leaves[0].dtype == "float32" and all(map(_is_small, encoders))

    def refresh(self) -> None:
        """Take over the model's present weights; to be called after each change of them."""
        model = self._model
        if model.normalizer is not None:
            self._mean, self._scale = (moment.numpy().reshape(-1) for moment in model.normalizer.mean_and_scale(0))
        self._actor, self._critic = _weights(model.actor), None if model.critic is None else _weights(model.critic)
        self._policy_head, self._value_head = _arrays(model.policy.linear), _arrays(model.value.linear)
        if self._log_std.size:
            self._log_std = model.policy.log_std.detach().clamp(*LOG_STD_RANGE).numpy()

    def __call__(self, obs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """One step.

        Args:
            obs: float32 ``[N, *shape]``.

        Returns:
            Policy parameters float32 ``[N, P]`` and values ``[N]``, as the model's forward gives them.
        """
        action, x = self._model.action, obs.reshape(len(obs), -1)
        params = np.empty((len(obs), action.logits + 2 * action.continuous), np.float32)
        value = np.empty((len(obs), 1), np.float32)
        features = _trunk(x, self._mean, self._scale, self._limit, *self._actor, self._tanh)
        _head(features, *self._policy_head, params)
        if self._critic is not None:
            features = _trunk(x, self._mean, self._scale, self._limit, *self._critic, self._tanh)
        _head(features, *self._value_head, value)
        if self._log_std.size:
            params[:, -action.continuous :] = self._log_std
        elif action.continuous:
            log_std = params[:, -action.continuous :]
            np.clip(log_std, *LOG_STD_RANGE, out=log_std)
        return params, value[:, 0]


def _is_small(encoder: nn.Module) -> bool:
    if type(encoder) is not MLPEncoder or encoder.activation not in FUSED_ACTIVATIONS:
        return False
    widths = [linear.out_features for linear in encoder.linears]
    return bool(widths) and max(widths) <= WIDEST


def _weights(trunk: Trunk) -> tuple[tuple[np.ndarray, ...], tuple[np.ndarray, ...]]:
    """Weights ``[in, out]`` and biases ``[out]`` of a trunk's layers."""
    weights, biases = zip(*map(_arrays, trunk.encoders[0].linears), strict=True)
    return tuple(np.ascontiguousarray(weight.T) for weight in weights), biases


def _arrays(linear: nn.Linear) -> tuple[np.ndarray, np.ndarray]:
    """A layer's own weight ``[out, in]`` and bias ``[out]``."""
    return linear.weight.detach().numpy(), linear.bias.detach().numpy()


@numba.njit(cache=True, nogil=True, fastmath={"contract"}, error_model="numpy")
def _trunk(obs, mean, scale, limit, weights, biases, tanh):
    """Features ``[N, H]`` of observations ``[N, F]`` by layers of weights ``[in, out]``."""
    x = np.empty(obs.shape, np.float32)
    for row in range(obs.shape[0]):
        for i in range(obs.shape[1]):
            x[row, i] = min(max((obs[row, i] - mean[i]) * scale[i], -limit), limit)
    for weight, bias in zip(weights, biases):  # noqa: B905  unknown to the compiler
        x = _layer(x, weight, bias)
        flat = x.reshape(-1)
        for i in range(flat.size):
            flat[i] = tanh_of(flat[i]) if tanh else max(flat[i], np.float32(0))
    return x


@numba.njit(cache=True, nogil=True, fastmath={"contract"})
def _layer(x, weight, bias):
    """``x @ weight + bias``, two rows and four inputs at a time: so each weight that is loaded serves twice, each sum is stored seldom."""
    rows, inputs = x.shape
    y = np.empty((rows, bias.size), np.float32)
    for row in range(0, rows, 2):
        other = min(row + 1, rows - 1)  # a last row without a partner is computed twice
        for j in range(bias.size):
            y[row, j] = bias[j]
            y[other, j] = bias[j]
        k = 0
        while k + 4 <= inputs:
            a0, a1, a2, a3 = x[row, k], x[row, k + 1], x[row, k + 2], x[row, k + 3]
            b0, b1, b2, b3 = x[other, k], x[other, k + 1], x[other, k + 2], x[other, k + 3]
            for j in range(bias.size):
                w0, w1, w2, w3 = weight[k, j], weight[k + 1, j], weight[k + 2, j], weight[k + 3, j]
                p = y[row, j] + a0 * w0 + a1 * w1 + a2 * w2 + a3 * w3
                y[other, j] += b0 * w0 + b1 * w1 + b2 * w2 + b3 * w3
                y[row, j] = p
            k += 4
        while k < inputs:
            for j in range(bias.size):
                p = y[row, j] + x[row, k] * weight[k, j]
                y[other, j] += x[other, k] * weight[k, j]
                y[row, j] = p
            k += 1
    return y


@numba.njit(cache=True, nogil=True, fastmath={"contract", "reassoc"})
def _head(x, weight, bias, out):
    """Fill the first columns of `out` with ``x @ weight.T + bias``, for few outputs."""
    for row in range(x.shape[0]):
        for j in range(bias.size):
            total = np.float32(0)
            for k in range(x.shape[1]):
                total += x[row, k] * weight[j, k]
            out[row, j] = total + bias[j]
