"""``sfactory profile``: time of a run by phases, its bottleneck, and the ceiling of this machine."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import math
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from rich.console import Console

from sfactory.errors import ConfigError, check_platform, telling_errors
from sfactory.files import is_writable
from sfactory.telemetry.console import new_console

if TYPE_CHECKING:
    from sfactory.config import Config
    from sfactory.profiling.measure import Profile
    from sfactory.profiling.options import ProfileOptions
    from sfactory.profiling.tune import Trial
    from sfactory.runtime.plan import Plan

DESCRIPTION = """Train in a temporary folder for a while, and show where the time of each kind of worker goes, what
limits the run and which flag to change, and which share of this machine's ceiling is reached."""
MOST_CEILING_S = 15.0
"""Most seconds of the ceiling's measurements."""


@telling_errors
def main(args: Sequence[str] | None = None, prog: str = "python -m sfactory.profile") -> int:
    """Run the command.

    Args:
        args: The command line; None: that of the process, which does nothing else.
        prog: The command, as messages name it.

    Returns:
        The exit status: 0 done, 1 failed, 2 bad configuration, 130 or 143 interrupted.
    """
    begun = time.monotonic()
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    check_platform()
    from sfactory.runtime.interrupts import as_program

    with as_program() if args is None else contextlib.nullcontext():
        from sfactory.config.command_line import read_command_line
        from sfactory.profiling.options import ProfileOptions

        line = read_command_line(sys.argv[1:] if args is None else args, prog, DESCRIPTION, ProfileOptions)
        return _profile(line.options, line.config, begun)


def _profile(options: ProfileOptions, config: Config, begun: float) -> int:
    """Check the options, and run. The command began at `begun` monotonic seconds."""
    from sfactory.runtime.processes import fork_server, not_collecting

    _check(options, config)
    with contextlib.nullcontext() if config.serial else fork_server():
        # As in sfactory.train.
        with not_collecting():
            from sfactory.runtime.planning import make_plan

        return _run(options, config, make_plan(config), begun)


def _check(options: ProfileOptions, config: Config) -> None:
    """Raise ConfigError for options that cannot work."""
    from sfactory.config.presets import preset_for_env

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
    if options.tune and preset_for_env(config.env) == "tensors" and config.env_backend != "vector":
        problems.append(
            f"--tune searches numbers of processes, and {config.env} steps on the learner's device; leave it out, and "
            "raise --envs-per-worker"
        )
    if options.tune and config.serial:
        problems.append("serial is on, and --tune searches numbers of processes; leave one of them out")
    for name, file in (("trace", options.trace), ("tune-out", options.tuned if options.tune else None)):
        if file is not None and (file.is_dir() or not is_writable(file.parent)):
            problems.append(f"{name} is {file}, which cannot be written; name a file in a folder of yours")
    if problems:
        raise ConfigError(*problems)


def _run(options: ProfileOptions, config: Config, plan: Plan, begun: float) -> int:
    """Measure, show, and give the exit status."""
    from sfactory.profiling.bottleneck import find_bottleneck
    from sfactory.profiling.measure import profile_run
    from sfactory.profiling.report import show, values

    console = new_console()
    ceiling_s = min(MOST_CEILING_S, options.seconds / 4)
    with _progress(console) as tell:
        if options.tune:
            profile, interrupted = _tune(options, config, plan, options.seconds - ceiling_s, console)
            if interrupted:
                return interrupted
        else:
            plan = dataclasses.replace(plan, sample_only=options.sample_only)
            profile = profile_run(plan, options.seconds, options.trace, tell=tell, command_s=begun)
        ceiling = _ceiling(profile, ceiling_s, tell)
    bottleneck = find_bottleneck(profile)
    show(console, profile, ceiling, bottleneck)
    if options.json:
        extra = {"tuned": str(options.tuned)} if options.tune else {}
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


def _tune(options: ProfileOptions, config: Config, plan: Plan, seconds: float, console: Console) -> tuple[Profile, int]:
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
    write_tuned(options.tuned, config, tuning)
    command = f"sfactory train --config {shlex.quote(str(options.tuned))}"
    told = f"{len(tuning.trials)} runs; the best"
    if len(tuning.trials) == 1:
        told = "no time to compare anything; use more --seconds. What ran"
    console.print(f"{told} is in {options.tuned}: {command}", markup=False, soft_wrap=True)
    return tuning.profile, 128 + tuning.signal if tuning.signal is not None else 0


def _ceiling(profile: Profile, seconds: float, tell: Callable[[str], object]) -> float:
    """Ceiling of env steps per second of this machine for the run that was profiled; of sampling alone where nothing is
    learned. NaN where environments step on the device: there are no parts to be measured apart."""
    plan = profile.plan
    if plan.on_device:
        return math.nan
    from sfactory.profiling.ceiling import measure_ceiling

    ceiling = measure_ceiling(plan.config, seconds, tell, episode_length=profile.episode_length)
    if plan.sample_only:
        ceiling = dataclasses.replace(ceiling, training_s=0.0)
    return ceiling.env_steps_per_s


if __name__ == "__main__":
    sys.exit(main())
