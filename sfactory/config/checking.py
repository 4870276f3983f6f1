"""Whether the fields of a config have their annotated types."""

from __future__ import annotations

import dataclasses
import math
import numbers
import types
import typing
from typing import Any, Literal

from sfactory.config.declaring import types_of
from sfactory.config.fields import Config
from sfactory.errors import ConfigError, shown

LARGEST = 2**53
"""The largest integer that a config may hold: beyond it, floating-point numbers are not exact."""


def check_types(config: Config) -> None:
    """Check that every field has its annotated type.

    Raises:
        ConfigError: With every field that has another one.
    """
    if problems := _type_problems(config):
        raise ConfigError(*problems)


def _type_problems(config: Any, path: str = "") -> list[str]:
    problems = []
    for name, hint in types_of(type(config)).items():
        value = getattr(config, name)
        if dataclasses.is_dataclass(hint) and isinstance(value, hint):
            problems += _type_problems(value, f"{path}{name}.")
        elif not _fits(value, hint):
            problems.append(f"{path}{name} is {shown(value)}; it must be {_described(hint)}")
        elif wrong := [
            each for each in (value if isinstance(value, list | tuple) else (value,)) if _is_no_number(each)
        ]:
            limit = "at most 2**53" if isinstance(wrong[0], numbers.Integral) else "finite"
            problems.append(f"{path}{name} is {shown(value)}; it must be {limit}")
    return problems


def _fits(value: Any, hint: Any) -> bool:
    """Whether a value has an annotated type; lists pass for tuples and integers for floats."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return True
    if origin is Literal:
        return value in args
    if origin is types.UnionType:
        return any(_fits(value, arg) for arg in args)
    if origin is tuple:
        wanted = args[:1] * len(value) if Ellipsis in args and isinstance(value, list | tuple) else args
        return isinstance(value, list | tuple) and len(value) == len(wanted) and all(map(_fits, value, wanted))
    if origin is dict:
        return isinstance(value, dict) and all(isinstance(key, str) for key in value)
    if hint in (int, float):
        return isinstance(value, numbers.Integral if hint is int else numbers.Real) and not isinstance(value, bool)
    return isinstance(value, origin or hint)


def _is_no_number(value: Any) -> bool:
    """Whether it is NaN or infinite, or an integer that is not exact as a floating-point number."""
    if isinstance(value, numbers.Integral):
        return abs(value) > LARGEST
    return isinstance(value, numbers.Real) and not math.isfinite(value)


def _described(hint: Any) -> str:
    """An annotation in words."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return f"one of {', '.join(map(str, args))}"
    if origin is types.UnionType:
        return " or ".join("unset" if arg is type(None) else _described(arg) for arg in args)
    if origin is tuple:
        count = "" if Ellipsis in args else f"{len(args)} "
        return f"a list of {count}{'integers' if int in args else 'numbers' if float in args else 'names'}"
    if origin is dict:
        return "a mapping whose keys are strings"
    words = {int: "an integer", float: "a number", bool: "true or false", str: "a string"}
    if isinstance(hint, type) and not args and hint not in words:
        return f"{'an' if hint.__name__[0] in 'AEIOU' else 'a'} {hint.__name__}"
    return words.get(hint) or str(hint)
