"""The command line of a training run: every field of :class:`Config` is a flag, beside the flags of the command itself.

A later source wins: defaults < the environment's preset < the YAML file of ``--config`` < flags.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Annotated, Any, ClassVar, Generic, TypeVar

import tyro

from sfactory.config.checking import check_types
from sfactory.config.declaring import changed, given_names, settings_of, types_of
from sfactory.config.fields import Config
from sfactory.config.presets import preset_for
from sfactory.config.short_help import print_short_help
from sfactory.config.sources import at, flattened, load_yaml, merged, resolve, working_directory

Switch = tyro.conf.FlagCreatePairsOff[bool]
"""A flag that is given or not, without a ``--no-`` form."""
_PRESET_DEPENDS_ON = ("env", "preset", "algo", "model.core")
"""Fields that decide the defaults of the others."""


@dataclass(frozen=True)
class CommandOptions:
    """Flags of a command besides the fields of a run's configuration."""

    makes_run: ClassVar[bool] = False
    """Whether the command makes a run folder. Else the short help leaves out what says where that is."""
    config: str | None = None
    """A YAML file of the same fields; flags win over it, and both win over the preset."""
    help_all: Switch = False
    """Show every flag."""


@dataclass(frozen=True)
class TrainOptions(CommandOptions):
    """Flags of ``sfactory train`` besides those of a run."""

    makes_run = True
    show_config: Switch = False
    """Print the configuration as YAML, with where each value comes from, and start nothing."""


O = TypeVar("O", bound=CommandOptions)  # noqa: E741


@dataclass(frozen=True)
class CommandLine(Generic[O]):
    """What a command line asks for.

    Attributes:
        config: The resolved config.
        options: The command's own flags.
        origins: Where the value of each field comes from, by the field's dotted name: default, preset NAME, the YAML
            file, or flag.
    """

    config: Config
    options: O
    origins: Mapping[str, str]


def from_command_line(args: Sequence[str], prog: str, description: str = "") -> Config:
    """The config that a command line asks for. Exits and raises as :func:`read_command_line`."""
    return read_command_line(args, prog, description, CommandOptions).config


def read_command_line(args: Sequence[str], prog: str, description: str, options: type[O]) -> CommandLine[O]:
    """Read a command's flags: its own, and the fields of a run's configuration.

    Exits with status 2 and a message on unknown or malformed flags, with 0 on `--help` and `--help-all`.

    Args:
        args: The command line; a first word that is no flag is the environment.
        prog: The command, as messages name it.
        description: What the command does, for its help.
        options: The class of its own flags.

    Raises:
        ConfigError: On a bad YAML file or preset.
    """
    folder, args = working_directory(), _with_switches(first_word_as("--env", args))
    early, rest = _what_chooses_the_preset(args, prog)
    base = load_yaml(early.config) if early.config else {}
    chosen = {name: value for name in _PRESET_DEPENDS_ON if (value := getattr(early, name)) is not None}
    core = {"model": {"core": chosen["model.core"]}} if "model.core" in chosen else {}
    top = {name: value for name, value in chosen.items() if "." not in name}
    asked = merged(merged(Config(), base | top), core)
    default = resolve(asked)
    if not asked.env:  # which the preset would follow
        default = changed(default, preset=asked.preset)
    check_types(default)
    if "--help-all" in rest:
        rest = ["--help"]
    elif {"-h", "--help"} & {*rest}:
        print_short_help(prog, description, options(), default)
        sys.exit(0)
    rest += [word for name, value in chosen.items() for word in (f"--{name}", value)]
    kind = _line(options)
    line = tyro.cli(kind, args=rest, default=kind(options(), default), prog=prog, description=description)
    flagged = list(_flagged(args))
    preset, values = preset_for(default.preset, default.env, default.algo, default.model.core)
    origins = dict.fromkeys(settings_of(Config), "default") | {"preset": "by the environment"}
    for names, origin in ((flattened(values), f"preset {preset}"), (flattened(base), early.config), (flagged, "flag")):
        origins |= dict.fromkeys(names, origin)
    given = {name for name in flagged if "." not in name} | {
        f.name for f in dataclasses.fields(Config) if getattr(line.config, f.name) != getattr(default, f.name)
    }
    return CommandLine(
        at(folder, changed(line.config, given=given_names(default) | given)),
        dataclasses.replace(line.options, config=early.config),
        origins,
    )


def first_word_as(flag: str, args: Sequence[str]) -> list[str]:
    """A command line whose first word, if that is no flag, is the value of `flag`."""
    given = any(word.partition("=")[0] == flag for word in args)
    return [flag, *args] if args and args[0] and not args[0].startswith("-") and not given else list(args)


def flag_as_word(flag: str, args: Sequence[str] | None) -> list[str]:
    """A command line, None for the process's own, in which the value of `flag` stands as its first word instead."""
    args = sys.argv[1:] if args is None else args
    words = [word for arg in args for word in (arg.split("=", 1) if arg.startswith(f"{flag}=") else [arg])]
    if flag not in words[:-1]:
        return words
    at = words.index(flag)
    return [words[at + 1], *words[:at], *words[at + 2 :]]


def _with_switches(args: Sequence[str]) -> list[str]:
    """A command line that has ``--sync`` and ``--no-sync`` for ``--sync true`` and ``--sync=false``, and that writes
    them ``True`` and ``False`` behind the flag of a field that may be unset."""
    words: list[str] = []
    for arg in args:
        flag, _, value = arg.partition("=")
        for word in (flag, value) if value.lower() in ("true", "false") else (arg,):
            default = _default_of(words[-1]) if words and word.lower() in ("true", "false") else ""
            if isinstance(default, bool):
                group, dot, field = words[-1].removeprefix("--").rpartition(".")
                words[-1] = words[-1] if word.lower() == "true" else f"--{group}{dot}no-{field}"
            else:
                words.append(word.capitalize() if default is None else word)
    return words


def _default_of(word: str) -> Any:
    """The default of the field whose flag a word of the command line is; of other words an empty text."""
    name = word.removeprefix("--").replace("-", "_")
    return attrgetter(name)(Config()) if word.startswith("--") and name in settings_of(Config) else ""


def _line(options: type[CommandOptions]) -> type:
    """A dataclass of all flags of a command; neither of its two groups stands before their names."""
    groups = {"options": options, "config": Config}
    return dataclasses.make_dataclass(
        "CommandLine", [(name, Annotated[kind, tyro.conf.arg(name="")]) for name, kind in groups.items()]
    )


def _flagged(args: Sequence[str]) -> Iterator[str]:
    """The dotted names of the fields that flags set; ``--no-sync`` sets sync."""
    words = {word.partition("=")[0].removeprefix("--").replace("-", "_") for word in args if word.startswith("--")}
    for name in settings_of(Config):
        group, dot, field = name.rpartition(".")
        if name in words or f"{group}{dot}no_{field}" in words:
            yield name


def _what_chooses_the_preset(args: Sequence[str], prog: str) -> tuple[argparse.Namespace, list[str]]:
    """The flags that decide the defaults of the others, and the rest of the command line."""
    first = argparse.ArgumentParser(prog=prog, usage=f"{prog} [flags]", add_help=False, allow_abbrev=False)
    first.add_argument("--config")
    for name in _PRESET_DEPENDS_ON:
        first.add_argument(f"--{name}", choices=typing.get_args(types_of(Config)[name]) if name == "algo" else None)
    return first.parse_known_args(list(args))
