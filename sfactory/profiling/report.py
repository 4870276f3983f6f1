"""Output of ``python -m sfactory.profile``: tables, or one mapping for ``--json``."""

from __future__ import annotations

import math
from typing import Any

from rich.console import Console
from rich.table import Table

from sfactory.errors import counted, thousands
from sfactory.files import json_values
from sfactory.profiling.bottleneck import Bottleneck
from sfactory.profiling.measure import KINDS, Profile
from sfactory.profiling.tune import searched_values
from sfactory.telemetry.stopwatch import PHASES


def show(console: Console, profile: Profile, ceiling: float, bottleneck: Bottleneck) -> None:
    """Print a profile.

    Args:
        ceiling: Env steps per second that the machine could do at most; NaN where there is no such figure.
    """
    stores = [] if profile.plan.on_device else [_store_table(profile)]
    for table in (_start_table(profile), _time_table(profile), *stores, _speed_table(profile, ceiling)):
        console.print(table)
    for worker, kernels in profile.kernels.items():
        text = f"Kernels of the {worker}: {', '.join(kernels) or 'none'}"
        console.print(text, markup=False, highlight=False, soft_wrap=True)
    console.print(
        f"Bottleneck: {bottleneck.name}, {bottleneck.reason}",
        style="bold",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )
    for advice in bottleneck.advice:
        console.print(f"  try {advice}", markup=False, highlight=False, soft_wrap=True)


def _start_table(profile: Profile) -> Table:
    labels = {
        "before the run": "command, imports and plan",
        "rollout": "  environments",
        "policy": "  policy's kernels",
        "learner": "  learner's kernels",
        "run to first batch": "processes, to the first batch",
    }
    table = Table("start", "seconds", title="from the command to learning")
    for part, seconds in profile.start.items():
        table.add_row(labels[part], f"{seconds:.2f}")
    return table


def _time_table(profile: Profile) -> Table:
    plan, names = profile.plan, profile.interval.names
    numbers = {kind: sum(name.split("-")[0] == kind for name in names) for kind in KINDS}
    heads = {
        "rollout": counted(numbers["rollout"], "rollout worker"),
        "policy": "inference within them" if plan.inline_inference else counted(numbers["policy"], "policy worker"),
        "learner": "null learner" if plan.sample_only else "learner",
    }
    kinds = [kind for kind in KINDS if numbers[kind]]  # the learner is alone where environments are on its device
    title = f"{plan.config.env}: {profile.seconds:.1f} s after {profile.warm_up_s:.1f} s of warm-up"
    table = Table("share of wall time", *(heads[kind] for kind in kinds), title=title)
    shares = [profile.interval.phases(kind) for kind in kinds]
    for phase in PHASES:
        values = [share.get(phase, 0.0) for share in shares]
        if any(value >= 5e-4 for value in values):
            table.add_row(phase, *(f"{value:.1%}" if value else "" for value in values))
    table.add_section()
    table.add_row("busy", *(f"{profile.busy(kind):.1%}" for kind in kinds), style="bold")
    table.add_row("CPU cores", *(f"{profile.cpu(kind):.2f}" for kind in kinds))
    return table


def _store_table(profile: Profile) -> Table:
    table = Table("waiting", "mean", "most", title="requests, slots and batches")
    for name, level in profile.levels.items():
        table.add_row(name, f"{level.mean:.1f}", f"{level.most:.0f}")
    table.add_section()
    table.add_row("rows of a forward pass", f"{profile.batch_mean:.0f}", "")
    passes = sum(profile.batch_sizes.values())
    for most, count in profile.batch_sizes.items():
        table.add_row(f"  {(most + 1) // 2} to {most}", f"{count / passes:.1%}", "")
    if math.isnan(profile.lag_mean):  # nothing was learned
        return table
    table.add_section()
    table.add_row("policy lag, updates", f"{profile.lag_mean:.1f}", f"{profile.lag_max:.0f}")
    return table


def _speed_table(profile: Profile, ceiling: float) -> Table:
    table = Table(
        "speed", "per second", title="env steps sampled" if profile.plan.sample_only else "env steps, learning included"
    )
    table.add_row("env steps", thousands(profile.fps))
    table.add_row("frames", thousands(profile.frames_per_s))
    if not math.isnan(ceiling):
        table.add_row("ceiling, env steps", thousands(ceiling))
        table.add_row("fraction reached", f"{profile.fps / ceiling:.1%}", style="bold")
    return table


def values(profile: Profile, ceiling: float, bottleneck: Bottleneck) -> dict[str, Any]:
    """The mapping that ``--json`` prints, with null for numbers that are not finite."""
    return json_values(
        {
            "env": profile.plan.config.env,
            "sample_only": profile.plan.sample_only,
            "seconds": profile.seconds,
            "start_s": profile.start,
            "fps": profile.fps,
            "frames_per_s": profile.frames_per_s,
            "ceiling": ceiling,
            "fraction": profile.fps / ceiling,
            "bottleneck": bottleneck.name,
            "reason": bottleneck.reason,
            "advice": bottleneck.advice,
            "phases": {kind: profile.interval.phases(kind) for kind in KINDS},
            "accounted_s": {kind: profile.interval.accounted_s(kind) for kind in KINDS},
            "busy": {kind: profile.busy(kind) for kind in KINDS},
            "cpu_cores": {kind: profile.cpu(kind) for kind in KINDS},
            "batch_mean": profile.batch_mean,
            "batch_sizes": profile.batch_sizes,
            "levels": {name: level._asdict() for name, level in profile.levels.items()},
            "lag_mean": profile.lag_mean,
            "lag_max": profile.lag_max,
            "kernels": profile.kernels,
            "settings": searched_values(profile.plan.config),
        }
    )
