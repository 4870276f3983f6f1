"""Results of a step of many rows, processed in one compiled pass. Imports numba, so its users import it when they are
made."""

from __future__ import annotations

import numpy as np
from numba import njit


@njit(cache=True, nogil=True, fastmath={"contract", "reassoc"})
def settle_step(
    reward, terminated, truncated, rests, resting, own_reward, own_terminated, own_truncated, first, active
):
    """Write all that a step says of its rows beside their observations, in one pass.

    Args:
        reward, terminated, truncated: float32, bool and bool ``[rows]``, as the environment gave them.
        rests: Whether a row rests for a step after its episode's end, in which it is reset; else it has been reset at
            once.
        resting: bool ``[rows]``, the rows that were reset in this step instead of stepped; becomes those that will be
            in the next one.
        own_reward, own_terminated, own_truncated: Take the outcome.
        first, active: take those after the step.

    Returns:
        How many episodes ended, and whether all rewards are finite.
    """
    ended, check = 0, np.float32(0)
    for row in range(len(reward)):
        began = resting[row]
        terminates = terminated[row] & (not began)  # not `and`: without branches many rows are done at once
        truncates = truncated[row] & (not (terminates | began))
        ends = terminates | truncates
        own_reward[row] = np.float32(0) if began else reward[row]
        own_terminated[row], own_truncated[row] = terminates, truncates
        first[row] = began if rests else ends
        active[row] = not (rests & ends)
        resting[row] = rests & ends
        ended += ends
        check += np.float32(0) * own_reward[row]  # 0, or NaN
    return ended, check == 0


@njit(cache=True, nogil=True, fastmath={"contract", "reassoc"})
def all_finite(values):
    """Whether there is neither NaN nor infinity among float32 ``[N]``: times zero either is NaN, and so is then the
    sum."""
    total = np.float32(0)
    for i in range(len(values)):
        total += values[i] * np.float32(0)
    return total == 0


@njit(cache=True, nogil=True)
def all_known(categories, sizes):
    """Whether categories ``[N * K]``, K for each row, are all at least 0 and below int64 ``sizes [K]``."""
    good = True
    for begin in range(0, len(categories), len(sizes)):
        for i in range(len(sizes)):
            category = np.int64(categories[begin + i])
            good &= (category >= 0) & (category < sizes[i])
    return good
