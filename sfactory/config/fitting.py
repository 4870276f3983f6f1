"""Sizes that follow from others: how many environments and which batch suit an environment of several agents."""

from __future__ import annotations

import math

from sfactory.config.declaring import changed, given_names
from sfactory.config.fields import Config
from sfactory.config.sources import preset_value


def fitted(config: Config, rows_per_env: int) -> Config:
    """A resolved config whose sizes, unless its creator gave them, fit an environment of so many agents.

    Agents are rows. So there are fewer environments where each has several agents: as many as keep a group near the
    rows that the preset means, and the batch near its size. Then batch_size becomes the nearest that consists of whole
    segments and minibatches. What was asked for is left to :func:`sfactory.config.validation.validate`.
    """
    groups = config.runtime.groups
    if min(rows_per_env, groups, config.rollout, config.batch_size, config.optim.minibatches) < 1:
        return config
    if rows_per_env > 1 and "envs_per_worker" not in given_names(config):
        meant = max(1, preset_value(config, "envs_per_worker") // groups)

        def misfit(envs: int) -> float:
            rows = envs * rows_per_env
            return abs(_fitting_batch(config, rows) / config.batch_size - 1) + abs(rows / meant - 1)

        config = changed(config, envs_per_worker=min(range(1, meant + 1), key=misfit) * groups)
    rows = config.envs_per_group * rows_per_env
    if "batch_size" in given_names(config) or rows < 1:
        return config
    return changed(config, batch_size=_fitting_batch(config, rows))


def fitted_anew(config: Config, rows_per_env: int) -> Config:
    """:func:`fitted`, also where batch_size was given: the nearest that fits."""
    return fitted(changed(config, given=given_names(config) - {"batch_size"}), rows_per_env)


def _fitting_batch(config: Config, rows: int) -> int:
    """The batch size nearest to a config's that consists of whole segments of groups of so many rows, and of whole
    minibatches.

    Minibatches draw from rows where the policy has, or may have, a memory, and else from single samples.
    """
    segment, minibatches = config.rollout * rows, config.optim.minibatches
    drawn = rows if config.model.core != "none" or config.model.model != "none" else segment
    unit = segment * (minibatches // math.gcd(drawn, minibatches))
    return max(1, round(config.batch_size / unit)) * unit
