"""Many short runs in a row, about half of them interrupted at random moments: how long they take, and whether anything
is left of them.

    python -m perf.starts [--runs 50] [--seed 0] [--env CartPole-v1] [--json FILE]

Each run is a command in a session of its own. Half of the runs get SIGINT, as Ctrl-C sends it to the whole process
group, at a random moment: of these, half during start-up and half in the first seconds of training. The others run to
their end. A run passes if it ends within 10 s of the signal with status 130 (0 if it had just ended by itself), prints
no traceback, says in its summary what happened, and leaves neither a process nor anything in /dev/shm (where other
programs must leave nothing either).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from perf import sessions
from perf.runs import exit_at_signals

LIMIT_S = 10.0
GIVE_UP_S = 120.0


@dataclass
class Outcome:
    """One run.

    Attributes:
        interrupted_at: Seconds after its start; None: not interrupted.
        seconds: From its start to its end.
        first_steps: Seconds from its start to its first report of env steps, as seen from outside; None if it had none.
        stopping: Seconds from the signal to its end.
        env_steps: Of its summary; None if it has none.
        problems: What was wrong.
    """

    interrupted_at: float | None
    status: int | None
    seconds: float
    first_steps: float | None
    stopping: float | None
    env_steps: int | None
    problems: list[str]


@dataclass(frozen=True)
class Moment:
    """When to interrupt a run: seconds after its start, or after its first env steps."""

    seconds: float
    training: bool

    def has_come(self, now: float, first_steps: float | None) -> bool:
        since = first_steps if self.training else 0.0
        return since is not None and now - since >= self.seconds


def one_run(flags: list[str], moment: Moment | None, folder: Path) -> Outcome:
    shared = set(os.listdir("/dev/shm"))
    run, errors = folder / "run", folder / "stderr"
    command = [
        sys.executable,
        "-m",
        "sfactory.train",
        *flags,
        "--run",
        str(run),
        "--log.report-every-s",
        "0.1",
        "--log.no-tensorboard",
    ]
    first_steps = stopped = None
    with errors.open("w") as stderr:
        begin = time.monotonic()
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=stderr, start_new_session=True)
        try:
            while (
                process.poll() is None
                and (now := time.monotonic() - begin) < GIVE_UP_S
                and (stopped is None or now - stopped < 2 * LIMIT_S)
            ):
                if moment is not None and stopped is None and moment.has_come(now, first_steps):
                    stopped = now
                    os.killpg(process.pid, signal.SIGINT)
                if first_steps is None and has_trained(run / "metrics.csv"):
                    first_steps = now
                time.sleep(0.01)
            seconds = time.monotonic() - begin
            time.sleep(0.3)
            left = [str(process) for process in sessions.members(process.pid)]
        finally:
            sessions.end(process.pid)
    problems = found_problems(
        process.returncode, stopped, seconds, errors.read_text(), run / "summary.json", first_steps
    )
    problems += [f"left: {process}" for process in left]
    problems += [f"left in /dev/shm: {name}" for name in set(os.listdir("/dev/shm")) - shared]
    process.wait()
    summary = json.loads((run / "summary.json").read_text()) if (run / "summary.json").exists() else {}
    stopping = None if stopped is None else seconds - stopped
    return Outcome(stopped, process.returncode, seconds, first_steps, stopping, summary.get("env_steps"), problems)


def has_trained(metrics: Path) -> bool:
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int(metrics.read_text().splitlines()[-1].split(",")[1]) > 0
    return False


def found_problems(
    status: int | None, stopped: float | None, seconds: float, errors: str, summary: Path, first_steps: float | None
) -> list[str]:
    problems = []
    expected = (0,) if stopped is None else (130, 0)
    if status not in expected:
        problems.append(f"status {status}")
    if stopped is not None and seconds - stopped > LIMIT_S:
        problems.append(f"took {seconds - stopped:.1f} s to stop")
    if errors:
        problems.append(f"printed {errors[:300]!r}")
    said = json.loads(summary.read_text())["status"] if summary.exists() else None
    if first_steps is not None and said != ("completed" if status == 0 else "interrupted"):
        problems.append(f"summary says {said}")
    return problems


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--env", default="CartPole-v1")
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    exit_at_signals()
    flags = ["--env", args.env, "--steps", str(args.steps), "--device", "cpu"]
    rng = random.Random(args.seed)
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(args.runs):
            start_up = [o.first_steps for o in outcomes if o.first_steps is not None]
            moment, training = None, rng.random() < 0.5
            if start_up and rng.random() < 0.5:
                moment = Moment(
                    rng.uniform(0.0, 2.0) if training else rng.uniform(0.2, statistics.median(start_up)), training
                )
            place = Path(folder) / str(number)
            place.mkdir()
            outcomes.append(one_run(flags, moment, place))
            print(number, outcomes[-1], flush=True)
    show(outcomes)
    if args.json:
        args.json.write_text(json.dumps([asdict(outcome) for outcome in outcomes], indent=2))
    sys.exit(any(outcome.problems for outcome in outcomes))


def show(outcomes: list[Outcome]) -> None:
    def spread(values: list[float | None]) -> str:
        known = [value for value in values if value is not None]
        return f"{statistics.median(known):.2f} ({min(known):.2f} to {max(known):.2f})" if known else "-"

    table = Table("", "runs", "seconds", "to the first env steps", "to stop", "problems")
    for name, part in (
        ("to their end", [o for o in outcomes if o.interrupted_at is None]),
        ("interrupted before env steps", [o for o in outcomes if o.interrupted_at is not None and not o.env_steps]),
        ("interrupted after", [o for o in outcomes if o.interrupted_at is not None and o.env_steps]),
    ):
        times = (
            spread([getattr(outcome, what) for outcome in part]) for what in ("seconds", "first_steps", "stopping")
        )
        table.add_row(name, str(len(part)), *times, str(sum(bool(outcome.problems) for outcome in part)))
    Console().print(table)


if __name__ == "__main__":
    main()
