"""``sfactory report``: the page of a run made anew, with a final evaluation and a video of an episode if wanted."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

from sfactory.commands.policy_options import PolicyOptions
from sfactory.config.command_line import Switch
from sfactory.errors import ConfigError, telling_errors
from sfactory.runs.report_page import write_page
from sfactory.runs.run_files import VIDEOS, exported, require_run

DESCRIPTION = """Write report.html into a run folder: curves, configuration, machine, phases, and the last evaluation
with its video. The page needs no other file and no network."""
FINAL = "final"
"""Folder of the video below the run's videos."""


@dataclass(frozen=True, kw_only=True)
class Options(PolicyOptions):
    """What the command takes."""

    episodes: int = 0
    """Evaluate so many episodes first; 0: the page shows the evaluation before, if there was one."""
    video: Switch = False
    """Record a video of one episode first."""
    sampled: Switch = False
    """Draw actions from the policy instead of taking the most probable ones."""
    max_steps: int | None = None
    """Env steps after which an episode that still goes on is cut off."""


@telling_errors
def main(args: Sequence[str] | None = None) -> int:
    """Run the command.

    Returns:
        The exit status: 0 done, 1 failed, 2 bad configuration, 130 interrupted.
    """
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    options = tyro.cli(Options, args=args, prog="sfactory report", description=DESCRIPTION)
    _play(options)
    print(write_page(Path(options.run)))
    return 0


def _play(options: Options) -> None:
    """Evaluate and record what the options ask for."""
    folder = Path(options.run)
    if options.episodes < 0:
        raise ConfigError(f"episodes is {options.episodes}; it must be 0 or more")
    if exported(require_run(folder)):
        raise ConfigError(
            f"{folder} holds an exported policy and no reports of a run; name the folder of the run that it is from, "
            "or see how it plays with sfactory eval"
        )
    if not (options.episodes or options.video):
        return
    from sfactory.eval import evaluate
    from sfactory.policy import load_snapshot

    shared: dict[str, Any] = {
        "env": options.env, "env_kwargs": options.env_kwargs, "deterministic": not options.sampled,
        "checkpoint": options.checkpoint, "max_steps": options.max_steps, "trust": options.trust,
    }  # fmt: skip
    if options.episodes:
        result = evaluate(folder, options.episodes, **shared)
        result.keep(folder, options.checkpoint, load_snapshot(folder, options.checkpoint).env_steps)
    if options.video:
        evaluate(folder, 1, video=folder / VIDEOS / FINAL, **shared)


if __name__ == "__main__":
    sys.exit(main())
