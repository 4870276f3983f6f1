"""The objective of :mod:`sfactory.objective` in compiled passes over CPU memory.

A chunk takes two calls from Python where tensor operations take a hundred, each of which a learner's threads would take
turns at.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from numba import njit
from numpy.typing import NDArray
from torch import Tensor

from sfactory.config import Config
from sfactory.data.batch import WITHOUT_TIME, Batch, Samples, Targets
from sfactory.data.chunks import Columns
from sfactory.distributions import Distribution
from sfactory.kernels.distributions import densities, density_gradients
from sfactory.kernels.losses import loss_and_gradients
from sfactory.losses import SUMS, exploration_coef
from sfactory.model.critic_units import CriticUnits
from sfactory.model.networks import Outputs
from sfactory.objective import ESTIMATORS, OWN_POLICY, ActionDensities, Estimates, Gradients, Objective

Arrays = TypeVar("Arrays", bound=NamedTuple)


class Taken(NamedTuple):
    """The actions of a batch or of samples: C-contiguous arrays of all columns. `mask` has no columns if there is
    none."""

    categorical: NDArray[np.int32]
    continuous: NDArray[np.float32]
    mask: NDArray[np.bool_]


class _Outcome(NamedTuple):
    """What else the compiled passes read of a batch: C-contiguous arrays of all its columns."""

    log_prob: NDArray[np.float32]
    reward: NDArray[np.float32]
    terminated: NDArray[np.bool_]
    truncated: NDArray[np.bool_]
    final_change: NDArray[np.float32]
    active: NDArray[np.bool_]
    owner: NDArray[np.int32]


class Actions(NamedTuple):
    """A chunk's actions under the present policy, sample by sample: arguments of :func:`density_gradients`."""

    params: NDArray[np.float32]
    categorical: NDArray[np.int32]
    continuous: NDArray[np.float32]
    log_probs: NDArray[np.float32]
    probabilities: NDArray[np.float32]
    entropies: NDArray[np.float32]


class TargetArrays(NamedTuple):
    """:class:`sfactory.data.batch.Targets` as C-contiguous arrays."""

    advantages: NDArray[np.float32]
    returns: NDArray[np.float32]
    old_values: NDArray[np.float32]
    old_log_prob: NDArray[np.float32]
    log_weights: NDArray[np.float32]
    valid: NDArray[np.bool_]


class CompiledObjective(Objective):
    """:class:`Objective` for float32 tensors on the CPU. It keeps a chunk's :class:`Actions`.

    Attributes:
        sizes: Categories of each component of an action, int32 ``[K]``.
        from_uniform: Whether the exploration bonus is the divergence from uniform policies; else the entropy.
        shift_limit: Mean of |pi / mu - 1| above which a policy is far; infinite where there is no limit.
        of_loss: The last arguments of :func:`chunk_gradients`, in their order.
    """

    def __init__(self, config: Config, distribution: Distribution, units: CriticUnits) -> None:
        super().__init__(config, distribution, units)
        loss = config.loss
        self.sizes = np.array(distribution.action.sizes, np.int32)
        self.from_uniform = loss.exploration == "kl"
        self.shift_limit = 2.0 * loss.tv_limit if self.bounds_shift else np.inf
        self._of_rewards = float(loss.reward_scale), float(loss.reward_clip) if loss.reward_clip > 0 else np.inf
        vtrace = self._estimator is ESTIMATORS["vtrace"]  # whose estimates with all weights 1 are those of GAE
        bars = (loss.rho_bar, loss.c_bar) if vtrace else (1.0, 1.0)
        self._of_vtrace = vtrace, *map(float, (loss.gamma, loss.lam, *bars))
        weights = (loss.clip, loss.value_clip, loss.value_coef, exploration_coef(loss))
        self.of_loss = self.algo.surrogate, *map(float, weights)
        self._last: dict[type, tuple[object, Any]] = {}

    def evaluate_actions(self, outputs: Outputs, samples: Batch | Samples, columns: Columns) -> ActionDensities:
        params, value = outputs.params.detach().contiguous(), outputs.value.detach().contiguous()
        actions, *found = chunk_densities(
            indices(columns), params.numpy(), self.arrays(Taken, samples), self.sizes, self.from_uniform
        )
        log_prob, exploration = map(torch.from_numpy, found)
        return ActionDensities(params, value, log_prob, exploration, auxiliary={}, kept=actions)

    def estimate(self, densities: ActionDensities, batch: Batch, columns: Columns) -> Estimates:
        log_prob, values = densities.log_prob.numpy(), self.units.to_returns(densities.value).numpy()
        outcome = self.arrays(_Outcome, batch)
        found = _estimates(indices(columns), log_prob, values, outcome, OWN_POLICY, *self._of_rewards, *self._of_vtrace)
        return Estimates(*map(torch.from_numpy, (log_prob, found[0], values[:-1], *found[1:])))

    def totals(self, densities: ActionDensities, targets: Targets, columns: Columns) -> Tensor:
        if isinstance(columns, slice):  # of many samples, whose exponentials torch computes several at once
            return super().totals(densities, targets, columns)
        arrays = self.arrays(TargetArrays, targets)
        found = chunk_totals(indices(columns), densities.log_prob.numpy(), arrays, self.bounds_shift)
        return torch.tensor(found, dtype=torch.float64)

    def gradients(
        self, densities: ActionDensities, samples: Batch | Samples, targets: Targets, columns: Columns, totals: Tensor
    ) -> Gradients:
        arrays = self.arrays(TargetArrays, targets)
        count, shift = totals.tolist()
        far = shift > self.shift_limit * count
        own = (x.numpy() for x in (densities.value, densities.log_prob, densities.exploration))
        of_params, of_value, sums = chunk_gradients(
            indices(columns), densities.kept, *own, arrays, self.sizes, self.from_uniform, far, count, *self.of_loss,
        )  # fmt: skip
        return Gradients(torch.from_numpy(of_params), torch.from_numpy(of_value), torch.from_numpy(sums))

    def arrays(self, kind: type[Arrays], source: Batch | Samples | Targets) -> Arrays:
        """The arrays of a batch, of samples or of targets, made once for all chunks."""
        last, arrays = self._last.get(kind, (None, None))  # read at once, because threads may be here at the same time
        if last is not source:
            steps = len(source.advantages if isinstance(source, Targets) else source.continuous)

            def array(name: str) -> NDArray:
                tensor = getattr(source, name)
                if tensor is None:
                    return np.empty((0, 0, 0), np.bool_)
                return np.ascontiguousarray((tensor if name in WITHOUT_TIME else tensor[:steps]).numpy())

            arrays = kind._make(map(array, kind._fields))
            self._last[kind] = source, arrays
        return arrays


