"""The kernel of :mod:`sfactory.kernels.fused_loss`. Importing this module needs Triton."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def loss_and_gradients(
    log_prob, value, exploration, advantages, returns, old_values, old_log_prob, log_weights, valid, totals,
    of_log_prob, of_value, of_exploration, sums, count, clip, value_clip, value_coef, exploration_coef, tv_limit,
    SURROGATE: tl.constexpr, BOUNDS_SHIFT: tl.constexpr, CLIPS_VALUES: tl.constexpr, SUMS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Fill the gradients, and a row of sums for each program, in the order of :mod:`sfactory.losses`.

    Args:
        valid: uint8; 0 where a sample does not count.
        totals: float64 ``[2]``; valid samples of the whole minibatch, and the sum of |pi / mu - 1| over them.
        count: Samples of the chunk.
    """
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    within = place < count
    # Selected before any arithmetic, so that a NaN of a sample that is not valid goes nowhere.
    taken = (tl.load(valid + place, mask=within, other=0) != 0) & within
    new = tl.load(log_prob + place, mask=taken, other=0.0)
    old = tl.load(old_log_prob + place, mask=taken, other=0.0)
    advantage = tl.load(advantages + place, mask=taken, other=0.0)
    target = tl.load(returns + place, mask=taken, other=0.0)
    predicted = tl.load(value + place, mask=taken, other=0.0)
    explored = tl.load(exploration + place, mask=taken, other=0.0)
    samples = tl.load(totals)
    scale = (1.0 / tl.maximum(samples, 1.0)).to(tl.float32)

    log_ratio = new - old
    ratio = tl.exp(log_ratio)
    excess = ratio - 1.0
    if BOUNDS_SHIFT:
        beyond = tl.load(totals + 1) - 2.0 * tv_limit * samples
        log_shift = log_ratio + tl.load(log_weights + place, mask=taken, other=0.0)
        kept = tl.where(log_shift * advantage > 0, 0.0, advantage)
        advantage = tl.where(beyond > 0, kept, advantage)
    if SURROGATE:
        gain, limit = ratio * advantage, advantage + clip * tl.abs(advantage)
        clipped = (gain > limit) | ((advantage >= 0) & (excess > clip))  # also where 0 times infinity is NaN
        policy = -tl.where(clipped, limit, gain)  # any other NaN stays
        slope = tl.where(clipped, 0.0, gain)
    else:
        policy = -new * advantage
        slope = advantage
    error = predicted - target
    square, pull = error * error, error
    if CLIPS_VALUES:
        change = predicted - tl.load(old_values + place, mask=taken, other=0.0)
        clipped_error = error - change + tl.minimum(tl.maximum(change, -value_clip), value_clip)
        # Within the clip range both errors are the same but for rounding, and so are their gradients.
        further = (tl.abs(change) > value_clip) & (clipped_error * clipped_error > square)
        square = tl.where(further, clipped_error * clipped_error, square)
        pull = tl.where(further, 0.0, pull)
    tl.store(of_log_prob + place, tl.where(taken, -slope * scale, 0.0), mask=within)
    tl.store(of_value + place, tl.where(taken, value_coef * pull * scale, 0.0), mask=within)
    tl.store(of_exploration + place, tl.where(taken, exploration_coef * scale, 0.0), mask=within)

    row = sums + tl.program_id(0) * SUMS
    wide, hit = target.to(tl.float64), error.to(tl.float64)
    tl.store(row + 0, tl.sum(policy.to(tl.float64)))
    tl.store(row + 1, tl.sum(0.5 * square.to(tl.float64)))
    tl.store(row + 2, tl.sum(explored.to(tl.float64)))
    tl.store(row + 3, tl.sum((excess - log_ratio).to(tl.float64)))
    tl.store(row + 4, tl.sum((taken & (tl.abs(excess) > clip)).to(tl.float64)))
    tl.store(row + 5, tl.sum(hit))
    tl.store(row + 6, tl.sum(hit * hit))
    tl.store(row + 7, tl.sum(wide))
    tl.store(row + 8, tl.sum(wide * wide))
    tl.store(row + 9, tl.sum(taken.to(tl.float64)))
