"""Where the values of a config come from: Python, presets, YAML files and the command line.

A later source wins: defaults < the environment's preset < YAML file < flags. :func:`resolve` applies the preset
to a ``Config`` made in Python, :func:`sfactory.config.command_line.read_command_line` does the whole chain for the
commands.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import numbers
import os
import re
import typing
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from sfactory.config.callables import qualified_name
from sfactory.config.declaring import changed, given_names, types_of
from sfactory.config.env_source import without_brackets
from sfactory.config.fields import Config
from sfactory.config.flags import plain_yaml
from sfactory.config.presets import preset_for
from sfactory.errors import ConfigError

T = TypeVar("T")
GROUPS = frozenset(f.name for f in dataclasses.fields(Config) if dataclasses.is_dataclass(types_of(Config)[f.name]))
"""Fields of a config that are groups of fields."""
_EXPONENT = re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+")
"""A number with an exponent."""


def merged(config: T, values: Mapping[str, Any], *, only_unset: bool = False, path: str = "") -> T:
    """A copy of a config dataclass with the values of a nested mapping.

    Args:
        values: Keys are field names; a nested group is a mapping.
        only_unset: Keep the fields that the config's creator gave.
        path: Dotted name of the group, for error messages.

    Raises:
        ConfigError: With every unknown key and its nearest known one.
    """
    names = {f.name: f for f in dataclasses.fields(config)}
    problems: list[str] = []
    changes: dict[str, Any] = {}
    for key, value in values.items():
        if key not in names:
            problems.append(f"unknown key {path}{key}; {_instead_of(str(key), path, names)}")
            continue
        current = getattr(config, key)
        if dataclasses.is_dataclass(current) and not isinstance(current, type):
            if not isinstance(value, Mapping):
                problems.append(f"{path}{key} is a group and takes a mapping, not {value!r}")
                continue
            try:
                changes[key] = merged(current, value, only_unset=only_unset, path=f"{path}{key}.")
            except ConfigError as error:
                problems.extend(error.problems)
        elif not (only_unset and key in given_names(config)):
            value = _meant(value, types_of(type(config))[key])
            changes[key] = tuple(value) if isinstance(current, tuple) and isinstance(value, list) else value
    if problems:
        raise ConfigError(*problems)
    given = given_names(config)
    return changed(config, given=given if only_unset else given | changes.keys(), **changes)


def _instead_of(key: str, path: str, names: Collection[str]) -> str:
    """What an unknown key of a group with these names was meant to be."""
    group, dot, field = key.partition(".")
    if dot and group in GROUPS.intersection(names):
        return f"write it as a field of its group, {group}: {{{field}: VALUE}}"
    near = difflib.get_close_matches(key, names, 1)
    return f"did you mean {path}{near[0]}?" if near else f"known: {', '.join(names)}"


def _meant(value: Any, hint: Any) -> Any:
    """What a value from YAML means where its field has this type: YAML reads 1e-3, without a point, as a string, and
    off as false."""
    kinds = (hint, *typing.get_args(hint))
    if isinstance(value, list):
        return [_meant(entry, hint) for entry in value]
    if value is False and "off" in kinds:
        return "off"
    if isinstance(value, str) and (int in kinds or float in kinds):
        with contextlib.suppress(ValueError):
            number = float(value)
            return int(number) if int in kinds and number.is_integer() else number
    return value


def resolve(config: Config) -> Config:
    """Fill what the creator of a config left open from the preset of its environment. A group of fields may be
    a mapping, as in YAML.

    Raises:
        ConfigError: If `preset` names no preset, or a group is something else or has unknown keys.
    """
    folder, config = working_directory(), _grouped(config)
    name, values = preset_for(config.preset, config.env, config.algo, config.model.core)
    run = os.fspath(config.run) if isinstance(config.run, os.PathLike) else config.run
    return at(folder, changed(_native(merged(config, values, only_unset=True)), preset=name, run=run))


def working_directory() -> Path:
    """The working directory; empty where it has been removed."""
    with contextlib.suppress(OSError):
        return Path.cwd()
    return Path()


@contextlib.contextmanager
def working_directory_kept() -> Iterator[None]:
    """Leave the working directory as it is: the module of an environment may change it when it is imported."""
    folder = working_directory()
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # it has been removed
            os.chdir(folder)


def at(folder: Path, config: Config) -> Config:
    """A config whose run folder is the one that was meant when the working directory was `folder`: the module of an
    environment may change it when it is imported."""
    return config if working_directory() == folder else changed(config, run=str(folder / config.run_dir))


def _grouped(config: Config) -> Config:
    """The same with each group an object of its class, also where a mapping was given."""
    types = types_of(Config)
    given = {name: value for name in GROUPS if not isinstance(value := getattr(config, name), types[name])}
    return merged(changed(config, **{name: types[name]() for name in given}), given)


def _native(value: Any) -> Any:
    """The same with Python's numbers in place of NumPy's, which JSON does not know; of a config, in all of its
    fields."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        old = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        new = {name: _native(entry) for name, entry in old.items()}
        return changed(value, **{name: entry for name, entry in new.items() if entry is not old[name]})
    if isinstance(value, tuple):
        return tuple(map(_native, value))
    if isinstance(value, numbers.Real) and type(value) not in (bool, int, float):
        return _plain(value)
    return value


