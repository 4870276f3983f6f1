"""``python -m sfactory.profile``: time of a run by phases, its bottleneck, and the ceiling of this machine."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import logging
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from sfactory.runtime.interrupts import end_at_once_when_interrupted, ignore_interrupts

if TYPE_CHECKING:
    from sfactory.config import Config
    from sfactory.profiling.measure import Profile
    from sfactory.profiling.tune import Trial
    from sfactory.runtime.plan import Plan

PROG = "python -m sfactory.profile"
DESCRIPTION = """Train in a temporary folder for a while, and show where the time of each kind of worker goes, what
limits the run and which flag to change, and which share of this machine's ceiling is reached. The command's own flags:

  --seconds N      to measure (30); warm-up and the ceiling take as long again at most, besides the start of
                   processes; with --tune: for the whole search
  --sample-only    rollout and policy workers at full speed, without learning
  --json           the last line of the output is one JSON object
  --trace FILE     write a trace of all processes for ui.perfetto.dev
  --tune           search workers, environments, groups, policy workers, threads, batch size and precision for this
                   machine
  --tune-out FILE  where --tune writes the best as YAML for --config (tuned.yaml)

and every flag of a training run:"""
MOST_CEILING_S = 15.0
"""Most seconds of the ceiling's measurements."""


def main(args: Sequence[str] | None = None) -> int:
    """Run the command.

    Returns:
        The exit status: 0 done, 1 failed, 2 bad configuration, 130 or 143 interrupted.
    """
    from sfactory.config import from_command_line
    from sfactory.errors import SfactoryError
    from sfactory.runtime.processes import fork_server

    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    options, rest = _options(sys.argv[1:] if args is None else args)
    try:
        config = from_command_line(rest, PROG, DESCRIPTION)
        _check(options, config)
        with contextlib.nullcontext() if config.serial else fork_server():
            # Imports torch, which takes its time, while the server does the same.
            from sfactory.runtime.planning import (
                make_plan,
            )

            return _run(options, config, make_plan(config))
    except SfactoryError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=PROG, add_help=False, allow_abbrev=False)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--sample-only", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--tune-out", type=Path)
    return parser


def _options(args: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """The command's own flags, and the other arguments."""
    options, rest = _parser().parse_known_args(args)
    if options.tune and options.tune_out is None:
        options.tune_out = Path("tuned.yaml")
    return options, rest


def _check(options: argparse.Namespace, config: Config) -> None:
    """Raise ConfigError for options that cannot work."""
    from sfactory.errors import ConfigError

    problems = []
    if not (options.seconds > 0 and math.isfinite(options.seconds)):
        problems.append(f"seconds is {options.seconds:g}; it must be above 0")
    if options.tune_out is not None and not options.tune:
        problems.append(f"tune-out is {options.tune_out}, and nothing is tuned; add --tune")
    if options.tune and options.trace is not None:
        problems.append(
            f"trace is {options.trace}, and --tune makes many runs; profile the tuned settings with --config and "
            "--trace"
        )
    if options.tune and config.serial:
        problems.append("serial is on, and --tune searches numbers of processes; leave one of them out")
    for name in ("trace", "tune_out"):
        file: Path | None = getattr(options, name)
        if file is not None and (file.is_dir() or not os.access(file.parent, os.W_OK)):
            problems.append(
                f"{name.replace('_', '-')} is {file}, which cannot be written; name a file in a folder of yours"
            )
    if problems:
        raise ConfigError(*problems)


def _run(options: argparse.Namespace, config: Config, plan: Plan) -> int:
    """Measure, show, and give the exit status."""
    from sfactory.profiling.bottleneck import find_bottleneck
    from sfactory.profiling.measure import profile_run
    from sfactory.profiling.report import show, values

    console = Console()
    ceiling_s = min(MOST_CEILING_S, options.seconds / 4)
    with _progress(console) as tell:
        if options.tune:
            profile, interrupted = _tune(options, config, plan, options.seconds - ceiling_s, console)
            if interrupted:
                return interrupted
        else:
            plan = dataclasses.replace(plan, sample_only=options.sample_only)
            settling_s = options.seconds / 2
            profile = profile_run(plan, options.seconds, options.trace, settling_s=settling_s, tell=tell)
        ceiling = _ceiling(profile.plan, ceiling_s, tell)
    bottleneck = find_bottleneck(profile)
    show(console, profile, ceiling, bottleneck)
    if options.json:
        extra = {"tuned": str(options.tune_out)} if options.tune else {}
        print(json.dumps(values(profile, ceiling, bottleneck) | extra, allow_nan=False))
    return 0


@contextlib.contextmanager
def _progress(console: Console) -> Iterator[Callable[[str], object]]:
    """Gives what shows on a terminal how far the command is."""
    if not console.is_terminal:
        yield str
        return
    with console.status("starting") as status:
        yield status.update


def _tune(
    options: argparse.Namespace, config: Config, plan: Plan, seconds: float, console: Console
) -> tuple[Profile, int]:
    """Search, and write the best; the exit status is 0 unless a signal has ended the search."""
    from sfactory.profiling.tune import SEARCHED, tune, write_tuned

    def show_trial(trial: Trial) -> None:
        settings = "  ".join(f"{name.rpartition('.')[2]} {trial.settings[name]}" for name in SEARCHED)
        console.print(
            f"{settings}:  {trial.note or f'{trial.fps:,.0f} env steps/s'}",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )

    tuning = tune(plan, seconds, options.sample_only, show_trial)
    write_tuned(options.tune_out, config, tuning)
    command = f"python -m sfactory.train --config {options.tune_out}"
    console.print(
        f"{len(tuning.trials)} runs; the best is in {options.tune_out}: {command}", markup=False, soft_wrap=True
    )
    return tuning.profile, 128 + tuning.signal if tuning.signal is not None else 0


def _ceiling(plan: Plan, seconds: float, tell: Callable[[str], object]) -> float:
    """Ceiling of env steps per second of this machine; of sampling alone where nothing is learned."""
    from sfactory.profiling.ceiling import measure_ceiling

    ceiling = measure_ceiling(plan.config, seconds, tell)
    if plan.sample_only:
        ceiling = dataclasses.replace(ceiling, training_s=0.0)
    return ceiling.env_steps_per_s


if __name__ == "__main__":
    end_at_once_when_interrupted()
    status = main()
    ignore_interrupts()
    sys.exit(status)
