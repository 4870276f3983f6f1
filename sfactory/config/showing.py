"""A config as YAML that says beside each value where it comes from."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from typing import Any

from sfactory.config.declaring import settings_of
from sfactory.config.fields import Config
from sfactory.config.sources import GROUPS, to_dict

MACHINE = ("workers", "runtime.policy_workers")
"""Fields that, where they are unset, follow from this machine."""
COLUMN = 40
"""Where the remarks begin, at least."""


def annotated_yaml(config: Config, origins: Mapping[str, str], planned: Config) -> str:
    """The YAML text of a config, which ``--config`` reads again, with a remark on each value's origin.

    Args:
        config: The config as it was asked for.
        origins: Where its values come from, by the fields' dotted names.
        planned: The same config after planning, which has fitted some values to the environment and the machine.
    """
    remarks = dict(origins)
    for name in settings_of(Config):
        if operator.attrgetter(name)(config) != operator.attrgetter(name)(planned):
            remarks[name] = "this machine" if name in MACHINE else "fitted to the environment"
    return "\n".join(_lines(to_dict(planned), remarks))


def _lines(values: Mapping[str, Any], remarks: Mapping[str, str]) -> Iterator[str]:
    for name, value in values.items():
        if name in GROUPS:
            yield f"{name}:"
            for field, inner in value.items():
                yield _line(f"  {_entry(field, inner)}", remarks[f"{name}.{field}"])
        else:
            yield _line(_entry(name, value), remarks[name])


def _entry(name: str, value: Any) -> str:
    """One entry of a mapping on one line."""
    import yaml  # here, so that a policy is loaded without it

    return yaml.safe_dump({name: value}, default_flow_style=True, width=10**6).strip()[1:-1]


def _line(entry: str, remark: str) -> str:
    return f"{entry:{COLUMN}}  # {remark}"
