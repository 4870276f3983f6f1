"""Describes a callable (its bound values and bytecode) as strings that do not depend on the process or on line numbers.

A callable carries its arguments, its closure, the attributes of its object, and what it takes from its module by
another name than its own. What it assigns itself, such as a count of its calls, says nothing and is left out.
"""

from __future__ import annotations

import dataclasses
import dis
import enum
import functools
import hashlib
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

LONGEST = 200
"""Characters of a described value; the end of a longer one is hashed."""
DEEPEST = 4
"""Levels down to which values are described."""
CALLABLES = (type, types.FunctionType, types.BuiltinFunctionType, types.MethodType, functools.partial)
_PLAIN = (type(None), bool, int, float, complex, str, bytes, type(Path()))


def hashed(text: str) -> str:
    """SHA-256 of a string, in hexadecimal digits."""
    return hashlib.sha256(text.encode(errors="replace")).hexdigest()


def qualified_name(thing: Any) -> str:
    """The qualified name of a class or function; of any other object, that of its class."""
    return getattr(thing, "__qualname__", type(thing).__qualname__)


def name_of(thing: Any) -> str:
    """``module:qualified.name`` of a class or function; a script has the same module whether it is run or imported."""
    module = getattr(thing, "__module__", None) or ""
    if module == "__main__":  # which has no file in a notebook
        file = getattr(sys.modules["__main__"], "__file__", None)
        module = Path(file).stem if file else ""
    return f"{module}:{qualified_name(thing)}"


def function_of(maker: Any) -> Any:
    """The function or class behind partial and bound arguments; of any other object that can be called, its class."""
    while isinstance(maker, functools.partial):
        maker = maker.func
    if isinstance(maker, types.MethodType):
        maker = maker.__func__
    return maker if isinstance(maker, type | types.FunctionType | types.BuiltinFunctionType) else type(maker)


def is_lambda(maker: Any) -> bool:
    return function_of(maker).__name__ == "<lambda>"


def code_of(maker: Any) -> str:
    """Version of Python, as bytecode differs between versions, and hash of the code of a function or of a class's
    methods; empty where there is no bytecode."""
    functions = _functions_of(function_of(maker))
    if not functions:
        return ""
    return f"{sys.implementation.cache_tag} {hashed(repr([_code_parts(each.__code__) for each in functions]))}"


def described_values(maker: Any, depth: int = 0) -> dict[str, str]:
    """The values that a callable carries, described, by name."""
    return {name: described(value, depth) for name, value in _carried_by(maker, with_globals=depth == 0).items()}


def described(value: Any, depth: int = 0) -> str:
    """A value in words, an array by its hash; an object of an unknown kind is described by its class alone."""
    if isinstance(value, types.ModuleType):
        return value.__name__
    if _is_plain(value):
        return _shortened(_shown(value))
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        return f"array {value.dtype} {value.shape} {hashlib.sha256(value.tobytes()).hexdigest()[:16]}"
    if depth >= DEEPEST or not (isinstance(value, CALLABLES) or dataclasses.is_dataclass(value)):
        return name_of(type(value))
    values = described_values(value, depth + 1)
    name = name_of(function_of(value))
    return _shortened(f"{name}({', '.join(f'{key}={text}' for key, text in values.items())})" if values else name)


def closure(function: Any) -> dict[str, Any]:
    """The variables of outer functions that a function reads and never assigns."""
    if not isinstance(function, types.FunctionType):
        return {}
    assigned = _named_in(function, "STORE_DEREF")
    found = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        if name not in assigned:
            try:
                found[name] = cell.cell_contents
            except ValueError:  # not assigned yet
                continue
    return found


# What is carried


def _carried_by(maker: Any, with_globals: bool) -> dict[str, Any]:
    match maker:
        case functools.partial():
            arguments = dict(enumerate(maker.args)) | maker.keywords
            bound = {f"argument {name}": value for name, value in arguments.items()}
            return _carried_by(maker.func, with_globals) | bound
        case types.MethodType():
            owner = maker.__self__
            own = {"self": owner} if isinstance(owner, type) else _attributes(owner, maker.__func__)
            return _carried_by(maker.__func__, with_globals) | own
        case types.FunctionType():
            return _defaults(maker) | closure(maker) | (_renamed_globals(maker) if with_globals else {})
        case type():
            return _values_of_local_class(maker) if "<locals>" in maker.__qualname__ else {}
        case types.BuiltinFunctionType():
            return {}
    return _attributes(maker, type(maker).__call__)


