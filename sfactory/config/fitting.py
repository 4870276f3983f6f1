"""Sizes that follow from others: how many environments, which segments and which batch suit the number of workers and
an environment of several agents."""

from __future__ import annotations

import math

from sfactory.config.declaring import changed, given_names
from sfactory.config.fields import Config
from sfactory.config.sources import preset_value

MOST_BATCHES = 2
"""Samples that may be under way in segments, in batches: as many as the presets were tuned with at most."""
SHORTEST_ROLLOUT = 16
"""Env steps below which no segment is made shorter."""


def fitted(config: Config, rows_per_env: int, images: bool = False, own_rows: int | None = None) -> Config:
    """A resolved config whose sizes, unless its creator gave them, fit its workers and the agents of an environment.

    A preset's environments are those of the whole run, with which it was tuned: more workers have fewer each. Else the
    samples of sixteen workers, each of which fills segments of its own, would be many batches old when they are
    learned from. Where one environment for each group still is too many, segments become shorter.

    Agents are rows. So there are fewer environments where each has several agents: as many as keep a group near the
    rows that the preset means, and the batch near its size. Then batch_size becomes the nearest that consists of whole
    segments and minibatches. What was asked for is left to :func:`sfactory.config.validation.validate`.

    Args:
        images: Whether observations have images, whose presets were tuned with two workers instead of one.
        own_rows: Environments of a group that are no others: a vector environment's own number; None if a run decides.
    """
    groups, given = config.runtime.groups, given_names(config)
    if min(rows_per_env, groups, config.rollout, config.batch_size, config.optim.minibatches) < 1:
        return config
    share = 1.0 if config.preset == "none" else max(1.0, (config.workers or 1) / (2 if images else 1))
    if "envs_per_worker" not in given and own_rows is not None:
        config = changed(config, envs_per_worker=own_rows * groups)
    elif "envs_per_worker" not in given and (share > 1 or rows_per_env > 1):
        meant = max(1, int(preset_value(config, "envs_per_worker") / share) // groups)
        config = changed(config, envs_per_worker=_fitting_envs(config, rows_per_env, meant) * groups)
        if share > 1 and "rollout" not in given and config.model.core == config.model.model == "none":
            config = _with_short_segments(config, rows_per_env)
    rows = config.envs_per_group * rows_per_env
    if "batch_size" in given or rows < 1:
        return config
    return changed(config, batch_size=_fitting_batch(config, rows))


def _fitting_envs(config: Config, rows_per_env: int, meant: int) -> int:
    """Environments of a group that is meant to have so many rows."""
    if rows_per_env == 1:  # as many as whole segments make the batch of, if there is such a number
        return next((n for n in range(meant, 0, -1) if config.batch_size % (config.rollout * n) == 0), meant)

    def misfit(envs: int) -> float:
        rows = envs * rows_per_env
        return abs(_fitting_batch(config, rows) / config.batch_size - 1) + abs(rows / meant - 1)

    return min(range(1, meant + 1), key=misfit)


def _with_short_segments(config: Config, rows_per_env: int) -> Config:
    """Segments so short that those of all workers are at most MOST_BATCHES, or one where the lag must be 0."""
    rows = (config.workers or 1) * config.envs_per_worker * rows_per_env
    most, rollout = config.batch_size * (1 if config.lag_free else MOST_BATCHES), config.rollout
    while rows * rollout > most and rollout >= 2 * SHORTEST_ROLLOUT:
        rollout //= 2
    return changed(config, rollout=rollout)


def fitted_with_free_batch_size(config: Config, rows_per_env: int, images: bool) -> Config:
    """:func:`fitted`, which may also change a batch_size that was given: to the nearest that fits."""
    return fitted(changed(config, given=given_names(config) - {"batch_size"}), rows_per_env, images)


def _fitting_batch(config: Config, rows: int) -> int:
    """The batch size nearest to a config's that consists of whole segments of groups of so many rows, and of whole
    minibatches.

    Minibatches draw from rows where the policy has, or may have, a memory, and else from single samples.
    """
    segment, minibatches = config.rollout * rows, config.optim.minibatches
    drawn = rows if config.model.core != "none" or config.model.model != "none" else segment
    unit = segment * (minibatches // math.gcd(drawn, minibatches))
    return max(1, round(config.batch_size / unit)) * unit
