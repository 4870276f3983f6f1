"""User objects named in a configuration: a callable, or "module:Name"."""

from __future__ import annotations

import importlib
import operator
import os
import re
from collections.abc import Callable
from typing import Any

from sfactory.errors import ConfigError


def load_object(name_or_callable: str | Callable[..., Any], role: str = "object") -> Callable[..., Any]:
    """The callable that a configuration means.

    Args:
        name_or_callable: A callable, returned as it is, or ``"package.module:Name"``; the name may be dotted.
        role: What the object is for, as error messages call it (``model.encoder``, for example).

    Raises:
        ConfigError: If the module cannot be imported, has no such attribute, or the attribute cannot be called.
    """
    if not isinstance(name_or_callable, str):
        found = name_or_callable
    else:
        module_name, colon, attribute = name_or_callable.partition(":")
        if not (module_name and colon and attribute) or name_or_callable.startswith("lambda"):
            raise ConfigError(
                f"{role} is {name_or_callable!r}; write it as module:Name, for example my_package.networks:MyEncoder"
            )
        try:
            module = importlib.import_module(module_name)
        except (ImportError, ValueError) as error:
            raise ConfigError(
                f"{role} {name_or_callable!r}: module {module_name} cannot be imported ({error}); check its name and "
                "that it lies on the Python path"
            ) from error
        try:
            found = operator.attrgetter(attribute)(module)
        except AttributeError:
            raise ConfigError(f"{role} {name_or_callable!r}: module {module_name} has no {attribute}") from None
    if not callable(found):
        raise ConfigError(f"{role} is {name_or_callable!r}, which is not callable; name a class or a function")
    return found


def is_harmless(value: Any) -> bool:
    """Whether a value from a stranger's file can name neither a file nor code: numbers and plain words, in lists and
    mappings.

    Environments open what they are given: a level, a model, a program to be run. A word that names a file on this
    machine is not plain.
    """
    if isinstance(value, dict):
        return all(is_harmless(part) for item in value.items() for part in item)
    if isinstance(value, list):
        return all(map(is_harmless, value))
    if isinstance(value, str):
        return re.fullmatch(r"[\w +-]*", value) is not None and not (value and os.path.lexists(value))
    return value is None or isinstance(value, bool | int | float)
