"""What tells a run's environment from another one: the name of its default run folder, and what that folder remembers
of it.

An id names itself. A callable does not: two lambdas have the same name, and so have all that one function returns, as
PettingZoo's ``parallel_env`` of every game. Such a one is told by the values that it carries (its arguments, its
closure, what it takes from its module by another name than its own) and by its code, neither of which depends on where
in a file it stands or on the process that asks.
"""

from __future__ import annotations

import dataclasses
import dis
import enum
import functools
import hashlib
import re
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LONGEST = 200
"""Characters of a described value, of which more are hashed."""
DEEPEST = 4
"""Levels down to which what a callable carries is described."""
_PLAIN = (type(None), bool, int, float, complex, str, bytes, type(Path()))
_CALLABLES = (type, types.FunctionType, types.BuiltinFunctionType, types.MethodType, functools.partial)


@dataclass(frozen=True)
class EnvSource:
    """Where a run's environments come from.

    Attributes:
        made: What is made, as ``module:Name``: the class beneath all wrappers, or what Gymnasium's registry has for an
            id.
        values: What the callable that makes it carries, described, by name.
        code: Version of Python and hash of the callable's bytecode; empty if it has none.
        anonymous: The callable is a lambda, whose code is hardly more than the arguments that it passes.
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
        kwargs: Its keyword arguments; those that are plain are compared as ``env_kwargs``, and only callables are
            described here.
        make: Makes the environment.

    Returns:
        The environment, and its source.
    """
    before = _values_of(maker, 0)
    env = make()
    after = _values_of(maker, 0)
    values = {name: value for name, value in before.items() if after.get(name) == value}
    values |= {
        f"env_kwargs {name}": _described(value, 0) for name, value in kwargs.items() if isinstance(value, _CALLABLES)
    }
    return env, EnvSource(_class_beneath(env), values, _code_of(maker), _is_lambda(maker))


def source_of_id(entry_point: str | Callable[..., Any]) -> EnvSource:
    """The source of a registered id: what the registry has for it."""
    return EnvSource(entry_point if isinstance(entry_point, str) else _name_of(entry_point))


def env_name(env: Any) -> str:
    """The name under which an environment is reported: its id, or a callable's qualified name."""
    if isinstance(env, str):
        return env
    return getattr(env, "__qualname__", type(env).__qualname__).replace("<", "").replace(">", "")


def folder_name(env: Any) -> str:
    """How the default run folder of an environment begins: its id, or a callable's module and name.

    Where the name alone does not tell a callable from others, a hash of what it carries, and of a lambda's code,
    follows.
    """
    if isinstance(env, str):
        return env.replace("/", "-").replace(":", "-")
    named = _named(env)
    name = (
        re.sub(r"[^\w.]", "", _name_of(named).replace("<locals>.", "").replace(":", ".")).strip(".")[:LONGEST] or "env"
    )
    values, anonymous = _values_of(env, 0), _is_lambda(env)
    if not (values or anonymous):
        return name
    return f"{name}-{_hashed(repr((_name_of(env), sorted(values.items()), _code_of(env) if anonymous else '')))[:8]}"


def _named(env: Any) -> Any:
    """What a callable should be called after: the one that it wraps, if there is exactly one and its own name says
    nothing."""
    for _ in range(DEEPEST):
        function = _function_of(env)
        wrapped = [value for value in _closure(function).values() if isinstance(value, _CALLABLES)]
        if "<" not in getattr(function, "__qualname__", "") or len(wrapped) != 1:
            return function
        env = wrapped[0]
    return env


def _function_of(maker: Any) -> Any:
    """The function or class behind partial and bound arguments; of any other object that can be called, its class."""
    while isinstance(maker, functools.partial):
        maker = maker.func
    if isinstance(maker, types.MethodType):
        maker = maker.__func__
    return maker if isinstance(maker, (type, types.FunctionType, types.BuiltinFunctionType)) else type(maker)


def _is_lambda(maker: Any) -> bool:
    return _function_of(maker).__name__ == "<lambda>"


