"""What a resolved config must be as a whole: fields within their limits, and sizes that divide one another."""

from __future__ import annotations

import math
import numbers
import operator
from typing import Any

from sfactory.config.checking import check_types
from sfactory.config.declaring import settings_of
from sfactory.config.fields import Config
from sfactory.config.lag import least_max_lag, slot_count
from sfactory.errors import ConfigError, shown

MOST_SLOTS = 2**22 - 1
"""Slots that a message between workers can name."""


def validate(config: Config, rows_per_env: int = 1) -> None:
    """Check a resolved config as a whole.

    Args:
        rows_per_env: Agents of one environment.

    Raises:
        ConfigError: With one sentence for each problem.
    """
    check_types(config)
    problems = [] if config.env else ["env is not set; name a Gymnasium id, for example --env CartPole-v1"]
    problems += _limit_problems(config)
    if not problems:
        problems = _eval_problems(config) + _rate_problems(config) + _own_code_problems(config)
        problems += _size_problems(config, rows_per_env)
    if problems:
        raise ConfigError(*problems)


def _limit_problems(config: Config) -> list[str]:
    """Fields that are outside the limits that they declare."""
    problems = []
    for name, (limits, _) in settings_of(Config).items():
        value = operator.attrgetter(name)(config)
        if limits is None or value is None:
            continue
        several = isinstance(value, list | tuple)
        if not all(map(limits.allow, value if several else (value,))):
            said = shown(value) if isinstance(value, str) else value
            problems.append(f"{name} is {said}; {'each' if several else 'it'} must be {limits}")
    return problems


def _eval_problems(config: Config) -> list[str]:
    """Videos are of evaluations."""
    if config.eval.every or not config.eval.video_every:
        return []
    return [
        f"eval.video_every is {config.eval.video_every} and eval.every is 0, so no episode is evaluated; set "
        "--eval.every"
    ]


def _rate_problems(config: Config) -> list[str]:
    """A rate that follows the KL divergence needs a second update, as an update's is that before its step."""
    if config.optim.schedule != "adaptive_kl" or config.updates_per_batch > 1:
        return []
    return [
        "optim.schedule adaptive_kl follows what the updates of a batch do, and epochs 1 with optim.minibatches 1 is a "
        "single one, which begins with a divergence of 0; raise --epochs or --optim.minibatches, or choose linear"
    ]


def _own_code_problems(config: Config) -> list[str]:
    """What is set for code of one's own needs that code, and weights of loss terms are numbers."""
    coefs, problems = config.loss.term_coefs, []
    if coefs and config.loss.terms == "none":
        problems.append("loss.term_coefs is set, and loss.terms, whose terms it would weigh, is none; set loss.terms")
    if wrong := [name for name, coef in coefs.items() if not _is_finite(coef)]:
        problems.append(f"loss.term_coefs {wrong[0]} is {shown(coefs[wrong[0]])}; it must be a finite number")
    parts = config.model.model, config.model.encoder, config.model.core
    if config.model.kwargs and all(isinstance(part, str) and ":" not in part for part in parts):
        problems.append(
            "model.kwargs is set, and no part of the model takes it: only an encoder, a core or a model of your own, "
            "module:Class, does"
        )
    return problems


def _is_finite(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool) and math.isfinite(value)


def _size_problems(config: Config, rows_per_env: int) -> list[str]:
    """Sizes that must divide one another, and the lag that the number of slots implies."""
    groups = config.runtime.groups
    if config.envs_per_worker % groups:
        up = -(-config.envs_per_worker // groups) * groups
        return [f"envs_per_worker {config.envs_per_worker} is not a multiple of runtime.groups {groups}; try {up}"]
    rows = config.envs_per_group * rows_per_env
    segment = config.rollout * rows
    if config.batch_size % segment:
        near = max(1, round(config.batch_size / segment)) * segment
        return [
            f"batch_size {config.batch_size} is not a multiple of rollout {config.rollout} x rows {rows} = {segment}; "
            f"try {near}"
        ]
    problems = []
    if (slots := slot_count(config, rows)) > MOST_SLOTS:
        problems.append(
            f"these sizes make {slots} slots; at most {MOST_SLOTS} are possible; lower batch_size, spare_batches or "
            "workers"
        )
    if (problem := minibatch_problem(config, recurrent=config.model.core != "none")) is not None:
        problems.append(problem)
    if config.loss.max_lag is not None and config.loss.max_lag < (least := least_max_lag(config, rows)):
        problems.append(
            f"loss.max_lag {config.loss.max_lag} is below {least}, the lag that these sizes imply; raise it, raise "
            "batch_size, or lower workers, epochs or optim.minibatches"
        )
    return problems


def minibatch_problem(config: Config, recurrent: bool) -> str | None:
    """The problem with the number of minibatches, if there is one: it must divide what they draw from, the rows of a
    batch or its single samples.

    Args:
        recurrent: Whether the policy has a state, so that a row of a batch stays in one piece.
    """
    rows, count = config.batch_size // config.rollout, config.optim.minibatches
    if recurrent and rows % count:
        return (
            f"optim.minibatches {count} does not divide the {rows} rows of a batch (batch_size {config.batch_size} / "
            f"rollout {config.rollout}), which stay whole for a recurrent policy; try {_divisor_near(rows, count)}"
        )
    if config.batch_size % count:
        return (
            f"optim.minibatches {count} does not divide batch_size {config.batch_size}; try "
            f"{_divisor_near(config.batch_size, count)}"
        )
    return None


def exploration_problem(config: Config, categorical: bool) -> str | None:
    """The problem with the exploration bonus, if there is one: the built-in distribution has a divergence from the
    uniform policy for categorical actions alone.

    Args:
        categorical: Whether some actions are.
    """
    if config.loss.exploration != "kl" or not config.loss.entropy_coef or categorical:
        return None
    if config.model.distribution != "auto":
        return None
    return (
        "loss.exploration kl needs categorical actions, and these are continuous, which would get no bonus; use entropy"
    )


def _divisor_near(number: int, wanted: int) -> int:
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return min((*small, *(number // d for d in small)), key=lambda d: abs(d - wanted))
