"""Learning references: trains with the presets alone and holds evaluation returns against what is expected of them.

    python -m perf.learning [--only NAME ...] [--seeds 11 12 13] [--sync] [--runs FOLDER] [--curves FOLDER] [--json
    FILE] [--record]

Each row is one environment, trained asynchronously for a stated number of env steps with each seed, then evaluated for
20 episodes with another seed, deterministically. With `--sync` sampling and learning alternate. With `--runs` a command
that was interrupted goes on where it was; with `--curves` the training returns over env steps and seconds are kept as
CSV; with `--record` each seed is appended to perf/data/learning.csv.
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True)
class Reference:
    """What one environment's agent must reach: a mean evaluation return after so many env steps, with the preset and
    these flags.

    Attributes:
        expected: The least mean return of every seed; with `at_most` the highest, where an agent is shown to lack what
            the task needs; with `median` that of the median seed, where seeds differ as widely as they do in the
            published references.
    """

    name: str
    env: str
    steps: int
    expected: float
    flags: tuple[str, ...] = ()
    at_most: bool = False
    median: bool = False

    def missed(self, returns: Sequence[float]) -> bool:
        """Whether a mean return is on the wrong side."""
        if self.median:
            return statistics.median(returns) < self.expected
        return max(returns) > self.expected if self.at_most else min(returns) < self.expected


REFERENCES = [
    Reference("cartpole", "CartPole-v1", 300_000, 475.0),
    Reference("cartpole-lstm", "examples.masked_cartpole:MaskedCartPole-v0", 500_000, 475.0, ("--model.core", "lstm")),
    Reference("hopper", "Hopper-v5", 1_000_000, 2000.0, median=True),
    Reference("walker2d", "Walker2d-v5", 1_000_000, 2000.0, median=True),
    Reference("pendulum", "Pendulum-v1", 300_000, -300.0),
    Reference("vizdoom-basic", "VizdoomBasic-v1", 300_000, 60.0),
    Reference("pong", "ALE/Pong-v5", 2_000_000, -17.0),
    Reference("pong-classic", "PongNoFrameskip-v4", 2_500_000, 20.0),
    Reference("memory", "sfactory/MemoryGrid", 500_000, 0.9, ("--model.core", "lstm")),
    # Without memory every door is a coin's toss: 20 episodes have mean 0 and standard error 0.22.
    Reference("memory-blind", "sfactory/MemoryGrid", 500_000, 0.7, at_most=True),
]


def measure(reference: Reference, seed: int, folder: Path, sync: bool, curves: Path | None) -> tuple[float, float]:
    """(mean evaluation return, seconds of training)."""
    run = folder / f"{reference.name}-{'sync-' if sync else ''}{seed}"
    train = [
        "--env",
        reference.env,
        "--steps",
        str(reference.steps),
        "--seed",
        str(seed),
        "--run",
        str(run),
        "--log.display",
        "none",
    ]
    train += [*reference.flags, *(["--sync"] if sync else [])]
    subprocess.run([sys.executable, "-m", "sfactory.train", *train], check=True)
    if curves is not None:
        keep_curve(run / "metrics.csv", curves / f"{run.name}.csv")
    seconds = json.loads((run / "summary.json").read_text())["wall_s"]
    evaluation = [
        sys.executable,
        "-m",
        "sfactory.eval",
        "--run",
        str(run),
        "--episodes",
        "20",
        "--json",
        "--env",
        reference.env,
    ]
    done = subprocess.run(evaluation, check=True, capture_output=True, text=True)
    mean = json.loads(done.stdout.strip().splitlines()[-1])["return_mean"]
    print(f"{reference.name}, seed {seed}: {mean:.1f} after {seconds:.0f} s", flush=True)
    return mean, seconds


def records(
    reference: Reference, seeds: Sequence[int], sync: bool, results: Sequence[tuple[float, float]]
) -> list[dict[str, object]]:
    """A row of perf/data/learning.csv for each seed."""
    flags = " ".join((*reference.flags, *(["--sync"] if sync else [])))
    asked = {"env": reference.env, "flags": flags, "trainer": "sfactory", "env_steps": reference.steps}
    asked |= {"measure": "evaluation", "expected": f"{reference.expected:g}"}
    return [
        asked | {"seed": seed, "score": f"{score:.2f}", "seconds": f"{seconds:.0f}"}
        for seed, (score, seconds) in zip(seeds, results, strict=True)
    ]


def keep_curve(metrics: Path, curve: Path) -> None:
    """The columns of a metrics.csv that tell what was learned when, and how far the policy was behind."""
    columns = ("env_steps", "wall_s", "episode_return_mean", "policy_lag_mean", "behaviour_kl", "kl", "clip_fraction")
    curve.parent.mkdir(parents=True, exist_ok=True)
    with metrics.open() as source, curve.open("w", newline="") as target:
        writer = csv.DictWriter(target, columns, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows(csv.DictReader(source))


def main() -> int:
    """Exit status 1 if any reference was missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=[r.name for r in REFERENCES])
    parser.add_argument("--seeds", nargs="*", type=int, default=[11, 12, 13])
    parser.add_argument("--runs", type=Path, metavar="FOLDER", help="keep the runs there")
    parser.add_argument("--sync", action="store_true")
    parser.add_argument("--curves", type=Path, metavar="FOLDER")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--record", action="store_true", help="append the scores to perf/data/learning.csv")
    args = parser.parse_args()
    if args.record:
        from perf.results import record  # as a module only; at once, so that no measurement is lost
    table = Table("environment", "env steps", "expected", *(f"seed {s}" for s in args.seeds), "seconds")
    rows, missed = [], False
    with nullcontext(args.runs) if args.runs else tempfile.TemporaryDirectory() as folder:
        for reference in REFERENCES:
            if args.only and reference.name not in args.only:
                continue
            results = [measure(reference, seed, Path(folder), args.sync, args.curves) for seed in args.seeds]
            if args.record:
                record("learning", records(reference, args.seeds, args.sync, results), "perf.learning")
            returns, seconds = zip(*results, strict=True)
            missed |= reference.missed(returns)
            rows.append(
                {
                    "name": reference.name,
                    "steps": reference.steps,
                    "expected": reference.expected,
                    "returns": returns,
                    "seconds": seconds,
                }
            )
            cells = (f"{value:.1f}" for value in returns)
            bound = f"{'<' if reference.at_most else '>'}= {reference.expected:g}"
            table.add_row(reference.name, f"{reference.steps:,}", bound, *cells, " ".join(f"{s:.0f}" for s in seconds))
    Console().print(table)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=2))
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
