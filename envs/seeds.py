"""The seed of every environment of a run."""

from __future__ import annotations

import functools

import numpy as np


@functools.cache
def _base(run_seed: int) -> int:
    return int(np.random.SeedSequence(run_seed).generate_state(1)[0])


def env_seed(run_seed: int, index: int) -> int:
    """Seed of environment number `index` of a run, in [0, 2**31).

    Different for every environment of a run, and the same however the environments are spread over workers and groups.
    """
    return (_base(run_seed) + index) % 2**31
