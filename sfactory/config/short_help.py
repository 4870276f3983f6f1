"""The short help of the commands that take a run's configuration: the flags that most people use, by topic."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import operator
import textwrap
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from sfactory.config.declaring import types_of
from sfactory.config.fields import Config

TOPICS: dict[str, tuple[str, ...]] = {
    "the run": ("env", "env_kwargs", "steps", "seed", "run", "overwrite"),
    "learning": ("preset", "algo", "optim.lr", "batch_size", "epochs", "loss.gamma", "loss.entropy_coef", "model.core"),
    "speed": ("device", "workers", "envs_per_worker", "sync", "serial"),
}
"""Fields that the short help shows."""
OF_RUN_FOLDERS = ("run", "overwrite")
METAVARS = {int: "INT", float: "FLOAT", str: "TEXT", Path: "FILE", dict: "{KEY: VALUE}", Any: "NAME", bool: ""}


def print_short_help(prog: str, description: str, options: Any, config: Config) -> None:
    """Print the help page of a command.

    Args:
        prog: The command.
        description: What it does.
        options: The command's own flags with their defaults, a dataclass.
        config: The config with the defaults of the environment and preset that were named.
    """
    console = Console(highlight=False, emoji=False)
    console.print(f"usage: {prog} [ENV] [flags]\n", markup=False)
    console.print(" ".join(description.split()), markup=False)
    own = [f.name for f in dataclasses.fields(options)]
    _print_topic(console, "this command", ((name, type(options), name, options) for name in own))
    for topic, names in TOPICS.items():
        shown = (name for name in names if options.makes_run or name not in OF_RUN_FOLDERS)
        _print_topic(console, topic, (_located(name, config) for name in shown))
    preset = "" if config.preset == "auto" else f", here of the preset {config.preset}"
    console.print(f"\nDefaults stand in parentheses{preset}. {prog} --help-all shows every flag.", markup=False)


def _located(name: str, config: Config) -> tuple[str, type, str, Any]:
    """A dotted name, the class that declares it, its name there, and the group that holds its value."""
    path, _, field = name.rpartition(".")
    group = operator.attrgetter(path)(config) if path else config
    return name, type(group), field, group


def _print_topic(console: Console, topic: str, fields: Iterator[tuple[str, type, str, Any]]) -> None:
    table = Table.grid(padding=(0, 2))
    table.add_column(max_width=34)
    for name, kind, field, group in fields:
        flag = f"--{name.replace('_', '-')} {_metavar(types_of(kind)[field])}".rstrip()
        table.add_row(flag, Text(_first_sentence(documentation_of(kind)[field]) + _default(getattr(group, field))))
    console.print(Text(f"\n{topic}", style="bold"))
    console.print(Padding(table, (0, 0, 0, 2)))


def documentation_of(kind: type) -> Mapping[str, str]:
    """The docstrings below the fields of a dataclass and of those that it is derived from, by the fields' names."""
    found: dict[str, str] = {}
    for cls in reversed(kind.__mro__):
        if not dataclasses.is_dataclass(cls):
            continue
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
        assert isinstance(definition, ast.ClassDef)
        for statement, following in zip(definition.body, definition.body[1:], strict=False):
            match statement, following:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                    found[name] = " ".join(text.split())
    return found


def _first_sentence(text: str) -> str:
    sentence, stop, _ = text.partition(". ")
    return sentence + stop.strip()


def _metavar(hint: Any) -> str:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return "{" + ",".join(map(str, args)) + "}"
    kinds = [arg for arg in args if arg is not type(None)] if origin is not dict else [dict]
    return METAVARS.get(kinds[0] if kinds else hint, "VALUE")


def _default(value: Any) -> str:
    return "" if value in (None, "", False) or value == {} else f" ({value})"
