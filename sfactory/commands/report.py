"""``sfactory report``: the page of a run made anew, with a final evaluation and a video of an episode if wanted."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

from sfactory.config.command_line import Switch, flag_as_word
from sfactory.config.policy_options import File, Integer, PolicyOptions
from sfactory.errors import ConfigError, telling_errors
from sfactory.files import is_writable
from sfactory.runs.report_page import write_page
from sfactory.runs.run_files import PAGE, VIDEOS, exported, require_run

DESCRIPTION = """Write report.html into a run folder: curves, configuration, machine, phases, and the last evaluation
with its video. The page needs no other file and no network."""
PLAYING_ONLY = ("best", "env", "env_kwargs", "trust", "sampled", "max_steps")
"""Options that have an effect with --episodes or --video alone."""
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
    max_steps: Integer = None
    """Env steps after which an episode that still goes on is cut off."""
    out: File = None
    """The file; unset: report.html in the run folder. An evaluation and its video stay in the run folder."""


@telling_errors
def main(args: Sequence[str] | None = None) -> int:
    """Run the command.

    Returns:
        The exit status: 0 done, 1 failed, 2 bad configuration, 130 interrupted.
    """
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    args = flag_as_word("--run", args)
    options = tyro.cli(Options, args=args, prog="sfactory report", description=DESCRIPTION)
    out = _checked(options)
    if options.episodes or options.video:
        _play(options)
    print(write_page(Path(options.run), out=out))
    return 0


def _checked(options: Options) -> Path:
    """The file to write, after a check of the options.

    Raises:
        ConfigError: If there is no such run, or the page or an evaluation could not be written.
    """
    folder = Path(options.run)
    if options.episodes < 0:
        raise ConfigError(f"episodes is {options.episodes}; it must be 0 or more")
    plays = bool(options.episodes or options.video)
    if not plays and (given := options.given(PLAYING_ONLY)):
        raise ConfigError(f"{given}: only with --episodes N or --video, which play episodes for the page")
    if exported(require_run(folder)):
        raise ConfigError(
            f"{folder} holds an exported policy and no reports of a run; name the folder of the run that it is from, "
            "or see how it plays with sfactory eval"
        )
    if plays and not is_writable(folder):
        raise ConfigError(
            f"the folder {folder} cannot be written to, where an evaluation and its video stay; copy it, or leave out "
            "--episodes and --video and name a file elsewhere with --out"
        )
    out = folder / PAGE if options.out is None else Path(options.out)
    if out.is_dir():
        raise ConfigError(f"out is {out}, a folder; name a file in it, for example {out / PAGE}")
    if not out.parent.is_dir():
        raise ConfigError(f"out is {out}, and there is no folder {out.parent}; make it, or name another file")
    if not is_writable(out.parent):
        raise ConfigError(f"the folder {out.parent} cannot be written to; name a file in another one with --out")
    return out


def _play(options: Options) -> None:
    """Evaluate and record what the options ask for."""
    from sfactory.eval import evaluate
    from sfactory.policy import load_snapshot
    from sfactory.runs.video import prepare_rendering

    if options.video:
        prepare_rendering()
    folder = Path(options.run)
    snapshot = load_snapshot(folder, options.checkpoint)  # of a run that goes on, too, all that follows is of this one
    shared: dict[str, Any] = {
        "env": options.env, "env_kwargs": options.env_kwargs, "deterministic": not options.sampled,
        "checkpoint": snapshot, "max_steps": options.max_steps, "trust": options.trust,
    }  # fmt: skip
    if options.episodes:
        result = evaluate(folder, options.episodes, **shared)
        result.keep(folder, options.checkpoint, snapshot.env_steps)
    if options.video:
        evaluate(folder, 1, video=folder / VIDEOS / FINAL, **shared)


if __name__ == "__main__":
    sys.exit(main())
