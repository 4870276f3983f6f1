"""``python -m sfactory.status``: what the processes of a run are doing, or how the run has ended."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro
from rich.console import Console
from rich.table import Table

from sfactory.errors import ConfigError, SfactoryError
from sfactory.run_folder import CONFIG, SUMMARY, is_held
from sfactory.state import RunState, read_status

DESCRIPTION = "Show what the processes of a living run are doing, or how a run has ended."


@dataclass(frozen=True)
class Options:
    """Arguments of the command."""

    run: str
    """Run folder."""
    json: bool = False
    """Print one JSON object."""


def status(run: str | Path) -> tuple[str, RunState | None, dict[str, Any]]:
    """How a run is.

    Returns:
        living, killed (its process is gone without having said how it ended), starting, or the status of its summary; the last state of
        a run that is living or was killed; the summary of one that has ended.

    Raises:
        ConfigError: If the folder holds no run.
    """
    folder = Path(run)
    if not (folder / CONFIG).exists():
        raise ConfigError(f"{folder} holds no run (no {CONFIG}); name a run folder with --run")
    if (state := read_status(folder)) is not None:
        return "living" if is_held(folder) else "killed", state, {}
    try:
        summary = json.loads((folder / SUMMARY).read_text())
    except (OSError, ValueError):
        return "starting" if is_held(folder) else "killed", None, {}
    return summary["status"], None, summary


def main(args: Sequence[str] | None = None) -> int:
    """Run the command.

    Returns:
        The exit status: 0, or 2 if the folder holds no run.
    """
    options = tyro.cli(Options, args=args, prog="python -m sfactory.status", description=DESCRIPTION)
    try:
        word, state, summary = status(options.run)
    except SfactoryError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_status
    if options.json:
        print(json.dumps({"status": word, **summary} if state is None else {"status": word, **_plain(dataclasses.asdict(state))}))
        return 0
    console = Console()
    if state is None:
        console.print(f"{options.run}: {word}", *(f"{k} {v}" for k, v in summary.items() if k in ("env_steps", "error") and v is not None))
    else:
        _show(console, options.run, word, state)
    return 0


def _show(console: Console, run: str, word: str, state: RunState) -> None:
    age = time.time() - state.time
    old = f", as of {age:.0f} s ago" if word == "killed" or age > 5 else ""
    table = Table("process", "pid", "state", "CPU s", "MiB", title=f"{run}: {word}, pid {state.pid}{old}")
    for process in state.processes:
        table.add_row(process.name, str(process.pid or ""), process.sentence, f"{process.cpu_s:.1f}", f"{process.rss_mb:.0f}")
    console.print(table)
    for title, counts in (("slots", state.slots), ("waiting messages", state.queues), ("last report", state.figures)):
        console.print(f"{title}: " + ", ".join(f"{name} {value:,.6g}" for name, value in counts.items()), highlight=False, soft_wrap=True)


def _plain(value: Any) -> Any:
    """Without NaN, which JSON has no word for."""
    if isinstance(value, dict):
        return {key: _plain(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_plain(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


if __name__ == "__main__":
    sys.exit(main())
