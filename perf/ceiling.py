"""What this machine could do at most for an environment, a model and a precision.

    python perf/ceiling.py --env ALE/Pong-v5 [--seconds 1] [--json FILE] [any flag of sfactory.train]

Simulation alone in one process and in more, inference alone and training alone by batch size, threads and precision,
each with all cores busy with the same workload, and the ceiling that follows for the run as the flags describe it.
`--seconds` are those of each measurement. A cost is in core microseconds per env step: of two threads that take 1 us
for a row together, the row costs 2. On a GPU it is in microseconds.

The rows "answer" are a whole policy worker that answers several groups at once: forward pass, sampled actions, all
writes.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import torch
from rich.console import Console
from rich.table import Table

from sfactory.config import Config, devices, env_name
from sfactory.config.command_line import from_command_line
from sfactory.config.validation import validate
from sfactory.errors import ConfigError, SfactoryError
from sfactory.profiling.ceiling import Ceiling, measure, measure_ceiling, precision_of, with_threads
from sfactory.profiling.workloads import SIMULATION, TRAINING, Workload, device_of, inference_workloads, rows_of
from sfactory.runtime.interrupts import end_at_once_when_interrupted
from sfactory.runtime.plan import Plan
from sfactory.runtime.planning import make_plan
from sfactory.runtime.processes import fork_server

SMALL_ROWS = (16, 64)
"""Sizes at which the model is timed besides those that the ceiling is looked for at."""
BATCHES = (0.25, 1, 4)
"""Multiples of the run's batch size; the groups grow and shrink with it."""


@dataclass(frozen=True)
class Cost:
    """One measurement.

    Attributes:
        rows: Of a request (simulation: of a group), or samples of a training batch.
        env_steps_per_s: Of all processes together.
        core_us: Microseconds of one core (on a GPU: of the GPU) per env step.
    """

    workload: Literal["simulation", "forward", "answer", "training"]
    rows: int
    precision: str
    threads: int
    processes: int
    env_steps_per_s: float
    core_us: float


def simulation_costs(plan: Plan, seconds: float) -> Iterator[Cost]:
    for processes in _doubling(devices.cores()):
        (speed,) = measure(plan, {SIMULATION: seconds}, processes)
        yield Cost("simulation", plan.rows, "", 1, processes, speed, 1e6 * processes / speed)


def inference_costs(plan: Plan, seconds: float) -> Iterator[Cost]:
    workloads = sorted({*(Workload("forward", rows) for rows in SMALL_ROWS), *inference_workloads(plan)})
    device = device_of(plan, workloads[0])
    for variant, threads, processes in _variants(plan, device):
        speeds = measure(variant, dict.fromkeys(workloads, seconds), processes)
        for workload, speed in zip(workloads, speeds, strict=True):
            core_us = 1e6 * threads * processes / speed
            yield Cost(
                workload.kind,
                rows_of(plan, workload),
                precision_of(variant, device),
                threads,
                processes,
                speed,
                core_us,
            )


def training_costs(plan: Plan, seconds: float) -> Iterator[Cost]:
    device = device_of(plan, TRAINING)
    for variant, threads, processes in _variants(plan, device):
        for times in BATCHES:
            if (sized := _with_batch(variant, times)) is not None:
                (speed,) = measure(sized, {TRAINING: seconds}, processes)
                core_us = 1e6 * threads * processes / speed
                yield Cost(
                    "training", sized.config.batch_size, precision_of(sized, device), threads, processes, speed, core_us
                )


def _doubling(most: int) -> list[int]:
    """1, 2, 4 and so on, and the most."""
    return sorted({*(2**i for i in range(most.bit_length())), most})


def _variants(plan: Plan, device: torch.device) -> Iterator[tuple[Plan, int, int]]:
    """The plan in all precisions that the device is good at and with all numbers of threads; threads and processes that
    fill it."""
    on_cpu, cores = device.type == "cpu", devices.cores()
    for precision in ("float32", "bfloat16") if devices.computes_bfloat16(device) else ("float32",):
        precise = dataclasses.replace(plan, config=dataclasses.replace(plan.config, precision=precision))
        for threads in _doubling(cores) if on_cpu else [1]:
            yield with_threads(precise, threads), threads, cores // threads if on_cpu else 1


def _with_batch(plan: Plan, times: float) -> Plan | None:
    """The plan with groups and a batch so many times as large; None where that does not work out."""
    envs, batch = float(plan.config.envs_per_worker * times), float(plan.config.batch_size * times)
    if not envs.is_integer() or not batch.is_integer():
        return None
    config = dataclasses.replace(plan.config, envs_per_worker=int(envs), batch_size=int(batch))
    try:
        validate(config, plan.env.agents)
    except ConfigError:
        return None
    return dataclasses.replace(plan, config=config)


def show(console: Console, costs: list[Cost]) -> None:
    """Print the costs of one kind of workload."""
    table = Table("work", "rows", "precision", "threads", "processes", "env steps/s", "core us")
    for cost in costs:
        speed, microseconds = f"{cost.env_steps_per_s:,.0f}", f"{cost.core_us:.3g}"
        table.add_row(
            cost.workload, str(cost.rows), cost.precision, str(cost.threads), str(cost.processes), speed, microseconds
        )
    console.print(table)


def show_ceiling(console: Console, ceiling: Ceiling) -> None:
    parts = {"simulation": (ceiling.simulation_s, "cpu"), "inference": (ceiling.inference_s, ceiling.inference_device)}
    parts["training"] = (ceiling.training_s, ceiling.learner_device)
    listed = ", ".join(f"{name} {1e6 * seconds:.3g} us ({device})" for name, (seconds, device) in parts.items())
    settings = f"batch {ceiling.batch_size}, {ceiling.precision}, {ceiling.cores} cores"
    console.print(f"{listed}; {settings}", highlight=False, soft_wrap=True)
    console.print(f"ceiling: {ceiling.env_steps_per_s:,.0f} env steps/s", style="bold", highlight=False)


def run(config: Config, seconds: float) -> tuple[list[Cost], Ceiling]:
    """Measure and print everything."""
    console = Console()
    costs: list[Cost] = []
    with fork_server():
        plan = with_threads(make_plan(config), 1)
        console.print(f"{env_name(config.env)}, {devices.cores()} cores, torch {torch.__version__}", highlight=False)
        for costs_of in (simulation_costs, inference_costs, training_costs):
            measured = list(costs_of(plan, seconds))
            show(console, measured)
            costs += measured
        ceiling = measure_ceiling(plan.config, 9 * seconds)
    show_ceiling(console, ceiling)
    return costs, ceiling


def main() -> None:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--json", type=Path)
    args, rest = parser.parse_known_args()
    config = from_command_line(rest, "python perf/ceiling.py", __doc__)
    try:
        costs, ceiling = run(config, args.seconds)
    except SfactoryError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(error.exit_status) from None
    if args.json:
        values = asdict(ceiling) | {"env_steps_per_s": ceiling.env_steps_per_s}
        args.json.write_text(json.dumps({"ceiling": values, "costs": [asdict(cost) for cost in costs]}, indent=1))


if __name__ == "__main__":
    end_at_once_when_interrupted()
    main()
