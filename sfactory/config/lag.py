"""Sizes that follow from a config whose `workers` are set: of batches and of the arena, and the policy lag that they
imply."""

from __future__ import annotations

from sfactory.config.fields import Config


def segments_per_batch(config: Config, rows: int) -> int:
    """Segments (slots) of `rows` rows that make a training batch."""
    return config.batch_size // (config.rollout * rows)


def slot_count(config: Config, rows: int) -> int:
    """Slots of the arena. Free slots are the only back-pressure, so this number sets how far sampling may run ahead:
    exactly one batch where the lag must be 0, else one slot for each group and `spare_batches` batches, at least
    one batch."""
    per_batch = segments_per_batch(config, rows)
    if config.lag_free:
        return per_batch
    assert config.workers is not None, "workers must be set"
    return max(per_batch, config.workers * config.runtime.groups + per_batch * config.runtime.spare_batches)


def least_max_lag(config: Config, rows: int) -> int:
    """The smallest bound on the lag, in updates, under which the learner never has to wait for a particular segment as
    long as segments finish in the order in which they were begun."""
    updates = config.updates_per_batch
    if config.lag_free:
        return updates - 1
    batches_ahead = -(-slot_count(config, rows) // segments_per_batch(config, rows))
    return updates * (batches_ahead + 1) - 1


def max_lag(config: Config, rows: int) -> int:
    """The bound on the lag, in updates, that this run keeps."""
    if config.loss.max_lag is not None:
        return config.loss.max_lag
    least = least_max_lag(config, rows)
    return least if config.lag_free else 2 * least
