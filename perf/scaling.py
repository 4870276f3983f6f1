"""Throughput and memory of full training runs against their size, and the cost of one more worker, environment and
slot.

    python -m perf.scaling [--env sfactory/CartPole CartPole-v1] [--sweep workers environments groups slots]
        [--seconds 6] [--json FILE]
    python -m perf.scaling --environments 1000 --minutes 10 [--env CartPole-v1] [--workers 2] [--json FILE]

The first form varies one number at a time around a middle: workers, environments of each worker, groups of each worker
(more groups have fewer rows each), and slots (by runtime.spare_batches). The second form trains with that many
environments, samples the memory all along, and fails if it grows after a warm-up in which every kind of file has been
written once.

Memory is the proportional set size of the whole process tree, from /proc/*/smaps_rollup: a page that several processes
share counts once.
What one more of something costs is the slope of memory against its number: for a worker all but pages of files, which
are libraries, of which the share of this run depends on what else runs on the machine; for an environment the memory of
rollout and policy workers and of the trajectories, because the learner's varies by some MiB from run to run; for a slot
that of the trajectories.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import psutil
from rich.console import Console
from rich.table import Table

from perf.fps import trained
from perf.runs import Report, Run, exit_at_signals, training
from sfactory.config import Config, RuntimeConfig
from sfactory.config.lag import slot_count
from sfactory.data.arena import arena_bytes, segment_fields
from sfactory.runtime.planning import make_plan

ROLLOUT = 32
START_S = 120.0
SAMPLE_S = 2.0
WARM_UP = 0.2
GROWTH = 0.01
KIB, MIB = 2**10, 2**20


@dataclass(frozen=True)
class Size:
    """The numbers that are varied.

    Attributes:
        environments: Of each worker, over its groups.
        groups: Of each worker.
        spare: Training batches' worth of spare slots (runtime.spare_batches).
    """

    workers: int = 1
    environments: int = 256
    groups: int = 2
    spare: int = 1

    @property
    def rows(self) -> int:
        """Rows of a group of single-agent environments."""
        return self.environments // self.groups


SWEEPS: dict[str, tuple[Size, ...]] = {
    "workers": tuple(Size(workers=n) for n in (1, 2, 4)),
    "environments": tuple(Size(environments=n) for n in (64, 256, 1024)),
    "groups": tuple(Size(groups=n) for n in (1, 2, 4)),
    "slots": tuple(Size(spare=n) for n in (1, 4, 16)),
}
BATCH_ROWS = 512
"""Rows of the sweeps' batches, the most that a group of theirs has: so that only one number changes at a time."""


@dataclass(frozen=True)
class Memory:
    """Bytes of a process tree, every page counted once.

    Attributes:
        private: Of anonymous memory.
        sampling: Of this, that of the rollout and policy workers.
        shared: Of shared memory, above all the trajectories.
        files: Of libraries and other files.
    """

    private: int
    sampling: int
    shared: int
    files: int

    @property
    def own(self) -> int:
        """Without files."""
        return self.private + self.shared

    @property
    def total(self) -> int:
        return self.own + self.files


@dataclass(frozen=True)
class Point:
    """A run of one size.

    Attributes:
        slots: Of its arena.
        slot_bytes: Of one slot, when all of it has been written.
        fps: Env steps per second, learning included.
    """

    env: str
    size: Size
    slots: int
    slot_bytes: int
    fps: float
    memory: Memory


def tree_memory(pid: int) -> Memory:
    """The memory of a process and its descendants at this moment; a process that ends meanwhile does not count."""
    private = sampling = shared = files = 0
    with contextlib.suppress(psutil.NoSuchProcess):
        root = psutil.Process(pid)
        for process in (root, *root.children(recursive=True)):
            with contextlib.suppress(OSError):
                folder = Path(f"/proc/{process.pid}")
                samples = (folder / "comm").read_text().startswith(("sf-rollout", "sf-policy"))
                sizes = dict(line.split()[:2] for line in (folder / "smaps_rollup").read_text().splitlines()[1:])
                private += int(sizes["Pss_Anon:"]) * KIB
                sampling += int(sizes["Pss_Anon:"]) * KIB * samples
                shared += int(sizes["Pss_Shmem:"]) * KIB
                files += int(sizes["Pss_File:"]) * KIB
    return Memory(private, sampling, shared, files)


