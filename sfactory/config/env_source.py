"""What tells a run's environment from another one: the name of its default run folder, and what that folder remembers
of it.

An id names itself. A callable does not: two lambdas have the same name, and so have all that one function returns, as
PettingZoo's ``parallel_env`` of every game. Such a callable is told by the values that it carries and by its code
(:mod:`sfactory.config.callables`).
"""

from __future__ import annotations

import dataclasses
import numbers
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from sfactory.config.callables import (
    CALLABLES,
    DEEPEST,
    LONGEST,
    closure,
    code_of,
    described,
    described_values,
    function_of,
    hashed,
    is_lambda,
    name_of,
    qualified_name,
)

_YAMLS = (type(None), bool, numbers.Real, str, list, tuple, dict)
"""What ``config.yaml`` says in full."""


@dataclass(frozen=True)
class EnvSource:
    """Where a run's environments come from.

    Attributes:
        made: What is made, as ``module:Name``: the class beneath all wrappers, or what Gymnasium's registry has for an
            id.
        values: The values that the callable carries, described, by name.
        code: Version of Python and hash of the callable's bytecode; empty if it has none.
        anonymous: Whether the callable is a lambda, whose code is hardly more than the arguments that it passes.
    """

    made: str
    values: Mapping[str, str] = dataclasses.field(default_factory=dict)
    code: str = ""
    anonymous: bool = False


def source_of(maker: Callable[..., Any], kwargs: Mapping[str, Any], make: Callable[[], Any]) -> tuple[Any, EnvSource]:
    """Make an environment, and say where it comes from.

    Values that change when an environment is made, such as a count of them, tell nothing and are left out.

    Args:
        maker: The callable behind it.
        kwargs: Its keyword arguments; those that are plain are compared as ``env_kwargs``, and all others are
            described here.
        make: Makes the environment.

    Returns:
        The environment, and its source.
    """
    before = described_values(maker)
    env = make()
    after = described_values(maker)
    values = {name: value for name, value in before.items() if after.get(name) == value}
    values |= {
        f"env_kwargs {name}": described(value) for name, value in kwargs.items() if not isinstance(value, _YAMLS)
    }
    return env, EnvSource(_class_beneath(env), values, code_of(maker), is_lambda(maker))


def source_of_id(entry_point: str | Callable[..., Any]) -> EnvSource:
    """The source of a registered id: what the registry has for it."""
    return EnvSource(entry_point if isinstance(entry_point, str) else name_of(entry_point))


def env_name(env: Any) -> str:
    """The name under which an environment is reported: its id, a callable's qualified name, or ``module:name`` of what
    a callable without a telling name wraps."""
    if isinstance(env, str):
        return env
    named = _namesake(env)
    return without_brackets(qualified_name(named) if named is function_of(env) else name_of(named))


def without_brackets(name: str) -> str:
    """A qualified name without those of ``<locals>`` and ``<lambda>``."""
    return name.replace("<", "").replace(">", "")


def folder_name(env: Any) -> str:
    """The beginning of an environment's default run folder: its id, or a callable's module and name.

    Where the name alone does not tell a callable from others, a hash of what it carries, and of a lambda's code,
    follows.
    """
    if isinstance(env, str):
        return env.replace("/", "-").replace(":", "-")
    full_name = name_of(_namesake(env))
    plain_name = re.sub(r"[^\w.]", "", full_name.replace("<locals>.", "").replace(":", "."))
    name = plain_name.strip(".")[:LONGEST] or "env"
    values, anonymous = described_values(env), is_lambda(env)
    if not (values or anonymous):
        return name
    return f"{name}-{hashed(repr((name_of(env), sorted(values.items()), code_of(env) if anonymous else '')))[:8]}"


def _namesake(env: Any) -> Any:
    """What a callable is named after: the one that it wraps, if there is exactly one and its own name says nothing."""
    for _ in range(DEEPEST):
        function = function_of(env)
        wrapped = [value for value in closure(function).values() if isinstance(value, CALLABLES)]
        if "<" not in getattr(function, "__qualname__", "") or len(wrapped) != 1:
            return function
        env = wrapped[0]
    return env


def _class_beneath(env: Any) -> str:
    """The class of an environment without its wrappers; of a vector environment that holds single ones, theirs."""
    try:
        if isinstance(inner := getattr(env, "envs", None), list) and inner:
            env = inner[0]
        env = env.unwrapped
    except Exception:  # a user's environment may raise whatever it is asked
        pass
    return name_of(type(env))
