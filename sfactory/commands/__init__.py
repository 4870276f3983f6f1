"""``sfactory COMMAND ...``, the console script: each command is one module."""

from __future__ import annotations

import difflib
import importlib
import os
import sys
from collections.abc import Sequence
from typing import NamedTuple


class Command(NamedTuple):
    """A command.

    Attributes:
        module: Has a function ``main(args) -> exit status``.
        help: One line.
    """

    module: str
    help: str


COMMANDS: dict[str, Command] = {
    "train": Command("sfactory.train", "train an agent, or resume a run"),
    "eval": Command("sfactory.eval", "play a trained policy and report its returns"),
    "profile": Command("sfactory.profile", "where a run's time goes, and what limits it"),
    "sweep": Command("sfactory.commands.sweep", "search for good settings by many runs, several at once"),
    "status": Command("sfactory.status", "what a living run does, or how it has ended"),
}


def main(args: Sequence[str] | None = None) -> int:
    """Run the command that the first argument names.

    Returns:
        Its exit status; 2 for an unknown command.
    """
    name, *rest = list(sys.argv[1:] if args is None else args) or ["--help"]
    if name in ("-h", "--help", "help"):
        print(usage())
        return 0
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        print(f"error: there is no command {name}; {hint}use one of {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, "")  # modules of the current folder, as for python -m
    return int(importlib.import_module(COMMANDS[name].module).main(rest))


def usage() -> str:
    """The page of all commands."""
    width = max(map(len, COMMANDS))
    lines = (f"  {name:{width}}  {command.help}" for name, command in COMMANDS.items())
    return "\n".join(("usage: sfactory COMMAND [flags]", "", *lines, "", "sfactory COMMAND --help shows its flags."))