def _name_of(thing: Any) -> str:
    """``module:qualified.name`` of a class or function; a script is the same module when it is run as when it is
    imported."""
    module = getattr(thing, "__module__", None) or ""
    if module == "__main__":  # which has no file in a notebook
        file = getattr(sys.modules["__main__"], "__file__", None)
        module = Path(file).stem if file else ""
    return f"{module}:{getattr(thing, '__qualname__', type(thing).__qualname__)}"


def _class_beneath(env: Any) -> str:
    """The class of an environment without its wrappers; of a vector environment that holds single ones, theirs."""
    try:
        if isinstance(inner := getattr(env, "envs", None), list) and inner:
            env = inner[0]
        env = env.unwrapped
    except Exception:  # a user's environment may raise whatever it is asked
        pass
    return _name_of(type(env))


# Values


def _values_of(maker: Any, depth: int) -> dict[str, str]:
    """What a callable carries, described, by name."""
    if isinstance(maker, functools.partial):
        given = dict(enumerate(maker.args)) | maker.keywords
        return _values_of(maker.func, depth) | {
            f"argument {name}": _described(value, depth) for name, value in given.items()
        }
    if isinstance(maker, types.MethodType):
        owner = maker.__self__
        own = {"self": owner} if isinstance(owner, type) else _attributes(owner, maker.__func__)
        return _values_of(maker.__func__, depth) | {name: _described(value, depth) for name, value in own.items()}
    if isinstance(maker, types.FunctionType):
        carried = _defaults(maker) | _closure(maker) | (_renamed_globals(maker) if depth == 0 else {})
        return {name: _described(value, depth) for name, value in carried.items()}
    if isinstance(maker, type):
        return _values_of_local_class(maker, depth) if "<locals>" in maker.__qualname__ else {}
    if isinstance(maker, types.BuiltinFunctionType):
        return {}
    return {name: _described(value, depth) for name, value in _attributes(maker, type(maker).__call__).items()}


def _values_of_local_class(cls: type, depth: int) -> dict[str, str]:
    """A class that a function has made may depend on that function's variables."""
    assigned = set().union(*map(_assigned_attributes, _functions_of(cls)))
    values = {name: value for name, value in vars(cls).items() if type(value) in _PLAIN and not name.startswith("__")}
    values = {name: value for name, value in values.items() if name not in assigned}
    for function in _functions_of(cls):
        values |= {name: value for name, value in _closure(function).items() if name != "__class__"}
    return {name: _described(value, depth) for name, value in values.items()}


def _attributes(thing: Any, method: Any) -> dict[str, Any]:
    """The attributes of an object that is called by a method of it, but those that the method assigns, such as a count
    of its calls."""
    attributes = getattr(thing, "__dict__", None)
    assigned = _assigned_attributes(method)
    return (
        {name: value for name, value in attributes.items() if name not in assigned}
        if isinstance(attributes, dict)
        else {}
    )


def _assigned_attributes(function: Any) -> set[str]:
    operations = _operations(function.__code__) if isinstance(function, types.FunctionType) else ()
    return {name for operation, name in operations if operation == "STORE_ATTR"}


def _defaults(function: types.FunctionType) -> dict[str, Any]:
    code, defaults = function.__code__, function.__defaults__ or ()
    positional = code.co_varnames[: code.co_argcount]
    return dict(zip(positional[len(positional) - len(defaults) :], defaults, strict=True)) | (
        function.__kwdefaults__ or {}
    )


def _closure(function: Any) -> dict[str, Any]:
    """The variables of outer functions that a function reads and never assigns."""
    if not isinstance(function, types.FunctionType):
        return {}
    assigned = {name for operation, name in _operations(function.__code__) if operation == "STORE_DEREF"}
    found = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        if name not in assigned:
            try:
                found[name] = cell.cell_contents
            except ValueError:  # not assigned yet
                continue
    return found


