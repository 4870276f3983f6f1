"""The objective of :mod:`sfactory.objective` in compiled passes over CPU memory.

A chunk takes two calls from Python where tensor operations take a hundred, each of which a learner's threads would take turns at.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numba import njit
from numpy.typing import NDArray
from torch import Tensor

from sfactory.batch import Batch
from sfactory.chunks import Columns
from sfactory.config import Config
from sfactory.distributions_cpu import densities, density_gradients
from sfactory.losses import SUMS, Targets, exploration_coef, joint_moments
from sfactory.losses_cpu import loss_and_gradients, valid_moments
from sfactory.model.normalizer import RunningMeanStd
from sfactory.objective import OWN_POLICY, Gradients, Objective
from sfactory.spaces import ActionSpec
from sfactory.vtrace import vtrace_pass


class _Experience(NamedTuple):
    """What the compiled passes read of a batch: C-contiguous arrays of all its columns. `mask` has no columns if there is none."""

    categorical: NDArray[np.int32]
    continuous: NDArray[np.float32]
    mask: NDArray[np.bool_]
    log_prob: NDArray[np.float32]
    value: NDArray[np.float32]
    reward: NDArray[np.float32]
    terminated: NDArray[np.bool_]
    truncated: NDArray[np.bool_]
    final_value: NDArray[np.float32]
    active: NDArray[np.bool_]
    owner: NDArray[np.int32]


class _Actions(NamedTuple):
    """A chunk's actions under the present policy, sample by sample: arguments of :func:`density_gradients`."""

    params: NDArray[np.float32]
    categorical: NDArray[np.int32]
    continuous: NDArray[np.float32]
    log_probs: NDArray[np.float32]
    probabilities: NDArray[np.float32]
    entropies: NDArray[np.float32]


class _Samples(NamedTuple):
    """A chunk's samples, ``[T, n]``: the first arguments of :func:`loss_and_gradients`."""

    log_prob: NDArray[np.float32]
    value: NDArray[np.float32]
    exploration: NDArray[np.float32]
    advantages: NDArray[np.float32]
    returns: NDArray[np.float32]
    old_values: NDArray[np.float32]
    behaviour_log_prob: NDArray[np.float32]
    valid: NDArray[np.bool_]


@dataclass
class _Evaluation:
    """A chunk before its gradients, with number, mean and squared deviations of its advantages."""

    actions: _Actions
    samples: _Samples
    moments: tuple[float, float, float]