def arena_of(env: str, size: Size, batch_rows: int) -> tuple[int, int]:
    """(slots, bytes of one) of a run's arena."""
    runtime = RuntimeConfig(groups=size.groups, spare_batches=size.spare)
    config = Config(
        env=env, preset="none", device="cpu", workers=size.workers, envs_per_worker=size.environments, rollout=ROLLOUT,
        batch_size=ROLLOUT * batch_rows, runtime=runtime,
    )  # fmt: skip
    plan = make_plan(config)
    slots = slot_count(plan.config, plan.rows)
    return slots, arena_bytes(segment_fields(plan.env, 0), slots, ROLLOUT, plan.rows) // slots


@contextlib.contextmanager
def learning(env: str, size: Size, batch_rows: int, settled: int, *more: str) -> Iterator[Run]:
    """A training run that has settled (perf/fps.py), which is after so many env steps; interrupted at the end.

    Raises:
        SystemExit: If it ends by itself, or has not settled after two minutes.
    """
    flags = (
        f"--env {env} --preset none --model.shared-critic True --device cpu --rollout {ROLLOUT} "
        f"--batch-size {ROLLOUT * batch_rows} --workers {size.workers} --envs-per-worker {size.environments} "
        f"--runtime.groups {size.groups} --runtime.spare-batches {size.spare} --steps {10**12} --log.report-every-s 1"
    )
    with tempfile.TemporaryDirectory() as folder, training([*shlex.split(flags), *more], folder) as run:
        if not run.wait_until(lambda reports: trained(reports, settled), START_S):
            steps = f"no {settled:,} env steps"
            raise SystemExit(f"{steps} after {START_S:.0f} s (status {run.process.poll()}): {flags}")
        yield run
        if run.process.poll() is not None:
            raise SystemExit(f"the run ended by itself with status {run.process.returncode}: {flags}")


def speed(reports: list[Report], settled: int) -> float:
    """Env steps per second between the first report after so many env steps and the last one."""
    after = trained(reports, settled)
    first, last = after[0], after[-1]
    seconds = last["wall_s"] - first["wall_s"]
    return (last["env_steps"] - first["env_steps"]) / seconds if seconds > 0 else float("nan")


def settled_after(size: Size, slots: int) -> int:
    """As :func:`perf.fps.settled_after`."""
    return 2 * slots * ROLLOUT * size.rows


def measure(env: str, size: Size, seconds: float, batch_rows: int) -> Point:
    """Train for some seconds once the run has settled; the memory is that of the end."""
    slots, slot_bytes = arena_of(env, size, batch_rows)
    settled = settled_after(size, slots)
    with learning(env, size, batch_rows, settled) as run:
        time.sleep(seconds)
        memory, fps = tree_memory(run.process.pid), speed(run.reports(), settled)
    return Point(env, size, slots, slot_bytes, fps, memory)


COSTS: dict[str, Callable[[Point], tuple[int, int]]] = {
    "workers": lambda point: (point.size.workers, point.memory.own),
    "environments": lambda point: (
        point.size.workers * point.size.environments,
        point.memory.sampling + point.memory.shared,
    ),
    "slots": lambda point: (point.slots, point.memory.shared),
}
"""How many there are, and the memory that their number changes."""


def cost(name: str, points: Sequence[Point]) -> float:
    """Bytes of one more worker, environment or slot: the slope of the least-squares line."""
    return float(np.polyfit(*zip(*map(COSTS[name], points), strict=True), 1)[0])


def sweep(
    envs: Sequence[str], sweeps: Sequence[str], seconds: float
) -> tuple[list[Point], dict[str, dict[str, float]]]:
    """All points, and by environment the bytes of one more worker, environment and slot, as far as they were varied."""
    points, costs = [], {}
    for env in envs:
        known: dict[Size, Point] = {}
        costs[env] = {}
        for name in sweeps:
            for size in SWEEPS[name]:
                if size not in known:
                    known[size] = measure(env, size, seconds, BATCH_ROWS)
            if name in COSTS:
                costs[env][name.removesuffix("s")] = cost(name, [known[size] for size in SWEEPS[name]])
        points += known.values()
    return points, costs


def show(points: Sequence[Point], costs: dict[str, dict[str, float]]) -> None:
    table = Table("env", "workers", "envs each", "groups", "rows", "slots", "env steps/s", "MiB", "private", "shared")
    for p in points:
        sizes = map(str, (p.size.workers, p.size.environments, p.size.groups, p.size.rows, p.slots))
        table.add_row(
            p.env,
            *sizes,
            f"{p.fps:,.0f}",
            *(f"{n / MIB:.0f}" for n in (p.memory.total, p.memory.private, p.memory.shared)),
        )
    console = Console(width=120)
    console.print(table)
    for env, cost in costs.items():
        words = ", ".join(f"{name} {value / KIB:,.1f} KiB" for name, value in cost.items())
        console.print(f"{env}: one more {words}")


