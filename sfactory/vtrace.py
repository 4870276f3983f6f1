"""V-trace targets and advantages (Espeholt et al. 2018, equations 1 to 4), with terminations and truncations kept
apart.

With w_t = pi(a_t|x_t) / mu(a_t|x_t), rho_t = min(rho_bar, w_t) and c_t = lambda min(c_bar, w_t)::

    delta_t = rho_t (r_t + gamma_t V'_{t+1} - V_t)
    vs_t    = V_t + delta_t + gamma^c_t c_t (vs_{t+1} - V_{t+1})
    adv_t   = min(rho_bar_pg, w_t) (r_t + gamma_t q_{t+1} - V_t)    with q = lambda vs' + (1 - lambda) V'

gamma_t is gamma, and 0 at a termination. V' and vs' are V and vs of the next step, and V(final observation) at a
truncation. gamma^c_t, which carries the trace on, is gamma, and 0 at both kinds of end. With w = 1 and rho_bar = c_bar
= rho_bar_pg = 1 both vs - V and adv are the GAE advantages of the same lambda.

:func:`vtrace` takes NumPy arrays, :func:`unweighted_vtrace` tensors of any device.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from sfactory.gae import check_shapes, following_sum, on_arrays, temporal_difference, trace_decay


def vtrace(
    log_ratios: ArrayLike,
    rewards: ArrayLike,
    values: ArrayLike,
    bootstrap_value: ArrayLike,
    terminated: ArrayLike,
    truncated: ArrayLike,
    final_values: ArrayLike,
    gamma: float,
    lam: float = 1.0,
    rho_bar: float = 1.0,
    c_bar: float = 1.0,
    rho_bar_pg: float = 1.0,
) -> tuple[NDArray[Any], NDArray[Any]]:
    """V-trace value targets and policy-gradient advantages of a batch of segments.

    Args:
        log_ratios: float ``[T, B]``; log w_t, the new policy's log-probability of the action minus the behaviour
            policy's.
        rewards: float ``[T, B]``.
        values: float ``[T, B]``; V(x_t).
        bootstrap_value: float ``[B]``; V(x_T).
        terminated: bool ``[T, B]``; the step ended its episode, nothing follows. Wins where both ends are set.
        truncated: bool ``[T, B]``; the step was the last that was recorded of its episode.
        final_values: float ``[T, B]``; V of the final observation, read only where truncated.
        gamma: Discount per env step.
        lam: Lambda.
        rho_bar: Truncation of the importance weight in delta.
        c_bar: Truncation of the importance weight that carries the trace.
        rho_bar_pg: Truncation of the importance weight in the advantage.

    Returns:
        ``vs`` and ``advantages``, ``[T, B]``, in the inputs' dtype (at least float32); sums are accumulated in float64.
        What lies behind an end of an episode never reaches the steps before it, not even a NaN.

    Raises:
        ValueError: If shapes do not match.
    """
    check_shapes(np.asarray(values), np.asarray(bootstrap_value), log_ratios=np.asarray(log_ratios))

    def weighted(log_weights: Tensor, *outcome: Any, **settings: Any) -> tuple[Tensor, Tensor]:
        vs, advantages = unweighted_vtrace(log_weights, *outcome, **settings)
        return vs, log_weights.exp().clamp_(max=rho_bar_pg) * advantages

    ends = np.asarray(terminated, bool), np.asarray(truncated, bool)
    arrays = log_ratios, rewards, values, bootstrap_value, *ends, final_values
    return on_arrays(weighted, *arrays, gamma=gamma, lam=lam, rho_bar=rho_bar, c_bar=c_bar)


@torch.no_grad()
def unweighted_vtrace(
    log_weights: Tensor,
    rewards: Tensor,
    values: Tensor,
    bootstrap_value: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    final_values: Tensor,
    gamma: float,
    lam: float,
    rho_bar: float,
    c_bar: float,
) -> tuple[Tensor, Tensor]:
    """:func:`vtrace` on tensors of one device, in the dtype of `values`, without a host synchronisation and without
    gradients. `log_weights` are log w_t; advantages are r_t + gamma_t q_{t+1} - V_t, without their weight
    min(rho_bar_pg, w_t).

    Whatever shifts advantages, such as normalisation, must do so before the weight multiplies them: a sample that the
    new policy would hardly take has a weight near 0 and must not get the shift as its advantage.

    Raises:
        ValueError: If shapes do not match.
    """
    check_shapes(
        values,
        bootstrap_value,
        log_weights=log_weights,
        rewards=rewards,
        terminated=terminated,
        truncated=truncated,
        final_values=final_values,
    )
    weights = log_weights.exp()
    delta = temporal_difference(rewards, values, bootstrap_value, terminated, truncated, final_values, gamma)
    decay = trace_decay(terminated, truncated, gamma * lam, values.dtype)
    rho, c = weights.clamp(max=rho_bar), weights.clamp(max=c_bar)
    carried = decay * following_sum(rho * delta, c * decay)
    return torch.addcmul(torch.addcmul(values, rho, delta), c, carried), delta + carried
