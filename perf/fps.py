"""Throughput of full training runs, learning included.

    python perf/fps.py [--only NAME ...] [--seconds 20] [--repeats 3] [--json FILE]

A workload trains from the start for a number of seconds; its figure is the median of the reports of env steps per second, without the first
quarter, in which processes start and kernels compile. Of several repeats the median and the range are shown.
"""

from __future__ import annotations

import argparse
import csv
import json
import platform
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

WORKLOADS = {
    "cartpole": "--env CartPole-v1 --preset none --workers 2 --envs-per-worker 256 --rollout 32 --batch-size 16384",
    "cartpole-native": "--env sfactory/CartPole --preset none --envs-per-worker 2048 --rollout 32 --batch-size 32768",
    "pong": "--env ALE/Pong-v5 --preset none --envs-per-worker 64 --rollout 32 --batch-size 1024",
    "halfcheetah": "--env HalfCheetah-v5 --preset none --envs-per-worker 32 --rollout 64 --batch-size 4096",
    "vizdoom-basic": "--env VizdoomBasic-v1 --preset none --envs-per-worker 16 --rollout 32 --batch-size 1024",
}
"""Throughput settings: one epoch, large groups."""


def measure(flags: str, seconds: float) -> float:
    """Env steps per second, learning included, of one run of that many seconds."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "sfactory.train", *shlex.split(flags), "--run", f"{folder}/run", "--steps", str(10**12)]
        command += ["--log.report-every-s", "1", "--log.display", "none", "--log.no-tensorboard", "--overwrite"]
        process = subprocess.Popen(command)
        try:
            time.sleep(seconds)
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(60)
        with (Path(folder) / "run" / "metrics.csv").open() as file:
            speeds = [float(row["fps"]) for row in csv.DictReader(file) if row["fps"] and float(row["fps"]) > 0]
    if not speeds:
        raise SystemExit(f"no report of a speed within {seconds:g} s from: {shlex.join(command)}; give it more --seconds")
    return statistics.median(speeds[len(speeds) // 4 :])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=WORKLOADS)
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    table = Table(
        "workload",
        "env steps/s",
        "range",
        "flags",
        title=f"{platform.processor() or platform.machine()}, Python {platform.python_version()}",
    )
    rows = []
    for name, flags in WORKLOADS.items():
        if args.only and name not in args.only:
            continue
        speeds = [measure(flags, args.seconds) for _ in range(args.repeats)]
        rows.append({"workload": name, "flags": flags, "median": statistics.median(speeds), "speeds": speeds})
        table.add_row(name, f"{statistics.median(speeds):,.0f}", f"{min(speeds):,.0f} to {max(speeds):,.0f}", flags)
    Console().print(table)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
