"""Random actions for the environments of a group."""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle

import numpy as np

from sfactory.envs.interface import EnvSpec, Group, Outcome
from sfactory.envs.observations import new_step_buffers
from sfactory.spaces import ActionSpec

ACTIONS = 64
"""Sets of random actions drawn in advance, because drawing one takes as long as a step of a small environment."""


def random_actions(env: EnvSpec, rows: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Uniform categories int32 ``[rows, K]`` and standard normal samples float32 ``[rows, D]``."""
    categorical = rng.integers(0, np.array(env.action.sizes), (rows, len(env.action.sizes)), np.int32)
    return categorical, rng.standard_normal((rows, env.action.continuous), np.float32)


def allowed_categories(action: ActionSpec, masks: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Uniform categories int32 ``[rows, K]`` of those that masks, bool ``[rows, logits]``, allow."""
    if not action.sizes:
        return np.zeros((len(masks), 0), np.int32)
    draws = (1 - rng.random(masks.shape, np.float32)) * masks  # positive where allowed
    ends = np.cumsum(action.sizes)[:-1]
    return np.stack([draw.argmax(1) for draw in np.split(draws, ends, axis=1)], 1).astype(np.int32)


def random_steps(group: Group, env: EnvSpec, rng: np.random.Generator) -> Callable[[], int]:
    """Reset a group, and step it by random actions, or random allowed ones where it has masks.

    Returns:
        What steps it once, and gives the number of rows that their actions had an effect on.
    """
    buffers, rows = new_step_buffers(env, group.rows), group.rows
    outcome = Outcome(np.zeros(rows, np.float32), np.zeros(rows, bool), np.zeros(rows, bool))
    actions = cycle([random_actions(env, rows, rng) for _ in range(ACTIONS)])
    group.reset(buffers)

    def step() -> int:
        categorical, continuous = next(actions)
        if buffers.mask is not None:
            categorical = allowed_categories(env.action, buffers.mask, rng)
        steps = int(np.count_nonzero(buffers.active))
        group.step(categorical, continuous, outcome, buffers)
        return steps

    return step
