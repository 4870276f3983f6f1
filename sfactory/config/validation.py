"""What a resolved config must be as a whole: ranges of single fields, and sizes that must divide one another."""

from __future__ import annotations

import math
import operator
from typing import Any

from sfactory.config import Config, check_types
from sfactory.config.lag import least_max_lag, slot_count
from sfactory.errors import ConfigError, shown

MOST_SLOTS = 2**22 - 1
"""Slots that a message between workers can name."""
_ANY = math.inf
_FROM_0 = (
    "seed", "optim.max_grad_norm", "loss.rho_bar", "loss.c_bar", "loss.rho_bar_pg", "loss.value_clip",
    "loss.value_coef", "loss.tv_limit",
    "loss.reward_clip", "loss.max_lag", "runtime.restarts", "log.save_every_s", "log.milestone_every",
)  # fmt: skip
_FROM_1 = (
    "steps", "envs_per_worker", "batch_size", "epochs", "model.features", "model.core_size", "optim.minibatches",
    "optim.max_skipped",
    "runtime.spare_batches", "log.episode_window", "log.keep",
)  # fmt: skip
_ABOVE_0 = ("optim.lr", "optim.eps", "optim.target_kl", "loss.clip", "runtime.step_timeout_s", "log.report_every_s")
_RANGES: dict[str, tuple[float, float]] = {
    **dict.fromkeys(_FROM_0, (0, _ANY)),
    **dict.fromkeys(_FROM_1, (1, _ANY)),
    **dict.fromkeys(("loss.gamma", "loss.lam", "runtime.env_fault_rate"), (0, 1)),
    **dict.fromkeys(("runtime.learner_threads", "runtime.inference_threads", "runtime.env_threads"), (1, 1024)),
    **dict.fromkeys(("workers", "runtime.groups"), (1, 10_000)),
    "runtime.policy_workers": (0, 10_000),
    "runtime.rollout_nice": (0, 19),
    "rollout": (1, 1_000_000),
    "model.core_layers": (1, 100),
}
"""Least and greatest value of fields, where there is one. Those of the sizes are far beyond what a machine can do;
messages between workers have room for them."""


def _value_of(config: Config, name: str) -> Any:
    """The value of a field by its dotted name."""
    return operator.attrgetter(name)(config)


def _said(low: float, high: float) -> str:
    return f"be at least {low}" if high == _ANY else f"lie between {low} and {high}"


def validate(config: Config, rows_per_env: int = 1) -> None:
    """Check a resolved config as a whole.

    Args:
        rows_per_env: Agents of one environment.

    Raises:
        ConfigError: With one sentence for each problem.
    """
    check_types(config)
    problems: list[str] = []

    def require(condition: bool, message: str) -> None:
        if not condition:
            problems.append(message)

    require(bool(config.env), "env is not set; name a Gymnasium id, for example --env CartPole-v1")
    for name, (low, high) in _RANGES.items():
        value = _value_of(config, name)
        require(value is None or low <= value <= high, f"{name} is {value}; it must {_said(low, high)}")
    for name in _ABOVE_0:
        require(_value_of(config, name) > 0, f"{name} is {_value_of(config, name)}; it must be above 0")
    require(
        all(width >= 1 for width in config.model.hidden),
        f"model.hidden is {config.model.hidden}; every width must be at least 1",
    )
    require(
        all(0 <= beta < 1 for beta in config.optim.betas),
        f"optim.betas are {config.optim.betas}; each must be at least 0 and below 1",
    )
    for name in ("device", "runtime.inference_device"):
        value = _value_of(config, name)
        names = [] if value is None else value.split(",") if name == "runtime.inference_device" else [value]
        require(all(map(_known_device, names)), f"{name} is {shown(value)}; use auto, cpu, cuda or cuda:N")
    if not problems:
        problems += _size_problems(config, rows_per_env)
    if problems:
        raise ConfigError(*problems)


def _known_device(name: str) -> bool:
    return name in ("auto", "cpu", "cuda") or (name.startswith("cuda:") and name[5:].isascii() and name[5:].isdigit())


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
            "batch_size, "
            "or lower workers, epochs or optim.minibatches"
        )
    return problems


def minibatch_problem(config: Config, recurrent: bool) -> str | None:
    """What is wrong with the number of minibatches: it must divide what they draw from, the rows of a batch or its
    single samples.

    Args:
        recurrent: Whether the policy has a state, so that a row of a batch stays in one piece.
    """
    rows, count = config.batch_size // config.rollout, config.optim.minibatches
    if recurrent and rows % count:
        return (
            f"optim.minibatches {count} does not divide the {rows} rows of a batch (batch_size {config.batch_size} / "
            "rollout "
            f"{config.rollout}), which stay whole for a recurrent policy; try {_divisor_near(rows, count)}"
        )
    if config.batch_size % count:
        return (
            f"optim.minibatches {count} does not divide batch_size {config.batch_size}; try "
            f"{_divisor_near(config.batch_size, count)}"
        )
    return None


def _divisor_near(number: int, wanted: int) -> int:
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return min((*small, *(number // d for d in small)), key=lambda d: abs(d - wanted))