def indices(columns: Columns) -> NDArray[np.int64]:
    return np.arange(columns.start, columns.stop) if isinstance(columns, slice) else columns.numpy()


@njit(cache=True, nogil=True)
def _columns(x, columns):
    """Columns of ``[T, B]``: contiguous ``[T, n]``."""
    out = np.empty((x.shape[0], columns.size), x.dtype)
    for t in range(x.shape[0]):
        for i in range(columns.size):
            out[t, i] = x[t, columns[i]]
    return out


@njit(cache=True, nogil=True)
def chunk_rows(x, columns, steps):
    """Columns of the first steps of ``[T, B, K]``, sample by sample: ``[T n, K]``."""
    out = np.empty((steps * columns.size, x.shape[2]), x.dtype)
    for t in range(steps):
        for i in range(columns.size):
            for k in range(x.shape[2]):
                out[t * columns.size + i, k] = x[t, columns[i], k]
    return out


@njit(cache=True, nogil=True)
def chunk_densities(columns, params, taken, sizes, from_uniform):
    """What :class:`Actions` holds of a chunk, and its log_prob and exploration ``[T, n]``."""
    steps = taken.continuous.shape[0]
    rows, logits = steps * columns.size, sizes.sum()
    flat = params[:steps].reshape(rows, params.shape[2])
    categorical, continuous = (
        chunk_rows(taken.categorical, columns, steps),
        chunk_rows(taken.continuous, columns, steps),
    )
    mask = chunk_rows(taken.mask, columns, steps) if taken.mask.size > 0 else np.empty((0, 0), np.bool_)
    log_probs, probabilities = np.empty((rows, logits), np.float32), np.empty((rows, logits), np.float32)
    entropies = np.empty((rows, sizes.size), np.float32)
    log_prob, exploration = np.empty((steps, columns.size), np.float32), np.empty((steps, columns.size), np.float32)
    densities(
        flat, categorical, continuous, mask, sizes, from_uniform, log_probs, probabilities, entropies,
        log_prob.reshape(-1), exploration.reshape(-1),
    )  # fmt: skip
    actions = Actions(flat, categorical, continuous, log_probs, probabilities, entropies)
    return actions, log_prob, exploration


@njit(cache=True, nogil=True)
def _vtrace(
    log_weights, rewards, values, bootstrap_value, final_values, terminated, truncated,
    gamma, lam, rho_bar, c_bar, vs, advantages,
):  # fmt: skip
    """:func:`sfactory.vtrace.unweighted_vtrace` in one pass; fills vs and advantages."""
    steps, columns = values.shape
    next_value = bootstrap_value.astype(np.float64)
    correction = np.zeros(columns)  # vs - V of the next step
    for t in range(steps - 1, -1, -1):
        for b in range(columns):
            weight = np.exp(log_weights[t, b])
            value = values[t, b]
            following = final_values[t, b] if truncated[t, b] else next_value[b]
            delta = rewards[t, b] + (0.0 if terminated[t, b] else gamma * following) - value
            carried = 0.0 if terminated[t, b] or truncated[t, b] else gamma * lam * correction[b]
            correction[b] = min(weight, rho_bar) * delta + min(weight, c_bar) * carried
            next_value[b] = value
            vs[t, b] = value + correction[b]
            advantages[t, b] = delta + carried


