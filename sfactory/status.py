"""``sfactory status``: reads from a run folder the state of a living run (:mod:`sfactory.runs.run_state`), or how it
has ended."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from sfactory.config.command_line import Switch, flag_as_word
from sfactory.errors import printable, telling_errors
from sfactory.files import json_values
from sfactory.runs.run_files import (
    SUMMARY,
    exported,
    is_held,
    is_number,
    newest_checkpoint,
    read_json,
    require_run,
)
from sfactory.runs.run_state import RunState, read_status
from sfactory.telemetry.console import new_console
from sfactory.telemetry.metrics import METRICS
from sfactory.telemetry.sparkline import sparkline

DESCRIPTION = """Show what the processes of a living run are doing, or how a run has ended. A SIGUSR2 to the run's
process has it write the Python stacks of all its processes to a file stall-*.txt in the run folder."""
OLD_S = 5.0
"""Age in seconds from which the state of a living run is shown as old. It is renewed every second unless the runner
hangs or is busy."""
WATCH_EVERY_S = 1.0
UNITS = {each.name: f" {each.unit}" for each in METRICS if each.unit not in ("", each.name.replace("_", " "))}


@dataclass(frozen=True)
class Options:
    """Arguments of the command."""

    run: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """Run folder; also as --run RUN."""
    json: Switch = False
    """Print one JSON object."""
    watch: Switch = False
    """Repeat once a second until the run ends or Ctrl-C."""


@dataclass(frozen=True)
class RunStatus:
    """Status of a run.

    Attributes:
        word: starting, living, killed (its process has ended without writing a summary), exported (no run, but a policy
            of one), or the status of its summary: completed, interrupted or failed.
        state: The last state of a run that is living or was killed, else None.
        summary: Summary of a run that has ended; of one that was killed, and of an exported policy, what the newest
            checkpoint has of it; else empty.
    """

    word: str
    state: RunState | None = None
    summary: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def goes_on(self) -> bool:
        """Whether the run has not ended."""
        return self.word in ("starting", "living")

    @property
    def age_s(self) -> float:
        """Seconds since the state was written."""
        return math.nan if self.state is None else max(0.0, time.time() - self.state.time)

    def values(self) -> dict[str, Any]:
        """The values that ``--json`` prints."""
        state = {} if self.state is None else {"age_s": self.age_s, **dataclasses.asdict(self.state)}
        return json_values({**self.summary, **state, "status": self.word})


def status(run: str | Path) -> RunStatus:
    """Status of the run in a folder.

    Raises:
        ConfigError: If the folder holds no run.
    """
    folder = require_run(run)
    # In this order: a run writes its summary, removes its state and lets go of its folder.
    held, state, summary = is_held(folder), read_status(folder), read_json(folder / SUMMARY)
    if "status" in summary:  # also while a run that has ended is evaluated; the next one removes it when it begins
        return RunStatus(summary["status"], summary=summary)
    if held:
        return RunStatus("starting" if state is None else "living", state)
    saved = newest_checkpoint(folder)
    known = {name: saved.get(name, 0) for name in ("env_steps", "frames", "wall_s")}
    known["episode_return_mean"] = saved.get("episode_return")
    return RunStatus("exported" if exported(folder) else "killed", state, known)


@telling_errors
def main(args: Sequence[str] | None = None, prog: str = "python -m sfactory.status") -> int:
    """Run the command.

    Args:
        args: The command line; None: the process's own.
        prog: The command, as messages name it.

    Returns:
        The exit status: 0, or 2 if the folder holds no run.
    """
    options = tyro.cli(Options, args=flag_as_word("--run", args), prog=prog, description=DESCRIPTION)
    console = new_console()
    live = (
        Live(console=console, auto_refresh=False)
        if options.watch and console.is_terminal and not options.json
        else None
    )
    with contextlib.suppress(KeyboardInterrupt), live or contextlib.nullcontext():
        while True:
            found = status(options.run)
            if options.json:
                print(json.dumps(found.values()), flush=True)
            elif live is not None:
                live.update(_view(options.run, found, console), refresh=True)
            else:
                console.print(_view(options.run, found, console), soft_wrap=found.state is None)  # one line
            if not (options.watch and found.goes_on):
                break
            time.sleep(WATCH_EVERY_S)
    return 0


def _view(run: str, found: RunStatus, console: Console) -> RenderableType:
    state = found.state
    if state is None:
        told = {name: value for name, value in found.summary.items() if is_number(value)}
        ends = [
            *([f"{told['env_steps']:,.0f} env steps"] if "env_steps" in told else []),
            *([f"return {told['episode_return_mean']:,.6g}"] if "episode_return_mean" in told else []),
            *([f"{told['fps']:,.0f} env steps/s"] if "fps" in told else []),
            *([str(error)] if (error := found.summary.get("error")) else []),
        ]
        return Text(printable(f"{run}: {found.word}  " + ", ".join(ends)))
    old = f", as of {found.age_s:.0f} s ago" if found.word == "killed" or found.age_s > OLD_S else ""
    table = Table("process", "pid", "state", "CPU s", "MiB", title=Text(f"{run}: {found.word}, pid {state.pid}{old}"))
    for process in state.processes:
        cells = (
            process.name,
            str(process.pid or ""),
            process.sentence,
            f"{process.cpu_s:.1f}",
            f"{process.rss_mb:.0f}",
        )
        table.add_row(*map(Text, map(printable, cells)))
    counts: dict[str, Mapping[str, float]] = {
        "slots": state.slots,
        "waiting messages": state.queues,
        "last report": {name: value for name, value in state.figures.items() if not math.isnan(value)},
    }
    lines = [
        f"{title}: " + ", ".join(f"{name} {value:,.6g}{UNITS.get(name, '')}" for name, value in c.items())
        for title, c in counts.items()
        if c
    ]
    if not console.options.ascii_only and (curve := sparkline(state.returns)):
        lines.append(f"returns: {curve}  {min(state.returns):,.6g} to {max(state.returns):,.6g}")
    return Group(table, *map(Text, lines))


if __name__ == "__main__":
    sys.exit(main())
