"""What each kernel brings to a whole run: env steps/s with all kernels, without one of them, and without any.

    python -m perf.gains [--only NAME ...] [--seconds 8] [--rounds 3] [--record]

The runs of a workload go by turns, and each cell is the median of the rounds. A kernel that brings less than 5 % to
every workload of the machine class that it is for should go.
"""

from __future__ import annotations

import argparse
import os
import statistics

from rich.console import Console
from rich.table import Table

from perf.fps import PONG, WORKLOADS, measure
from perf.runs import exit_at_signals
from perf.tables import record

HOPPER = "--env Hopper-v5"
CASES = {
    "cartpole": (WORKLOADS["cartpole"], ("dense network", "objective", "sampling")),
    "hopper, its preset": (HOPPER, ("dense network", "objective", "sampling")),
    "cartpole, its preset": ("--env CartPole-v1", ("update",)),
    "cartpole-lstm": (WORKLOADS["cartpole-lstm"], ("LSTM", "objective", "sampling", "tanh", "linear layers")),
    "cartpole-gru": (WORKLOADS["cartpole-gru"], ("GRU",)),
    "pong": (PONG, ("convolutions", "objective", "sampling", "linear layers")),
    "pong, its preset": ("--env ALE/Pong-v5", ("linear layers",)),
    "pong, ResNet": (f"{PONG} --model.encoder impala_resnet", ("first convolution",)),
}
"""Flags of a workload, and the kernels that may matter to it."""


def speeds(flags: str, kernels: tuple[str, ...], seconds: float, rounds: int) -> dict[str, list[float]]:
    """Env steps per second with all kernels (``all``), without each, and without any (``off``)."""
    found: dict[str, list[float]] = {name: [] for name in ("all", *kernels, "off")}
    before = os.environ.get("SFACTORY_KERNELS")
    try:
        for _ in range(rounds):
            for name, values in found.items():
                os.environ["SFACTORY_KERNELS"] = {"all": "", "off": "off"}.get(name, f"-{name}")
                values.append(measure(flags, seconds))
    finally:
        os.environ.pop("SFACTORY_KERNELS", None)
        if before is not None:
            os.environ["SFACTORY_KERNELS"] = before
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--seconds", type=float, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--record", action="store_true", help="append the medians to perf/data/gains.csv")
    args = parser.parse_args()
    exit_at_signals()
    table = Table("workload", "without", "env steps/s", "all kernels", "gain")
    for name in args.only:
        found = speeds(*CASES[name], args.seconds, args.rounds)
        whole = statistics.median(found.pop("all"))
        medians = {kernel: statistics.median(values) for kernel, values in found.items()}
        for kernel, without in medians.items():
            table.add_row(name, kernel, f"{without:,.0f}", f"{whole:,.0f}", f"{whole / without:.2f}")
        if args.record:
            rows = ({"kernel": kernel, "without": round(without)} for kernel, without in medians.items())
            record("gains", ({"workload": name, "with": round(whole), **row} for row in rows), "perf.gains")
        Console(width=110).print(table)


if __name__ == "__main__":
    main()