@njit(cache=True, nogil=True)
def _estimates(
    columns, log_prob, values, outcome, policy, reward_scale, reward_clip, weighted, gamma, lam, rho_bar, c_bar
):
    """Log weights, advantages without them, returns and validity of a chunk, each ``[T, n]``.

    Args:
        values: ``[T+1, n]``, in units of return.
        policy: Whose samples are valid.
        weighted: Whether V-trace's weights are those of the policies; off: all are 1.
    """
    valid, rewards, finals = (
        _columns(outcome.active, columns),
        _columns(outcome.reward, columns),
        _columns(outcome.final_change, columns),
    )
    terminated, truncated = _columns(outcome.terminated, columns), _columns(outcome.truncated, columns)
    log_weights = log_prob - _columns(outcome.log_prob, columns)
    for t in range(rewards.shape[0]):
        for i in range(columns.size):
            valid[t, i] &= outcome.owner[columns[i]] == policy
            rewards[t, i] = min(max(rewards[t, i] * reward_scale, -reward_clip), reward_clip)
            # as :func:`sfactory.objective.final_values`
            finals[t, i] = values[t + 1, i] if np.isnan(finals[t, i]) else values[t, i] + finals[t, i]
    returns, advantages = np.empty_like(rewards), np.empty_like(rewards)
    _vtrace(
        log_weights if weighted else np.zeros_like(log_weights), rewards, values[:-1], values[-1], finals, terminated,
        truncated,
        gamma, lam, rho_bar, c_bar, returns, advantages,
    )  # fmt: skip
    return log_weights, advantages, returns, valid


@njit(cache=True, nogil=True)
def chunk_totals(columns, log_prob, targets, with_shift):
    """Number of valid samples of a chunk, and the sum of |pi / mu - 1| over them."""
    count, shift = 0, 0.0
    for t in range(log_prob.shape[0]):
        for i in range(columns.size):
            b = columns[i]
            if targets.valid[t, b]:
                count += 1
                if with_shift:
                    shift += abs(np.expm1(log_prob[t, i] - targets.old_log_prob[t, b] + targets.log_weights[t, b]))
    return count, shift


@njit(cache=True, nogil=True)
def _without_departures(advantages, columns, log_prob, targets):
    """:func:`sfactory.losses.without_departures` of a policy that is far, in place; advantages ``[T, n]``."""
    for t in range(advantages.shape[0]):
        for i in range(columns.size):
            b = columns[i]
            if (log_prob[t, i] - targets.old_log_prob[t, b] + targets.log_weights[t, b]) * advantages[t, i] > 0:
                advantages[t, i] = 0.0


@njit(cache=True, nogil=True)
def chunk_gradients(
    columns, actions, value, log_prob, exploration, targets, sizes, from_uniform, far, count,
    surrogate, clip, value_clip, value_coef, exploration_coef,
):  # fmt: skip
    """Gradients in the shape of the parameters and values, and sums of a chunk."""
    steps, width = log_prob.shape
    rows, size = actions.params.shape
    of_params, of_value = np.zeros((value.shape[0], width, size), np.float32), np.zeros(value.shape, np.float32)
    of_log_prob, of_exploration, sums = np.empty(rows, np.float32), np.empty(rows, np.float32), np.empty(SUMS)
    advantages = _columns(targets.advantages, columns)
    if far:
        _without_departures(advantages, columns, log_prob, targets)
    loss_and_gradients(
        log_prob.reshape(-1), value[:steps].reshape(-1), exploration.reshape(-1), advantages.reshape(-1),
        _columns(targets.returns, columns).reshape(-1), _columns(targets.old_values, columns).reshape(-1),
        _columns(targets.old_log_prob, columns).reshape(-1), _columns(targets.valid, columns).reshape(-1),
        count, surrogate, clip, value_clip, value_coef, exploration_coef, of_log_prob, of_value[:steps].reshape(-1),
        of_exploration, sums,
    )  # fmt: skip
    density_gradients(
        actions.params, actions.categorical, actions.continuous, actions.log_probs, actions.probabilities,
        actions.entropies,
        sizes, from_uniform, of_log_prob, of_exploration, of_params[:steps].reshape(rows, size),
    )  # fmt: skip
    return of_params, of_value, sums