class CompiledObjective(Objective):
    """:class:`Objective` for float32 tensors on the CPU."""

    def __init__(self, config: Config, action: ActionSpec, returns: RunningMeanStd | None, device: torch.device) -> None:
        super().__init__(config, action, returns, device)
        loss = config.loss
        self._sizes = np.array(action.sizes, np.int32)
        self._from_uniform = loss.exploration == "kl"
        self._of_rewards = float(loss.reward_scale), float(loss.reward_clip) if loss.reward_clip > 0 else np.inf
        self._of_vtrace = tuple(map(float, (loss.gamma, loss.lam, loss.rho_bar, loss.c_bar, loss.rho_bar_pg)))
        weights = (loss.clip, loss.value_clip, loss.value_coef, exploration_coef(loss))
        self._of_loss = config.algo != "impala", loss.normalize_advantage, *map(float, weights)
        self._last: tuple[Batch | None, _Experience | None] = None, None

    def evaluate(self, params: Tensor, value: Tensor, batch: Batch, columns: Columns, fixed: Targets | None = None) -> _Evaluation:
        experience = self._arrays(batch)
        indices = np.arange(columns.start, columns.stop) if isinstance(columns, slice) else columns.numpy()
        params, value = (np.ascontiguousarray(tensor.detach().numpy()) for tensor in (params, value))
        actions, log_prob, exploration = _densities(indices, params, experience, self._sizes, self._from_uniform)
        if fixed is None:
            unit = (0.0, 1.0) if self.returns is None else (float(self.returns.mean), float(self.returns.std))
            given = (*unit, *self._of_rewards, *self._of_vtrace)
            samples, moments = _vtrace_samples(indices, log_prob, value, exploration, experience, OWN_POLICY, *given)
        else:
            arrays = [np.ascontiguousarray(tensor.numpy()) for tensor in vars(fixed).values()]
            samples, moments = _fixed_samples(indices, log_prob, value, exploration, *arrays)
        return _Evaluation(_Actions(*actions), _Samples(*samples), moments)

    def joint(self, evaluations: Sequence[_Evaluation], fixed: bool) -> Tensor:
        if not fixed and self.returns is not None:
            returns, valid = ([torch.from_numpy(getattr(each.samples, name)) for each in evaluations] for name in ("returns", "valid"))
            for each, normalized in zip(evaluations, self.normalized(returns, valid), strict=True):
                each.samples = each.samples._replace(returns=normalized.numpy())
        return joint_moments(torch.tensor([each.moments for each in evaluations], dtype=torch.float64))

    def gradients(self, evaluation: _Evaluation, moments: Tensor) -> Gradients:
        of_params, of_value, sums = _gradients(
            evaluation.actions, evaluation.samples, self._sizes, self._from_uniform, *moments.tolist(), *self._of_loss
        )
        return Gradients(torch.from_numpy(of_params), torch.from_numpy(of_value), torch.from_numpy(sums))

    def _arrays(self, batch: Batch) -> _Experience:
        """A batch's arrays, made once for all its chunks."""
        last, experience = self._last  # read at once, because threads may be here at the same time
        if experience is None or last is not batch:
            tensors = (getattr(batch, name) for name in _Experience._fields)
            mask = np.empty((0, 0, 0), np.bool_)
            experience = _Experience(*(mask if tensor is None else np.ascontiguousarray(tensor.numpy()) for tensor in tensors))
            self._last = batch, experience
        return experience


@njit(cache=True, nogil=True)
def _columns(x, columns):
    """Columns of ``[T, B]``: contiguous ``[T, n]``."""
    out = np.empty((x.shape[0], columns.size), x.dtype)
    for t in range(x.shape[0]):
        for i in range(columns.size):
            out[t, i] = x[t, columns[i]]
    return out


@njit(cache=True, nogil=True)
def _rows(x, columns, steps):
    """Columns of the first steps of ``[T, B, K]``, sample by sample: ``[T n, K]``."""
    out = np.empty((steps * columns.size, x.shape[2]), x.dtype)
    for t in range(steps):
        for i in range(columns.size):
            for k in range(x.shape[2]):
                out[t * columns.size + i, k] = x[t, columns[i], k]
    return out


@njit(cache=True, nogil=True)
def _densities(columns, params, experience, sizes, from_uniform):
    """What :class:`_Actions` holds of a chunk, and its log_prob and exploration ``[T, n]``."""
    steps = experience.reward.shape[0]
    rows, logits = steps * columns.size, sizes.sum()
    flat = params[:steps].reshape(rows, params.shape[2])
    categorical, continuous = _rows(experience.categorical, columns, steps), _rows(experience.continuous, columns, steps)
    mask = _rows(experience.mask, columns, steps) if experience.mask.size > 0 else np.empty((0, 0), np.bool_)
    log_probs, probabilities = np.empty((rows, logits), np.float32), np.empty((rows, logits), np.float32)
    entropies = np.empty((rows, sizes.size), np.float32)
    log_prob, exploration = np.empty((steps, columns.size), np.float32), np.empty((steps, columns.size), np.float32)
    densities(
        flat, categorical, continuous, mask, sizes, from_uniform, log_probs, probabilities, entropies,
        log_prob.reshape(-1), exploration.reshape(-1),
    )  # fmt: skip
    return (flat, categorical, continuous, log_probs, probabilities, entropies), log_prob, exploration