def long_run(env: str, environments: int, workers: int, minutes: float) -> dict:
    """Train with many environments for a while, and sample the memory.

    Returns:
        What :func:`show_long_run` prints. ``growth`` is the difference between the medians of the last and the first
        third of the samples after the warm-up; ``allowed`` is how large it may be.
    """
    size = Size(workers, environments // workers, 2)
    batch_rows = 2 * size.rows
    half = measure(env, replace(size, environments=size.environments // 2), 10, batch_rows)
    spare = measure(env, replace(size, spare=8), 10, batch_rows)
    slots, slot_bytes = arena_of(env, size, batch_rows)
    settled = settled_after(size, slots)
    memories: list[tuple[float, Memory]] = []
    saves = "--log.tensorboard", "--log.save-every-s", str(min(30.0, 60 * minutes * WARM_UP / 3))
    with learning(env, size, batch_rows, settled, *saves) as run:
        begin, process = time.monotonic(), run.process
        while (now := time.monotonic() - begin) < 60 * minutes and process.poll() is None:
            memories.append((now, tree_memory(process.pid)))
            time.sleep(SAMPLE_S)
        fps = speed(run.reports(), settled)
    memory = memories[-1][1]
    whole = Point(env, size, slots, slot_bytes, fps, memory)
    own = [memory.own for seconds, memory in memories if seconds > 60 * minutes * WARM_UP]
    third = len(own) // 3
    return {
        "env": env, "environments": environments, "workers": workers, "seconds": memories[-1][0], "fps": fps,
        "slots": whole.slots,
        "total": memory.total, "private": memory.private, "shared": memory.shared,
        "one_environment": cost("environments", (half, whole)), "one_slot": cost("slots", (whole, spare)),
        "slot_bytes": whole.slot_bytes,
        "growth": statistics.median(own[-third:]) - statistics.median(own[:third]),
        "allowed": GROWTH * memory.own,
        "samples": [(seconds, memory.total, memory.own) for seconds, memory in memories],
    }  # fmt: skip


def show_long_run(result: dict) -> None:
    table = Table("", "", title=f"{result['env']}, {result['environments']} environments, {result['workers']} workers")
    table.add_row("env steps/s", f"{result['fps']:,.0f}")
    for name in ("total", "private", "shared"):
        table.add_row(f"memory, {name}", f"{result[name] / MIB:,.1f} MiB")
    table.add_row("total / environments", f"{result['total'] / result['environments'] / KIB:,.1f} KiB")
    table.add_row("one more environment", f"{result['one_environment'] / KIB:,.1f} KiB")
    table.add_row(
        "one more slot", f"{result['one_slot'] / KIB:,.1f} KiB (its arrays: {result['slot_bytes'] / KIB:,.1f} KiB)"
    )
    table.add_row("slots", str(result["slots"]))
    table.add_row(
        f"growth within {result['seconds']:.0f} s",
        f"{result['growth'] / MIB:+.2f} MiB (allowed: {result['allowed'] / MIB:.2f})",
    )
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--env", nargs="+", help="single-agent environments; the second form takes one")
    parser.add_argument("--sweep", nargs="+", choices=SWEEPS, default=list(SWEEPS))
    parser.add_argument("--seconds", type=float, default=6, help="of each run of a sweep once it has settled")
    parser.add_argument("--environments", type=int, help="the second form: environments of all workers together")
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    exit_at_signals()
    if args.environments is None:
        points, costs = sweep(args.env or ["sfactory/CartPole", "CartPole-v1"], args.sweep, args.seconds)
        show(points, costs)
        result: dict = {"points": [asdict(point) for point in points], "one_more_bytes": costs}
    else:
        if args.environments % (4 * args.workers):
            parser.error(
                f"--environments {args.environments} is not a multiple of 4 x --workers {args.workers} = "
                f"{4 * args.workers}"
            )
        result = long_run((args.env or ["CartPole-v1"])[0], args.environments, args.workers, args.minutes)
        show_long_run(result)
    if args.json:
        args.json.write_text(json.dumps(result, indent=2))
    if result.get("growth", 0) > result.get("allowed", 0):
        sys.exit(
            f"memory grew by {result['growth'] / MIB:.2f} MiB, more than {result['allowed'] / MIB:.2f} MiB "
            f"({GROWTH:.0%})"
        )


if __name__ == "__main__":
    main()
