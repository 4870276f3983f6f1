"""Throughput of full training runs, learning included, and the share of this machine's ceiling that they reach.

    python -m perf.fps [--only NAME ...] [--seconds 20] [--repeats 3] [--ceiling-seconds 6] [--json FILE] [--record]

A workload trains for a number of seconds once it has settled: at first a run trains faster than it samples, on what was
sampled before its first update. Its figure is the env steps trained on by the time they took. The ceiling
(sfactory/profiling/ceiling.py) is measured after each, for episodes of the run's length, so that whatever else the
machine does slows both. Medians and ranges are shown; the fraction is the one median by the other. With `--record` the
runs are appended to perf/data/throughput.csv.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import shlex
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from perf.runs import Report, exit_at_signals, training
from perf.tables import record
from sfactory.config.command_line import from_command_line
from sfactory.config.lag import slot_count
from sfactory.profiling.ceiling import Ceiling, measure_ceiling
from sfactory.runtime.planning import make_plan
from sfactory.runtime.processes import fork_server

INLINE = "--runtime.policy-workers 0"
YIELDING = "--workers 2 --runtime.rollout-nice 5"
LARGE_GROUP = "--runtime.groups 1 --runtime.spare-batches 2"
DENSE = f"--preset none --model.shared-critic True --rollout 32 --batch-size 65536 {INLINE}"
CARTPOLE = f"--env CartPole-v1 --envs-per-worker 2048 {DENSE}"
NATIVE = f"--env sfactory/CartPole --envs-per-worker 4096 {DENSE} {YIELDING}"
IMAGES = "--preset none --workers 2 --rollout 32 --batch-size 1024 --runtime.learner-threads 1"
PONG = f"--env ALE/Pong-v5 --envs-per-worker 64 {IMAGES}"
PONG_WITH_CORE = f"{PONG} --runtime.policy-workers 1"
HALFCHEETAH = (
    "--env HalfCheetah-v5 --preset none --model.shared-critic True --workers 2 --envs-per-worker 128 --rollout 64 "
    "--batch-size 16384"
)
WORKLOADS = {
    "cartpole": f"{CARTPOLE} {YIELDING} {LARGE_GROUP}",
    "cartpole-lstm": f"{CARTPOLE} --batch-size 32768 --model.core lstm",
    "cartpole-gru": f"{CARTPOLE} --batch-size 32768 --model.core gru",
    "cartpole-singles": f"{CARTPOLE} --batch-size 16384 --env-backend gymnasium --workers 2 --envs-per-worker 256",
    "cartpole-native": NATIVE,
    "pong": PONG,
    "pong-lstm": f"{PONG_WITH_CORE} --model.core lstm",
    "pong-gru": f"{PONG_WITH_CORE} --model.core gru",
    "halfcheetah": HALFCHEETAH,
    "halfcheetah-envpool": f"{HALFCHEETAH} --env-backend envpool",
    "vizdoom-basic": f"--env VizdoomBasic-v1 --envs-per-worker 32 {IMAGES}",
    "gridworld": "--env examples.grid_world:GridWorld-v0",
    "taxi": "--env Taxi-v4",
    "computing": "--env perf.newcomers:Computing-v0",
    "waiting": "--env perf.newcomers:Waiting-v0",
    "chase": "--env perf.newcomers:Chase",
    "spread": "--env mpe2.simple_spread_v3:parallel_env",
    "cartpole-preset": "--env CartPole-v1",
    "lunarlander-preset": "--env LunarLander-v3",
    "hopper-preset": "--env Hopper-v5",
    "pong-preset": "--env ALE/Pong-v5",
}
"""Throughput settings: one epoch, large groups, and Sample Factory's networks, whose critic has no trunk of its
own. A vector environment in NumPy is one group, which has half the calls of two. The last ones run with the
defaults or the preset alone, as a newcomer's environment does (perf/newcomers.py)."""
START_S = 120.0
"""How long a run may take until it has settled."""