@njit(cache=True, nogil=True)
def _vtrace_samples(
    columns, log_prob, value, exploration, experience, policy, mean, std, reward_scale, reward_clip, gamma, lam, rho_bar, c_bar, rho_bar_pg
):  # fmt: skip
    """What :class:`_Samples` holds, with V-trace's targets in units of return, and the moments of the advantages.

    Args:
        value: ``[T+1, n]``; `std` times it plus `mean` are units of return.
        policy: Whose samples are valid.
    """
    behaviour, valid = _columns(experience.log_prob, columns), _columns(experience.active[:-1], columns)
    rewards, finals = _columns(experience.reward, columns), _columns(experience.final_value, columns)
    terminated, truncated = _columns(experience.terminated, columns), _columns(experience.truncated, columns)
    values, log_ratios = np.empty_like(value), np.empty_like(log_prob)
    for t in range(value.shape[0]):
        for i in range(columns.size):
            values[t, i] = value[t, i] * std + mean
    for t in range(rewards.shape[0]):
        for i in range(columns.size):
            valid[t, i] &= experience.owner[columns[i]] == policy
            log_ratios[t, i] = log_prob[t, i] - behaviour[t, i]
            rewards[t, i] = min(max(rewards[t, i] * reward_scale, -reward_clip), reward_clip)
            # NaN stands for the value of the row that rests at t+1.
            finals[t, i] = values[t + 1, i] if np.isnan(finals[t, i]) else finals[t, i] * std + mean
    vs, advantages = np.empty_like(rewards), np.empty_like(rewards)
    vtrace_pass(
        log_ratios, rewards, values[:-1], values[-1], finals, terminated, truncated,
        gamma, lam, rho_bar, c_bar, rho_bar_pg, vs, advantages,
    )  # fmt: skip
    old_values = _columns(experience.value[:-1], columns)
    moments = valid_moments(advantages.reshape(-1), valid.reshape(-1))
    return (log_prob, value[:-1], exploration, advantages, vs, old_values, behaviour, valid), moments


@njit(cache=True, nogil=True)
def _fixed_samples(columns, log_prob, value, exploration, advantages, returns, old_values, behaviour_log_prob, valid):
    """:func:`_vtrace_samples` with targets that are given for all columns of the batch."""
    own, chosen = _columns(advantages, columns), _columns(valid, columns)
    targets = own, _columns(returns, columns), _columns(old_values, columns), _columns(behaviour_log_prob, columns), chosen
    return (log_prob, value[:-1], exploration, *targets), valid_moments(own.reshape(-1), chosen.reshape(-1))


@njit(cache=True, nogil=True)
def _gradients(
    actions, samples, sizes, from_uniform, count, adv_mean, adv_squares,
    surrogate, normalize, clip, value_clip, value_coef, exploration_coef,
):  # fmt: skip
    """Gradients ``[T+1, n, P]`` and ``[T+1, n]``, and sums of a chunk."""
    steps, columns = samples.log_prob.shape
    rows, width = actions.params.shape
    of_params, of_value = np.zeros((steps + 1, columns, width), np.float32), np.zeros((steps + 1, columns), np.float32)
    of_log_prob, of_exploration, sums = np.empty(rows, np.float32), np.empty(rows, np.float32), np.empty(SUMS)
    loss_and_gradients(
        samples.log_prob.reshape(-1), samples.value.reshape(-1), samples.exploration.reshape(-1), samples.advantages.reshape(-1),
        samples.returns.reshape(-1), samples.old_values.reshape(-1), samples.behaviour_log_prob.reshape(-1), samples.valid.reshape(-1),
        count, adv_mean, adv_squares, surrogate, normalize, clip, value_clip, value_coef, exploration_coef,
        of_log_prob, of_value[:-1].reshape(-1), of_exploration, sums,
    )  # fmt: skip
    density_gradients(
        actions.params, actions.categorical, actions.continuous, actions.log_probs, actions.probabilities, actions.entropies,
        sizes, from_uniform, of_log_prob, of_exploration, of_params[:-1].reshape(rows, width),
    )  # fmt: skip
    return of_params, of_value, sums
