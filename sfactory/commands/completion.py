"""``sfactory completion``: a script with which a shell completes commands, flags and names of files."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import os
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal
from unittest import mock

import tyro

from sfactory.commands import COMMANDS, MODULES
from sfactory.config.presets import PRESETS
from sfactory.errors import ConfigError, installing, telling_errors
from sfactory.model.actor_critic import CORES
from sfactory.model.encoders import KNOWN
from sfactory.telemetry.loggers import BUILT_IN

DESCRIPTION = """Print a script that completes sfactory's commands, flags and choices. For bash:
sfactory completion bash > ~/.local/share/bash-completion/completions/sfactory; for zsh, into a folder of $fpath:
sfactory completion zsh > ~/.zfunc/_sfactory"""
FLAG = re.compile(r"(--[a-z][\w.-]*)(?: \{([\w,.:-]+)\}(?!\|))?")
"""A flag in a help page, with its choices; ``{None}|STR`` has none."""
ARGUMENT = re.compile(r"^[^\w{\n]*\{([\w,.:-]+)\} ", re.MULTILINE)
"""The choices of an argument in a help page that is no flag."""
NAMED = {
    "--preset": ("auto", "none", *PRESETS),
    "--model.encoder": KNOWN,
    "--model.core": ("none", *CORES),
    "--log.loggers": tuple(BUILT_IN),
}
"""Flags whose help pages have no choices, since they also take an object's name, with the names that are built in."""
WIDE = "10000"
"""Columns of a help page that is read here, so that nothing in it is broken."""


@dataclass(frozen=True)
class Options:
    """What the command takes."""

    shell: tyro.conf.Positional[Literal["bash", "zsh", "tcsh"]]
    """The shell."""


@telling_errors
def main(args: Sequence[str] | None = None) -> int:
    """Run the command.

    Returns:
        The exit status: 0, or 2 if shtab is not installed.
    """
    options = tyro.cli(Options, args=args, prog="sfactory completion", description=DESCRIPTION)
    print(script(options.shell))
    return 0


def script(shell: str) -> str:
    """The completion script for a shell.

    Raises:
        ConfigError: If shtab is not installed.
    """
    try:
        import shtab
    except ImportError as error:
        raise ConfigError(f"completion needs shtab: {error}; {installing('completion')}") from error
    program = argparse.ArgumentParser("sfactory")
    commands = program.add_subparsers()
    for name, command in COMMANDS.items():
        parser = commands.add_parser(name, help=command.help, description=command.help)
        for number, choices in enumerate(arguments_of(name)):
            parser.add_argument(f"argument_{number}", choices=choices)
        flags = ((flag, choices) for flag, choices in flags_of(name) if flag != "--help")
        added = [parser.add_argument(flag, choices=choices or None) for flag, choices in flags]
        for argument in (*added, parser.add_argument("files", nargs="*")):
            if argument.choices is None:
                argument.complete = shtab.FILE  # type: ignore[attr-defined]
    return str(shtab.complete(program, shell))


def flags_of(name: str) -> Iterator[tuple[str, list[str]]]:
    """The flags of a command with their choices, as its help page names them."""
    seen = set()
    page = _help_page(name, "--help")
    if "--help-all" in page:
        page = _help_page(name, "--help-all")
    for flag, choices in FLAG.findall(page):
        if flag not in seen:
            seen.add(flag)
            yield flag, choices.split(",") if choices else list(NAMED.get(flag, ()))


def arguments_of(name: str) -> list[list[str]]:
    """The choices of a command's arguments that are no flags and have some."""
    return [choices.split(",") for choices in ARGUMENT.findall(_help_page(name, "--help"))]


def _help_page(name: str, flag: str) -> str:
    """The help page that a flag of a command shows; empty if there is none, as where a package that the command needs
    is missing."""
    page = io.StringIO()
    prog = (f"sfactory {name}",) if name in MODULES else ()
    with (
        mock.patch.dict(os.environ, COLUMNS=WIDE),
        contextlib.redirect_stdout(page),
        contextlib.redirect_stderr(io.StringIO()),
        contextlib.suppress(SystemExit, ImportError),
    ):
        importlib.import_module(COMMANDS[name].module).main([flag], *prog)
    return page.getvalue()


if __name__ == "__main__":
    sys.exit(main())
