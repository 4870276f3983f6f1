"""``sfactory COMMAND ...``, the console script: each command is one module."""

from __future__ import annotations

import difflib
import importlib
import os
import sys
from collections.abc import Sequence
from typing import NamedTuple

import sfactory
from sfactory.errors import check_platform, telling_errors


class Command(NamedTuple):
    """A command.

    Attributes:
        module: Has a function ``main(args) -> exit status``.
        help: One line.
    """

    module: str
    help: str


TOPICS: dict[str, dict[str, Command]] = {
    "before a run": {
        "check": Command("sfactory.commands.check", "find what is wrong with an environment, and what speed to expect"),
        "profile": Command("sfactory.profile", "where a run's time goes, and what limits it"),
    },
    "runs": {
        "train": Command("sfactory.train", "train an agent, or resume a run"),
        "sweep": Command("sfactory.commands.sweep", "search for good settings by many runs, several at once"),
        "status": Command("sfactory.status", "what a living run does, or how it has ended"),
        "runs": Command("sfactory.commands.runs", "list run folders with environment, steps, return and status"),
    },
    "after a run": {
        "eval": Command("sfactory.eval", "play a trained policy and report its returns"),
        "play": Command("sfactory.commands.play", "watch a policy on the screen, in the terminal or as a video"),
        "plot": Command("sfactory.commands.plot", "draw learning curves of runs"),
        "report": Command("sfactory.commands.report", "write a run's page, with a final evaluation and video"),
        "export": Command("sfactory.commands.export", "a policy as ONNX, for torch.export, or for the Hub"),
    },
    "the shell": {
        "completion": Command("sfactory.commands.completion", "a script that completes commands and flags"),
    },
}
COMMANDS = {name: command for commands in TOPICS.values() for name, command in commands.items()}
WITH_ALL_FLAGS = ("train", "profile", "check")
"""Commands that take every field of a run's configuration, so that their help has a short and a complete form."""

OF_OWN_CODE = ("check", "profile", "train", "sweep")
"""Commands that run what the user names, and not what a run folder does."""
MODULES = ("train", "eval", "profile", "status")
"""Commands that also run as ``python -m sfactory.NAME``. So they are told under which name they were called, and given
no arguments where they are the whole process, as there."""


@telling_errors
def main(args: Sequence[str] | None = None) -> int:
    """Run the command that the first argument names.

    Args:
        args: The command line; None: that of the process, which does nothing else.

    Returns:
        Its exit status; 2 for an unknown command, or on another system than Linux.
    """
    name, *rest = list(sys.argv[1:] if args is None else args) or ["--help"]
    if name in ("-h", "--help", "help"):
        print(usage())
        return 0
    if name == "--version":
        print(f"sfactory {sfactory.__version__}")
        return 0
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        print(f"error: there is no command {name}; {hint}use one of {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    if _runs_own_code(name, rest) and "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, "")  # modules of the current folder, as for python -m
    check_platform()
    if name not in WITH_ALL_FLAGS:
        rest = ["--help" if word == "--help-all" else word for word in rest]
    command = importlib.import_module(COMMANDS[name].module).main
    if name not in MODULES:
        return int(command(rest))
    if args is None:
        sys.argv[1:] = rest
    return int(command(None if args is None else rest, f"sfactory {name}"))


def _runs_own_code(name: str, words: Sequence[str]) -> bool:
    """Whether a command is asked to import the user's own code. Others may be called in a stranger's run folder, whose
    ``yaml.py`` would take that module's place."""
    return name in OF_OWN_CODE or any(word.partition("=")[0] in ("--env", "--trust") for word in words)


def usage() -> str:
    """The page of all commands."""
    width = max(map(len, COMMANDS))
    lines = []
    for topic, commands in TOPICS.items():
        lines += ["", f"{topic}:", *(f"  {name:{width}}  {command.help}" for name, command in commands.items())]
    return "\n".join(("usage: sfactory COMMAND [flags]", *lines, "", "sfactory COMMAND --help shows its flags."))