@dataclass(frozen=True)
class Result:
    """The runs of one workload.

    Attributes:
        speeds: Env steps per second of each run.
        ceilings: After each run.
    """

    workload: str
    flags: str
    speeds: list[float]
    ceilings: list[Ceiling]

    @property
    def limits(self) -> list[float]:
        """The ceilings in env steps per second."""
        return [ceiling.env_steps_per_s for ceiling in self.ceilings]

    @property
    def fraction(self) -> float:
        return statistics.median(self.speeds) / statistics.median(self.limits)

    def values(self) -> dict:
        """Everything, for JSON."""
        medians = {
            "median": statistics.median(self.speeds),
            "ceiling": statistics.median(self.limits),
            "fraction": self.fraction,
        }
        return asdict(self) | medians | {"limits": self.limits}

    def records(self) -> list[dict[str, object]]:
        """A row for each run, its ceiling the mean of those around it."""
        rows = []
        for number, speed in enumerate(self.speeds):
            ceiling = statistics.mean(self.limits[max(number - 1, 0) : number + 1])
            row = {"workload": self.workload, "trainer": "sfactory", "runs": 1, "env_steps_per_s": f"{speed:.0f}"}
            row |= {"ceiling": f"{ceiling:.0f}", "fraction_of_ceiling": f"{speed / ceiling:.3f}", "note": self.flags}
            rows.append(row)
        return rows


def measure(flags: str, seconds: float) -> float:
    """Env steps per second, learning included, of one run that goes on for so many seconds once it has settled."""
    return measure_run(flags, seconds)[0]


def measure_run(flags: str, seconds: float) -> tuple[float, float]:
    """As :func:`measure`, and the mean env steps of the run's last episodes, infinite where none has ended."""
    settled, endless = settled_after(flags), f"{flags} --steps {10**12} --log.report-every-s 1"
    with tempfile.TemporaryDirectory() as folder:
        with training(shlex.split(endless), folder) as run:
            if run.wait_until(lambda reports: trained(reports, settled), START_S):
                time.sleep(seconds)
            if run.process.poll() is not None:
                raise SystemExit(f"the run ended by itself with status {run.process.returncode}: {endless}")
        reports = trained(run.reports(), settled)
    if len(reports) < 2:
        raise SystemExit(f"no two reports of more than {settled:,} env steps within {START_S:g} s from: {endless}")
    first, last = reports[0], reports[-1]
    speed = (last["env_steps"] - first["env_steps"]) / (last["wall_s"] - first["wall_s"])
    return speed, last.get("episode_length_mean", math.inf)


def settled_after(flags: str) -> int:
    """Env steps of training after which a run has settled: before, it may train on the slots that were filled until its
    first update, here twice what all slots hold."""
    with fork_server():
        plan = make_plan(from_command_line(shlex.split(flags), "perf/fps.py"))
    return 2 * slot_count(plan.config, plan.rows) * plan.config.rollout * plan.rows


def trained(reports: list[Report], settled: int) -> list[Report]:
    """Those that tell of something new, after so many env steps."""
    steps = [0.0, *(report["env_steps"] for report in reports)]
    return [
        report for before, report in zip(steps, reports, strict=False) if report["env_steps"] > max(before, settled)
    ]


def run(workload: str, seconds: float, repeats: int, ceiling_s: float) -> Result:
    """Measure the ceiling and the speed in turns."""
    flags = WORKLOADS[workload]
    config = from_command_line(shlex.split(flags), "perf/fps.py")
    speeds, ceilings = [], []
    for _ in range(repeats):
        speed, episode_length = measure_run(flags, seconds)
        speeds.append(speed)
        ceilings.append(measure_ceiling(config, ceiling_s, episode_length=episode_length))
    return Result(workload, flags, speeds, ceilings)


def show(console: Console, results: list[Result]) -> None:
    title = (
        f"{platform.processor() or platform.machine()}, {results[0].ceilings[0].cores} cores, Python "
        f"{platform.python_version()}"
    )
    table = Table("workload", "env steps/s", "range", "ceiling", "its range", "fraction", title=title)
    for result in results:
        both = (
            (f"{statistics.median(v):,.0f}", f"{min(v):,.0f} to {max(v):,.0f}") for v in (result.speeds, result.limits)
        )
        table.add_row(result.workload, *(text for pair in both for text in pair), f"{result.fraction:.1%}")
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=WORKLOADS)
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--ceiling-seconds", type=float, default=6)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--record", action="store_true", help="append the runs to perf/data/throughput.csv")
    args = parser.parse_args()
    exit_at_signals()
    results = []
    for name in WORKLOADS:
        if args.only and name not in args.only:
            continue
        results.append(run(name, args.seconds, args.repeats, args.ceiling_seconds))
        if args.record:
            record("throughput", results[-1].records(), "perf.fps")
    show(Console(width=None if sys.stdout.isatty() else 120), results)
    if args.json:
        args.json.write_text(json.dumps([result.values() for result in results], indent=2))


if __name__ == "__main__":
    main()
