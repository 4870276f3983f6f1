"""The hyperbolic tangent on the CPU; torch's own takes many times as long for float32."""

from __future__ import annotations

import numba
import numpy as np
from torch import Tensor

_SATURATED = np.float32(7.90531110763549805)
"""Where the approximation ends."""
_ONE, _ONE_FROM = np.float32(1), np.float32(9.0108)
"""The nearest float32 to tanh is 1 from there on, so that 1 - tanh^2 is 0 and a saturated unit has no gradient."""
# Numerator (odd powers 1 to 13) and denominator (even powers 0 to 6) of a minimax rational approximation, within 3e-7
# of tanh.
_P = np.array(
    (
        4.89352455891786e-03, 6.37261928875436e-04, 1.48572235717979e-05, 5.12229709037114e-08,
        -8.60467152213735e-11, 2.00018790482477e-13, -2.76076847742355e-16,
    ),
    np.float32,
)  # fmt: skip
_Q = np.array((4.89352518554385e-03, 2.26843463243900e-03, 1.18534705686654e-04, 1.19825839466702e-06), np.float32)
_P1, _P3, _P5, _P7, _P9, _P11, _P13 = _P
_Q0, _Q2, _Q4, _Q6 = _Q


@numba.njit(cache=True, nogil=True, fastmath={"contract"}, error_model="numpy", inline="always")
def tanh_of(x):
    """The hyperbolic tangent of a float32, within 3e-7; in a loop the compiler does sixteen at once."""
    v = min(max(x, -_SATURATED), _SATURATED)
    s = v * v
    odd = ((((((_P13 * s + _P11) * s + _P9) * s + _P7) * s + _P5) * s + _P3) * s + _P1) * v
    y = odd / (((_Q6 * s + _Q4) * s + _Q2) * s + _Q0)
    return np.copysign(_ONE, x) if abs(x) > _ONE_FROM else y


@numba.njit(cache=True, nogil=True, fastmath={"contract"}, error_model="numpy")
def _tanh(x):
    for i in range(x.size):
        x[i] = tanh_of(x[i])


def tanh_(x: Tensor) -> Tensor:
    """The hyperbolic tangent in place.

    Args:
        x: float32 on the CPU, contiguous, outside autograd.
    """
    _tanh(x.detach().numpy().reshape(-1))
    return x
