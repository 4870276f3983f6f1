"""``sfactory sweep``: search for good values of some fields by many runs, several at once."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro
import yaml
from rich.console import Console

from sfactory.commands.sweeps.listed import ListedTrials, rescored
from sfactory.commands.sweeps.scheduler import Scheduler, core_shares
from sfactory.commands.sweeps.slurm import write_array_job
from sfactory.commands.sweeps.space import Space
from sfactory.commands.sweeps.space_file import parse_space, read_space
from sfactory.commands.sweeps.study import StudyTrials, telling_of_database
from sfactory.commands.sweeps.summary import BEST, table, write_summary
from sfactory.commands.sweeps.trials import Note, Trial, Trials
from sfactory.config import changed, from_dict, load_yaml, numbers_as_text, resolve
from sfactory.config.sources import working_directory_kept
from sfactory.errors import ConfigError, counted, shown, telling_errors
from sfactory.files import write_atomically
from sfactory.runs.run_files import try_lock
from sfactory.telemetry.console import new_console

DESCRIPTION = """Search for good values of some fields of the configuration by many runs, several at once, each on cores
of its own. SPACE.yaml says what is searched (docs/sweeps.md). The same command again goes on with the sweep in its
folder. Ctrl-C saves and ends all runs; a second one ends them at once."""
SPACE, LOCK = "space.yaml", ".lock"
PLANNED = re.compile(r"(env|env_kwargs(\..*)?|model\..*|loss\.terms)$")
"""Names of the fields of which each choice is planned beforehand: only a plan tells whether it works."""


@dataclass(frozen=True)
class Options:
    """Arguments of the command."""

    space: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="SPACE.yaml")]
    """What is searched."""
    folder: str = ""
    """Folder of the sweep; unset: runs/sweep-NAME, where NAME is that of the file."""
    slurm: bool = False
    """Write the script of a Slurm array job into the folder, and run nothing. For sampler grid and random."""
    summary: bool = False
    """Run nothing; summarize what the folder holds."""


@telling_errors
def main(args: Sequence[str] | None = None) -> int:
    """Run the command.

    Returns:
        The exit status: 0 done, 1 no trial is complete, 2 bad configuration, 130 or 143 interrupted after saving.
    """
    options = tyro.cli(
        Options, args=args, prog="sfactory sweep", description=DESCRIPTION, config=(tyro.conf.FlagCreatePairsOff,)
    )
    with telling_of_database():
        return _sweep(options, new_console())


def _sweep(options: Options, console: Console) -> int:
    def note(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    file = Path(options.space)
    space, fixed = read_space(file)
    folder = Path(options.folder or Path("runs") / f"sweep-{file.stem}")
    if options.summary and not (folder / SPACE).exists():
        raise ConfigError(f"{folder} holds no sweep (no {SPACE}); name its --folder, or begin it without --summary")
    again = _begun_with(folder, space, options.summary)
    if options.summary:  # also while a process sweeps there
        found = _trials(space, folder).all()
        return _conclude(space, folder, rescored(space, folder, found) if again else found, console, note)
    for text in _check_runs(space, elsewhere=options.slurm):
        note(text)
    shares = core_shares(space.parallel, space.trials * len(space.seeds)) if not options.slurm else []
    lock = _open_folder(folder, fixed)
    try:
        if options.slurm:
            note(f"sbatch {shlex.quote(str(write_array_job(space, file, folder)))}")
            return 0
        trials = _trials(space, folder)
        note(_opening(space, folder, trials, shares))
        scheduler = Scheduler(space, folder, trials, shares, note)
        scheduler.run()
        status = _conclude(space, folder, trials.all(), console, note)
    finally:
        os.close(lock)
    return status if scheduler.signal is None else 128 + scheduler.signal


def _trials(space: Space, folder: Path) -> Trials:
    return StudyTrials(space, folder) if space.sampler == "tpe" else ListedTrials(space, folder)


def _conclude(space: Space, folder: Path, trials: Sequence[Trial], console: Console, note: Note) -> int:
    """Write and show what has come of the trials; gives the exit status."""
    best = write_summary(space, folder, trials, note)
    console.print(table(space, trials))
    if best is None:
        return 1
    config = shlex.quote(str(folder / BEST))
    note(f"best: trial {best.number}, {best.value:,.4g}; python -m sfactory.train --config {config}")
    return 0


def _opening(space: Space, folder: Path, trials: Trials, shares: Sequence[Sequence[int]]) -> str:
    rungs = ", ".join(f"{steps:,}" for steps in trials.rungs)
    pruned = f", compared at {rungs} env steps" if rungs else ""
    return (
        f"{folder}: {counted(space.trials, 'trial')} ({space.sampler}{pruned}), {counted(len(space.seeds), 'seed')} "
        f"each, {counted(len(shares), 'run')} at once on {counted(min(map(len, shares)), 'core')} each"
    )


@working_directory_kept()
def _check_runs(space: Space, elsewhere: bool) -> list[str]:
    """Make the plan of a run with the first value of each field, and of one with every other choice of an environment,
    of its arguments, of a model and of loss terms, so that what is wrong with them is told before any begins.

    Args:
        space: What is searched.
        elsewhere: They run on other machines, which may have the devices that this one lacks.

    Returns:
        What may be another value than was meant.

    Raises:
        ConfigError: If a run cannot work.
    """
    from sfactory.runtime.planning import make_plan

    first = {name: dimension.ends[0] for name, dimension in space.search.items()}
    others = [
        {name: value} for name, dimension in space.search.items() if PLANNED.match(name) for value in dimension.ends[1:]
    ]
    problems: list[str] = []
    notes: list[str] = []
    for change in [{}, *others]:
        config = from_dict(space.values({**first, **change}))
        notes += numbers_as_text(config)
        try:
            config = resolve(config)
            if elsewhere:
                config = changed(config, device="cpu", runtime=changed(config.runtime, inference_device=None))
            make_plan(config)
        except ConfigError as error:
            if not change:  # what all runs share
                raise
            [(name, value)] = change.items()
            problems += [f"search.{name} {shown(value)}: {problem}" for problem in error.problems]
    if problems:
        raise ConfigError(*problems)
    return list(dict.fromkeys(notes))


def _begun_with(folder: Path, space: Space, summary: bool) -> bool:
    """Whether the sweep in the folder, if there is one, was begun with another objective, which is allowed where no
    trial was, or will be, chosen by it.

    Args:
        folder: Of the sweep.
        space: What is searched now.
        summary: Whether nothing is to be run.

    Raises:
        ConfigError: If it was begun with other values of what may not change.
    """
    if not (folder / SPACE).exists():
        return False
    raw = load_yaml(folder / SPACE)
    chosen = {} if (sampler := raw.get("sampler") or space.sampler) == "grid" else {"trials": 1}
    try:
        begun = parse_space({**chosen, **raw, "sampler": sampler}, folder / SPACE)
    except ConfigError as error:
        raise ConfigError(
            f"the sweep in {folder} was begun with a file that this version does not take ({folder / SPACE}); name "
            "another --folder, or remove that one:",
            *(f"  {problem}" for problem in error.problems),
        ) from None
    other = space.differences(begun)
    depends = space.sampler == "tpe"
    if set(begun.seeds) != set(space.seeds) and (depends or not set(begun.seeds) < set(space.seeds)):
        other.append("seeds")
    if (again := begun.objective != space.objective) and depends and not summary:
        other.append("objective")
    if other:
        raise ConfigError(
            f"the sweep in {folder} was begun with other values of {', '.join(other)} ({folder / SPACE}); name "
            "another --folder, or remove that one"
        )
    return again


def _open_folder(folder: Path, fixed: dict[str, Any]) -> int:
    """Make or reopen the sweep's folder, and lock it until the returned descriptor is closed.

    Raises:
        ConfigError: If it is no sweep's, cannot be used, or a process sweeps there.
    """
    if folder.is_dir() and any(folder.iterdir()) and not (folder / SPACE).exists():
        raise ConfigError(f"the folder {folder} is not empty and holds no sweep (no {SPACE}); name another --folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
    except OSError as error:
        raise ConfigError(f"cannot use the folder {folder}: {error.strerror}; name another --folder") from error
    try:
        if not try_lock(lock, exclusive=True):
            raise ConfigError(f"another process sweeps in {folder}; wait for it, or name another --folder")
        write_atomically(folder / SPACE, yaml.safe_dump(fixed, sort_keys=False).encode())
    except BaseException:
        os.close(lock)
        raise
    return lock


if __name__ == "__main__":
    sys.exit(main())
