"""``sfactory runs``: the run folders below a folder, with what each has reached."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich import box
from rich.table import Table
from rich.text import Text

from sfactory.config.command_line import Switch
from sfactory.errors import ConfigError, SfactoryError, printable, telling_errors
from sfactory.runs.curves import last_known, read_table
from sfactory.runs.run_files import CONFIG, METRICS, is_number, saved_values
from sfactory.status import status
from sfactory.telemetry.console import new_console

DESCRIPTION = "List the run folders below a folder: environment, env steps, return and status of each."
COLOURS = {"living": "green", "starting": "green", "completed": "", "exported": "", "interrupted": "yellow"}
"""Of a run's status; others are failures."""
WIDEST = 10_000
"""Columns of a table that nothing bounds."""


@dataclass(frozen=True)
class Options:
    """What the command takes."""

    folder: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="[FOLDER]")] = "runs"
    """Folder to look in; itself a run, or with runs at any depth."""
    json: Switch = False
    """Print one JSON object for each run."""


@dataclass(frozen=True)
class Run:
    """A row of the list.

    Attributes:
        folder: The run folder.
        status: As of ``sfactory status``; damaged if its configuration cannot be read at all. One of an sfactory with
            other fields can.
        env_steps, steps: Env steps done, as the run's summary says if it has ended, and its newest checkpoint if it was
            killed; and to do in all.
        episode_return: Mean return of the last episodes in training, None if none has ended.
        fps: Env steps per second over the whole run.
        changed: Seconds since the epoch of the last report, or of the run's beginning.
    """

    folder: str
    status: str
    env: str = ""
    seed: int | None = None
    env_steps: int = 0
    steps: int = 0
    episode_return: float | None = None
    fps: float | None = None
    changed: float = 0.0


@telling_errors
def main(args: Sequence[str] | None = None) -> int:
    """Run the command.

    Returns:
        The exit status: 0, or 2 if the folder is not there.
    """
    options = tyro.cli(Options, args=args, prog="sfactory runs", description=DESCRIPTION)
    runs = list_runs(Path(options.folder))
    if options.json:
        for run in runs:
            print(json.dumps(dataclasses.asdict(run)))
    elif runs:
        console, table = new_console(), _table(runs)
        needed = console.measure(table, options=console.options.update(width=WIDEST)).maximum
        console.width = max(console.width, needed)  # the terminal wraps lines, so that names can be copied
        console.print(table)
    else:
        print(f"there is no run below {options.folder}; sfactory train makes one")
    return 0


def list_runs(folder: Path) -> list[Run]:
    """The runs below a folder, the latest last.

    Raises:
        ConfigError: If there is no such folder.
    """
    if not folder.is_dir():
        raise ConfigError(f"{folder} is not a folder; name one that holds runs, for example sfactory runs my/runs")
    return sorted(map(_described, run_folders(folder)), key=lambda run: run.changed)


def run_folders(folder: Path) -> Iterator[Path]:
    """Folders with the configuration of a run, and links to such. Nothing is looked for inside of one, nor behind other
    links, which may lead in a circle."""
    for path, folders, files in os.walk(folder):
        if CONFIG in files:
            folders.clear()
            yield Path(path)
        else:
            links = (link for name in folders if (link := Path(path, name)).is_symlink())
            yield from (link for link in links if (link / CONFIG).exists())


def _described(folder: Path) -> Run:
    config_file, metrics = folder / CONFIG, folder / METRICS
    changed = (metrics if metrics.exists() else config_file).stat().st_mtime
    try:
        config, found = saved_values(folder) or {}, status(folder)
    except SfactoryError:
        return Run(str(folder), "damaged", changed=changed)
    told = {name: value for name, value in found.summary.items() if is_number(value)}
    last = _last_figures(metrics) | told  # which may have less than was reported
    env_steps, wall_s = int(last.get("env_steps", 0)), last.get("wall_s")
    fps = told.get("fps", env_steps / wall_s if wall_s else None)
    episode_return = last.get("episode_return_mean")
    seed, steps = (int(value) if is_number(value := config.get(name)) else None for name in ("seed", "steps"))
    env = str(config.get("env"))
    return Run(str(folder), str(found.word), env, seed, env_steps, steps or 0, episode_return, fps, changed)


def _last_figures(metrics: Path) -> dict[str, float]:
    """The last finite number of each column of a metrics.csv; empty where it has none."""
    with contextlib.suppress(ConfigError):
        return last_known(read_table(metrics))
    return {}


def _table(runs: Sequence[Run]) -> Table:
    table = Table(box=box.SIMPLE)
    table.add_column("run", no_wrap=True)  # so that it can be copied
    table.add_column("environment", overflow="fold")
    for name in ("env steps", "return", "steps/s"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("status", no_wrap=True)
    for run in runs:
        share = f" ({min(1, run.env_steps / run.steps):.0%})" if run.steps else ""
        table.add_row(
            Text(printable(run.folder)),
            Text(printable(run.env)),
            f"{run.env_steps:,}{share}",
            _number(run.episode_return, ".2f"),
            _number(run.fps, ",.0f"),
            Text(printable(run.status), style=COLOURS.get(run.status, "red")),
        )
    return table


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


if __name__ == "__main__":
    sys.exit(main())
