"""Times every compiled kernel against the same in NumPy and torch operations, on one thread, after checking that all of
them agree.

    python -m perf.kernels [--device cuda] [--only KERNEL ...] [--json FILE]

The implementations take turns, and the least mean time of a call counts. An item is what a kernel handles many of: a
sample of a segment, a row of a group, a picture, or an element. NumPy and torch versions: perf/plain.py, and those with
which the trainer works on a GPU.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from perf.kernel_cases import environments, models, objective
from perf.kernel_cases.case import Call, Case

REPEATS = 5
REPEAT_S = 0.05


@dataclass(frozen=True)
class Timing:
    """One row of the table."""

    kernel: str
    size: str
    implementation: str
    microseconds: float
    nanoseconds_per_item: float


def time_case(case: Case, device: torch.device) -> list[Timing]:
    """The least of several mean times of a call of each implementation, which take turns."""

    def mean_time(call: Call, calls: int) -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        for _ in range(calls):
            call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return (time.perf_counter() - start) / calls

    counts = {name: max(1, int(REPEAT_S / mean_time(call, 3))) for name, call in case.versions.items()}
    best = dict.fromkeys(case.versions, float("inf"))
    for _ in range(REPEATS):
        for name, call in case.versions.items():
            best[name] = min(best[name], mean_time(call, counts[name]))
    return [
        Timing(case.kernel, case.size, name, 1e6 * seconds, 1e9 * seconds / case.items)
        for name, seconds in best.items()
    ]


FAMILIES = (
    objective.estimators,
    objective.losses,
    objective.densities_and_gradients,
    objective.sampling,
    environments.resampling,
    environments.screens,
    environments.environments,
    models.activations,
    models.pixels_by_blocks,
    models.dense_networks,
    models.convolutions,
    models.recurrent_scans,
    models.recurrent_steps,
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", type=torch.device, help="device of the torch implementations")
    parser.add_argument("--only", nargs="+", help="kernels whose names begin so")
    parser.add_argument("--json", type=Path, help="write the timings to this file")
    args = parser.parse_args()
    torch.set_num_threads(1)
    table = Table("kernel", "size", "implementation", "us a call", "ns an item", "x numba")
    timings: list[Timing] = []
    for case in (case for family in FAMILIES for case in family(args.device)):
        if args.only and not case.kernel.startswith(tuple(args.only)):
            continue
        case.check()
        best = time_case(case, args.device)
        timings += best
        for timing in best:
            times = (f"{timing.microseconds:.1f}", f"{timing.nanoseconds_per_item:.1f}")
            table.add_row(
                timing.kernel,
                timing.size,
                timing.implementation,
                *times,
                f"{timing.microseconds / best[0].microseconds:.1f}",
            )
    Console().print(table)
    if args.json:
        args.json.write_text(json.dumps([asdict(timing) for timing in timings], indent=1))


if __name__ == "__main__":
    main()
