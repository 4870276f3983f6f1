"""The seed of every environment of a run."""

from __future__ import annotations

import functools

import numpy as np


@functools.cache
def _base(run_seed: int) -> int:
    return int(np.random.SeedSequence(run_seed).generate_state(1)[0])


_STRIDE = 1327217885
"""2**31 divided by the golden ratio, and odd: modulo 2**31 its multiples return only after 2**31 of them, and keep far
apart until then."""


def env_seed(run_seed: int, index: int, remade: int = 0) -> int:
    """Seed of environment number `index` of a run, in [0, 2**31).

    Different for every environment of a run, and the same however the environments are spread over workers and groups.

    Args:
        remade: How often it has been made anew. No two seeds of a run agree as long as environments x remade stays
            below 9e8.
    """
    return (_base(run_seed) + index + remade * _STRIDE) % 2**31
