"""Generalised advantage estimation (Schulman et al. 2016, equations 11 to 16), with terminations and truncations kept
apart.

With delta_t = r_t + gamma_t V'_{t+1} - V_t the advantage is A_t = delta_t + gamma lambda A_{t+1} along an episode and
delta_t at its last step. V'_{t+1} is V_{t+1}, or V(final observation) at a truncation; gamma_t is gamma, and 0 at a
termination. :func:`gae` takes NumPy arrays, :func:`gae_torch` tensors of any device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor


def check_shapes(values: Any, bootstrap_value: Any, **others: Any) -> None:
    """Check that `values` and `others` are ``[T, B]`` and `bootstrap_value` is ``[B]``; arrays or tensors.

    Raises:
        ValueError: Naming the argument, its shape and the shape it must have.
    """
    shape = tuple(values.shape)
    if len(shape) != 2:
        raise ValueError(f"values has shape {shape}; it must be [T, B]: time first, then one column for each row")
    for name, other in others.items():
        if tuple(other.shape) != shape:
            raise ValueError(
                f"{name} has shape {tuple(other.shape)} and values has {shape}; both must be the same [T, B]"
            )
    if tuple(bootstrap_value.shape) != shape[1:]:
        raise ValueError(
            f"bootstrap_value has shape {tuple(bootstrap_value.shape)}; with values {shape} it must be {shape[1:]}"
        )


def on_arrays(
    estimator: Callable[..., tuple[Tensor, Tensor]], *arrays: ArrayLike, **settings: float
) -> tuple[NDArray[Any], NDArray[Any]]:
    """What an estimator of tensors gives for NumPy arrays: computed in float64, returned in their dtype, at least
    float32."""
    found = [np.asarray(array) for array in arrays]
    dtype = np.result_type(np.float32, *(array for array in found if array.dtype.kind == "f"))
    tensors = (torch.from_numpy(x.astype(bool if x.dtype == bool else np.float64)) for x in found)
    first, second = estimator(*tensors, **settings)
    return first.numpy().astype(dtype), second.numpy().astype(dtype)


def gae(
    rewards: ArrayLike,
    values: ArrayLike,
    bootstrap_value: ArrayLike,
    terminated: ArrayLike,
    truncated: ArrayLike,
    final_values: ArrayLike,
    gamma: float,
    lam: float,
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Advantages and lambda-returns of a batch of segments.

    Args:
        rewards: float ``[T, B]``.
        values: float ``[T, B]``; V(x_t).
        bootstrap_value: float ``[B]``; V(x_T).
        terminated: bool ``[T, B]``; the step ended its episode, nothing follows. Wins where both ends are set.
        truncated: bool ``[T, B]``; the step was the last that was recorded of its episode.
        final_values: float ``[T, B]``; V of the final observation, read only where truncated.
        gamma: Discount per env step.
        lam: Lambda.

    Returns:
        ``advantages`` and ``returns`` = advantages + values, ``[T, B]``, in the inputs' dtype (at least float32); sums
        are accumulated in float64. What lies behind an end of an episode never reaches the steps before it, not even a
        NaN.

    Raises:
        ValueError: If shapes do not match.
    """
    ends = np.asarray(terminated, bool), np.asarray(truncated, bool)
    arrays = rewards, values, bootstrap_value, *ends, final_values
    return on_arrays(gae_torch, *arrays, gamma=gamma, lam=lam)


@torch.no_grad()
def gae_torch(
    rewards: Tensor,
    values: Tensor,
    bootstrap_value: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    final_values: Tensor,
    gamma: float,
    lam: float,
) -> tuple[Tensor, Tensor]:
    """:func:`gae` on tensors of one device, in the dtype of `values`, without a host synchronisation and without
    gradients.

    Raises:
        ValueError: If shapes do not match.
    """
    check_shapes(
        values, bootstrap_value, rewards=rewards, terminated=terminated, truncated=truncated, final_values=final_values
    )
    delta = temporal_difference(rewards, values, bootstrap_value, terminated, truncated, final_values, gamma)
    decay = trace_decay(terminated, truncated, gamma * lam, values.dtype)
    advantages = torch.addcmul(delta, decay, following_sum(delta, decay))
    return advantages, advantages + values


def temporal_difference(
    rewards: Tensor,
    values: Tensor,
    bootstrap_value: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    final_values: Tensor,
    gamma: float,
) -> Tensor:
    """r_t + gamma_t V'_{t+1} - V_t, ``[T, B]``; the arguments are those of :func:`gae`."""
    next_values = torch.cat((values[1:], bootstrap_value[None]))
    next_values = torch.where(truncated, final_values, next_values)
    next_values = next_values.masked_fill_(terminated, 0.0)
    return torch.add(rewards, next_values, alpha=gamma) - values


def trace_decay(terminated: Tensor, truncated: Tensor, decay: float, dtype: torch.dtype) -> Tensor:
    """`decay` where the episode goes on and 0 where it ends, ``[T, B]``."""
    return (terminated | truncated).logical_not_().to(dtype).mul_(decay)


def following_sum(terms: Tensor, decay: Tensor) -> Tensor:
    """For x_t = terms_t + decay_t x_{t+1} with x_T = 0, the x_{t+1} of every t, ``[T, B]``.

    The recurrence is solved by recursive doubling: 2 log2(T) kernels rather than T. A NaN or an infinity counts as 0
    here, because it would cross even a decay of 0.
    """
    steps, columns = terms.shape
    # Rows beyond T stay 0, so that a shifted view never needs its edge treated apart.
    sums, factors, next_sums, next_factors = terms.new_zeros(4, 2 * steps, columns).unbind()
    torch.nan_to_num(terms, nan=0.0, posinf=0.0, neginf=0.0, out=sums[:steps])
    torch.nan_to_num(decay, nan=0.0, out=factors[:steps])
    shift = 1
    while shift < steps:
        near, far = slice(0, steps), slice(shift, shift + steps)
        torch.addcmul(sums[near], factors[near], sums[far], out=next_sums[near])
        torch.mul(factors[near], factors[far], out=next_factors[near])
        sums, factors, next_sums, next_factors = next_sums, next_factors, sums, factors
        shift *= 2
    return sums[1 : steps + 1]