def preset_value(config: Config, name: str) -> Any:
    """The default of a field at the top of a resolved config: the preset's value, or else the field's own."""
    return preset_for(config.preset, config.env, config.algo, config.model.core)[1].get(name, getattr(Config(), name))


def to_dict(config: Any) -> dict[str, Any]:
    """A config as nested plain values for YAML and JSON; callables become their qualified names."""
    return {f.name: _plain(getattr(config, f.name)) for f in dataclasses.fields(config)}


def alike(one: Any, other: Any) -> bool:
    """Whether two values of configs mean the same. Of plain ones NaN is NaN, and true is not 1, as it is in Python."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(alike(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and type(one) is type(other):
        return len(one) == len(other) and all(map(alike, one, other))
    nan = one != one and other != other
    return isinstance(one, bool) == isinstance(other, bool) and bool(nan or one == other)


def numbers_as_text(config: Config) -> list[str]:
    """Sentences about arguments of an environment or a model that YAML has read as text: 1e-3, without a point, where
    no type of a field says what is meant."""
    arguments = flattened({"env_kwargs": config.env_kwargs, "model": {"kwargs": config.model.kwargs}}, whole=True)
    return [
        f"{name} is the text {value!r}: YAML takes only what has a point and a signed exponent, as 1.0e-3, for a number"
        for name, value in arguments.items()
        if isinstance(value, str) and _EXPONENT.fullmatch(value)
    ]


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return to_dict(value)
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, numbers.Real):
        return int(value) if isinstance(value, numbers.Integral) else float(value)
    return f"<{without_brackets(qualified_name(value))}>"


def from_dict(values: Mapping[str, Any]) -> Config:
    """The config that :func:`to_dict` described.

    Raises:
        ConfigError: On unknown keys.
    """
    return merged(Config(), values)


def flattened(values: Mapping[str, Any], whole: bool = False) -> dict[str, Any]:
    """A config's plain values by dotted names.

    Args:
        values: As :func:`to_dict` gives them, or only some of them.
        whole: Take apart mappings that are the value of a field, too, as ``env_kwargs``.
    """
    found: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping) and (name in GROUPS or (whole and value)):
            found |= {f"{name}.{field}": inner for field, inner in flattened(value, whole).items()}
        else:
            found[name] = value
    return found


def load_yaml(path: str | Path) -> dict[str, Any]:
    """Read a YAML file of config keys.

    Raises:
        ConfigError: If the file cannot be read, is not YAML, or is not a mapping.
    """
    try:
        values = plain_yaml(Path(path).read_text(encoding="utf-8")) or {}
    except OSError as error:
        raise ConfigError(f"cannot read the config file {path}: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"the config file {path} is not YAML: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"the config file {path} must hold a mapping of config keys, not {type(values).__name__}")
    return values
