"""Fields that are one word on the command line and any object in Python."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Annotated, Any

MOST_YAML_NODES = 100_000
"""Most entries that a YAML text may have, aliases written out."""


_MERGE = "tag:yaml.org,2002:merge"
"""Tag of the key << of YAML, which may come several times."""


def _flag(metavar: str, parse: Callable[[str], Any]) -> Any:
    """How tyro reads and shows such a field. A process that only plays a saved policy does without tyro."""
    try:
        from tyro.constructors import PrimitiveConstructorSpec
    except ImportError:
        return metavar
    return PrimitiveConstructorSpec(
        1, metavar, lambda words: parse(words[0]), lambda value: True, lambda value: [str(value)]
    )


def _count(text: str) -> int:
    """An integer, also as 2e6 or 2_000_000."""
    with contextlib.suppress(ValueError):
        return int(text)
    with contextlib.suppress(ValueError, OverflowError):
        if (number := float(text)).is_integer():
            return int(number)
    raise ValueError(f"{text!r} is not a whole number")


def _yaml_mapping(text: str) -> dict[str, Any]:
    try:
        value = plain_yaml(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise ValueError(f"{text!r} is not a mapping; write for example '{{max_episode_steps: 100}}'")
    return value


def plain_yaml(text: str) -> Any:
    """The value that a YAML text describes: numbers, strings, lists and mappings only.

    Raises:
        ValueError: If it is not YAML, or if its aliases would blow it up.
    """
    import yaml  # here, so that a policy is loaded without it

    class Loader(yaml.SafeLoader):
        """Refuses a key that comes twice in a mapping; of YAML's own, the last one would win."""

        def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
            node: yaml.MappingNode = super().compose_mapping_node(anchor)
            seen: set[tuple[str, str]] = set()
            for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode) and key.tag != _MERGE):
                if (key.tag, key.value) in seen:
                    line = key.start_mark.line + 1
                    raise ValueError(f"line {line} has the key {key.value} again; keep one of them")
                seen.add((key.tag, key.value))
            return node

    try:
        value = yaml.load(text, Loader)
    except yaml.constructor.ConstructorError as error:
        raise ValueError(
            f"{error.problem}; only numbers, strings, lists and mappings are read, and code is named as module:Name"
        ) from None
    except (yaml.YAMLError, ValueError, OverflowError, RecursionError) as error:  # also impossible numbers and dates
        raise ValueError(str(error) or type(error).__name__) from None
    nodes, waiting = 0, [value]
    while waiting:
        nodes, node = nodes + 1, waiting.pop()
        if nodes > MOST_YAML_NODES:
            raise ValueError(f"it has more than {MOST_YAML_NODES} entries")
        waiting += [*node, *node.values()] if isinstance(node, dict) else node if isinstance(node, list) else ()
    return value


Id = Annotated[Any, _flag("ID", str)]
"""An environment's id on the command line and in YAML; in Python also a callable."""
Name = Annotated[Any, _flag("NAME", str)]
"""A name on the command line and in YAML; in Python also the object itself."""
Listed = Annotated[object, _flag("NAME", str)]
"""The same in a list, where tyro checks what a file has given, and cannot check Any."""
Count = Annotated[int, _flag("INT", _count)]
"""A number of env steps, which may be long."""
_MAPPING = _flag("{KEY: VALUE}", _yaml_mapping)
Mapped = Annotated[dict[str, Any], _MAPPING]
"""A mapping, written in YAML on the command line."""
MappedOrUnset = Annotated[dict[str, Any] | None, _MAPPING]
"""The same where None stands for another one."""