def _values_of_local_class(cls: type) -> dict[str, Any]:
    """A class that a function has made may depend on that function's variables."""
    methods = _functions_of(cls)
    assigned = set().union(*(_named_in(method, "STORE_ATTR") for method in methods))
    values = {
        name: value
        for name, value in vars(cls).items()
        if type(value) in _PLAIN and not name.startswith("__") and name not in assigned
    }
    for method in methods:
        values |= {name: value for name, value in closure(method).items() if name != "__class__"}
    return values


def _attributes(thing: Any, method: Any) -> dict[str, Any]:
    """The attributes of an object that is called by one of its methods, without those that the method assigns."""
    attributes, assigned = getattr(thing, "__dict__", None), _named_in(method, "STORE_ATTR")
    if not isinstance(attributes, dict):
        return {}
    return {name: value for name, value in attributes.items() if name not in assigned}


def _defaults(function: types.FunctionType) -> dict[str, Any]:
    defaults = function.__defaults__ or ()
    positional = function.__code__.co_varnames[: function.__code__.co_argcount]
    with_default = positional[len(positional) - len(defaults) :]
    return dict(zip(with_default, defaults, strict=True)) | (function.__kwdefaults__ or {})


def _renamed_globals(function: types.FunctionType) -> dict[str, Any]:
    """Plain values of its module that a function reads, and classes, functions and modules that have another name there
    than their own: a loop's variable, for example."""
    read = _named_in(function, "LOAD_GLOBAL", "LOAD_NAME") - _named_in(function, "STORE_GLOBAL")
    found = {name: function.__globals__[name] for name in sorted(read & function.__globals__.keys())}
    return {name: value for name, value in found.items() if _tells(name, value)}


def _tells(name: str, value: Any) -> bool:
    if isinstance(value, (*CALLABLES, types.ModuleType)):
        return getattr(value, "__name__", "").rpartition(".")[2] != name
    return _is_plain(value)


# Plain values


def _is_plain(value: Any, depth: int = 0) -> bool:
    """Whether it is a plain value, or a container of plain ones. An empty one may be there to be filled."""
    if type(value) in (list, tuple, set, frozenset, dict):
        entries = [*value.keys(), *value.values()] if type(value) is dict else value
        return depth < DEEPEST and len(value) > 0 and all(_is_plain(entry, depth + 1) for entry in entries)
    return type(value) in _PLAIN or isinstance(value, enum.Enum)


def _shown(value: Any) -> str:
    """A plain value, or a container of plain ones, as the same string in every process, also a set."""
    if isinstance(value, enum.Enum):
        return f"{name_of(type(value))}.{value.name}"
    if type(value) is dict:
        return "{" + ", ".join(f"{_shown(key)}: {_shown(entry)}" for key, entry in value.items()) + "}"
    if type(value) in (list, tuple, set, frozenset):
        entries = [_shown(entry) for entry in value]
        return f"{type(value).__name__}({', '.join(entries if type(value) in (list, tuple) else sorted(entries))})"
    return str(value) if isinstance(value, Path) else repr(value)


def _shortened(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 20]}... {hashed(text)[:16]}"


# Code


def _functions_of(thing: Any) -> list[types.FunctionType]:
    """A function itself; of a class, its methods of every kind in the order of their names."""
    if isinstance(thing, types.FunctionType):
        return [thing]
    attributes = [value for _, value in sorted(vars(thing).items())] if isinstance(thing, type) else []
    functions = [
        value.fget if isinstance(value, property) else getattr(value, "__func__", value) for value in attributes
    ]
    return [function for function in functions if isinstance(function, types.FunctionType)]


def _code_parts(code: types.CodeType) -> tuple[Any, ...]:
    constants = [
        _code_parts(constant) if isinstance(constant, types.CodeType) else _shown(constant)
        for constant in code.co_consts
    ]
    return code.co_code, code.co_names, constants


def _named_in(function: Any, *operations: str) -> set[str]:
    """The names to which bytecode operations of a function apply, those of functions within it included."""
    if not isinstance(function, types.FunctionType):
        return set()
    return {name for operation, name in _operations(function.__code__) if operation in operations}


def _operations(code: types.CodeType) -> Iterator[tuple[str, Any]]:
    for instruction in dis.get_instructions(code):
        yield instruction.opname, instruction.argval
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _operations(constant)