def _renamed_globals(function: types.FunctionType) -> dict[str, Any]:
    """Plain values of its module that a function reads, and classes, functions and modules that have another name there
    than their own: a loop's variable, for example."""
    operations = list(_operations(function.__code__))
    assigned = {name for operation, name in operations if operation == "STORE_GLOBAL"}
    read = {name for operation, name in operations if operation in ("LOAD_GLOBAL", "LOAD_NAME")} - assigned
    found = {name: function.__globals__[name] for name in sorted(read & function.__globals__.keys())}
    return {name: value for name, value in found.items() if _tells(name, value)}


def _tells(name: str, value: Any) -> bool:
    if isinstance(value, (*_CALLABLES, types.ModuleType)):
        return getattr(value, "__name__", "").rpartition(".")[2] != name
    return _is_value(value, 0)


def _is_value(value: Any, depth: int) -> bool:
    """Whether it is plain, or a container with plain entries only. An empty one may be there to be filled."""
    if type(value) in (list, tuple, set, frozenset, dict):
        entries = [*value.keys(), *value.values()] if type(value) is dict else value
        return depth < DEEPEST and len(value) > 0 and all(_is_value(entry, depth + 1) for entry in entries)
    return type(value) in _PLAIN or isinstance(value, enum.Enum)


def _described(value: Any, depth: int) -> str:
    """A value in words that are the same in another process; of an object that is not known, its class alone."""
    if isinstance(value, types.ModuleType):
        return value.__name__
    if isinstance(value, enum.Enum):
        return f"{_name_of(type(value))}.{value.name}"
    if _is_value(value, 0):
        return _shortened(_shown(value))
    if depth >= DEEPEST or not (isinstance(value, _CALLABLES) or dataclasses.is_dataclass(value)):
        return _name_of(type(value))
    values = _values_of(value, depth + 1)
    name = _name_of(_function_of(value))
    return _shortened(f"{name}({', '.join(f'{key}={text}' for key, text in values.items())})" if values else name)


def _shown(value: Any) -> str:
    """A plain value, or a container of plain ones, whose text is the same in every process, also of a set."""
    if isinstance(value, enum.Enum):
        return f"{_name_of(type(value))}.{value.name}"
    if type(value) is dict:
        return "{" + ", ".join(f"{_shown(key)}: {_shown(entry)}" for key, entry in value.items()) + "}"
    if type(value) in (list, tuple, set, frozenset):
        entries = [_shown(entry) for entry in value]
        return f"{type(value).__name__}({', '.join(entries if type(value) in (list, tuple) else sorted(entries))})"
    return str(value) if isinstance(value, Path) else repr(value)


def _shortened(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 20]}... {_hashed(text)[:16]}"


# Code


def _code_of(maker: Any) -> str:
    """Version of Python, whose bytecode another one does not have, and hash of the code of a function, or of a class
    with its methods."""
    function = _function_of(maker)
    functions = (
        _functions_of(function)
        if isinstance(function, type)
        else [function]
        if isinstance(function, types.FunctionType)
        else []
    )
    if not functions:
        return ""
    return f"{sys.implementation.cache_tag} {_hashed(repr([_code_parts(each.__code__) for each in functions]))}"


def _functions_of(cls: type) -> list[types.FunctionType]:
    """The methods of a class, of every kind, in the order of their names."""
    found = []
    for _, value in sorted(vars(cls).items()):
        value = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
        if isinstance(value, types.FunctionType):
            found.append(value)
    return found


def _code_parts(code: types.CodeType) -> tuple[Any, ...]:
    constants = [
        _code_parts(constant) if isinstance(constant, types.CodeType) else _shown(constant)
        for constant in code.co_consts
    ]
    return code.co_code, code.co_names, constants


def _operations(code: types.CodeType) -> Iterator[tuple[str, Any]]:
    """Names and arguments of a code's operations, those of functions within it included."""
    for instruction in dis.get_instructions(code):
        yield instruction.opname, instruction.argval
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _operations(constant)


def _hashed(text: str) -> str:
    return hashlib.sha256(text.encode(errors="replace")).hexdigest()
