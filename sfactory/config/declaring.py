"""How a field of a configuration is declared: its default, its limits and its rule for resuming, in one place.

Validation, ``--help`` and docs/resume.md are made from these declarations::

    lr: float = setting(3e-4, above(0), resume=warned("other optimizer steps from here on"))
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import typing
from dataclasses import InitVar
from typing import Annotated, Any, Literal, NamedTuple, Protocol, TypeVar

T = TypeVar("T")
_KEY = "setting"


class Rule(NamedTuple):
    """What happens to a run that is resumed with another value of a field.

    Attributes:
        verdict: refused: the saved weights, or what was learned with them, would not fit or would mean something else.
            warned: the run goes on, but learns in another way from here on. safe: it goes on as it would have.
        why: The reason that the user is told.
    """

    verdict: Literal["refused", "warned", "safe"]
    why: str


refused, warned, safe = (functools.partial(Rule, verdict) for verdict in ("refused", "warned", "safe"))


class Limits(Protocol):
    """Which values a field may have; of a list, each of its entries. As a string, it completes "it must be ..."."""

    def allow(self, value: Any) -> bool:
        """Whether the value is within the limits."""
        ...


@dataclasses.dataclass(frozen=True)
class Range:
    """Numbers between two ends, of which a missing one is infinite and an open one is not included."""

    low: float | None = None
    high: float | None = None
    open_low: bool = False
    open_high: bool = False

    def allow(self, value: float) -> bool:
        if self.low is not None and not (value > self.low if self.open_low else value >= self.low):
            return False
        return self.high is None or (value < self.high if self.open_high else value <= self.high)

    def __str__(self) -> str:
        if None not in (self.low, self.high) and not (self.open_low or self.open_high):
            return f"between {self.low} and {self.high}"
        low = [f"{'above' if self.open_low else 'at least'} {self.low}"] if self.low is not None else []
        high = [f"{'below' if self.open_high else 'at most'} {self.high}"] if self.high is not None else []
        return " and ".join(low + high)


def at_least(low: float, below: float | None = None) -> Range:
    """Numbers from `low` on, and below `below` if that is given."""
    return Range(low, below, open_high=below is not None)


def above(low: float) -> Range:
    """Numbers greater than `low`."""
    return Range(low, open_low=True)


def between(low: float, high: float) -> Range:
    """Numbers from `low` to `high`, both included."""
    return Range(low, high)


class DeviceNames:
    """Names of torch devices, separated by commas where a field may have several.

    Args:
        several: Whether more than one name is allowed.
    """

    def __init__(self, several: bool = False) -> None:
        self._several = several

    def allow(self, value: str) -> bool:
        return all(map(self._is_device, value.split(",") if self._several else [value]))

    def __str__(self) -> str:
        return f"auto, cpu, cuda or cuda:N{', or several of them with commas between' if self._several else ''}"

    @staticmethod
    def _is_device(name: str) -> bool:
        index = name.removeprefix("cuda:")
        return name in ("auto", "cpu", "cuda") or (index != name and index.isascii() and index.isdigit())


class Setting(NamedTuple):
    """What a field declares besides its type and default.

    Attributes:
        limits: None where every value of the type is allowed.
        resume: The rule for a run that is resumed with another value.
    """

    limits: Limits | None
    resume: Rule


def setting(default: T, limits: Limits | None = None, *, resume: Rule) -> T:
    """Declare a field of a configuration.

    Args:
        default: Its value unless a preset, file, flag or argument gives another. A dict is copied for each config.
        limits: Which values it may have; an unset (None) field is always allowed.
        resume: What happens to a run that is resumed with another value.
    """
    metadata = {_KEY: Setting(limits, resume)}
    if isinstance(default, dict):
        return dataclasses.field(default_factory=default.copy, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def _tyros(marker: str) -> Any:
    """One of tyro's markers of fields. A process that only plays a saved policy does without tyro."""
    try:
        import tyro
    except ImportError:
        return None
    return getattr(tyro.conf, marker)


@dataclasses.dataclass(frozen=True)
class Settings:
    """A group of settings. It remembers which fields its creator gave, so that a preset fills only the others.

    `dataclasses.replace` passes its own arguments first, then `_given`, then the copied fields. Arguments before
    `_given` were therefore set by the caller.
    """

    _given: InitVar[Annotated[frozenset[str], _tyros("Fixed"), _tyros("Suppress")]] = dataclasses.field(
        default=frozenset(), kw_only=True
    )


def settings_group(cls: type[T]) -> type[T]:
    """Complete a dataclass of :class:`Settings`: what its creator gives is remembered, and ``--help`` shows limits."""
    init = cls.__init__
    names = [f.name for f in dataclasses.fields(cls)]

    @functools.wraps(init)
    def __init__(self, *args, **kwargs):
        given = [*names[: len(args)], *itertools.takewhile(lambda name: name != "_given", kwargs)]
        taken_over = kwargs.pop("_given", frozenset())
        init(self, *args, **kwargs)
        object.__setattr__(self, "_given", frozenset({*taken_over, *given}))

    cls.__init__ = __init__
    _show_limits(cls)
    return cls


def _show_limits(cls: type) -> None:
    """Have ``--help`` show limits. A process that only plays a saved policy does without tyro, which makes it."""
    try:
        import tyro
    except ImportError:
        return
    hints = typing.get_type_hints(cls, include_extras=True)
    for f in dataclasses.fields(cls):
        declared = f.metadata.get(_KEY)
        if declared is not None and declared.limits is not None:
            hint = tyro.conf.arg(help_behavior_hint=functools.partial(_limits_and_default, declared.limits))
            cls.__annotations__[f.name] = Annotated[hints[f.name], hint]


def _limits_and_default(limits: Limits, default: str) -> str:
    return f"({limits}; default: {default})"


@functools.cache
def types_of(cls: type) -> dict[str, Any]:
    """The annotated types of a dataclass's fields."""
    hints = typing.get_type_hints(cls)
    return {f.name: hints[f.name] for f in dataclasses.fields(cls)}


def settings_of(cls: type, path: str = "") -> dict[str, Setting]:
    """The declarations of all fields by dotted name, those of nested groups included, in their order.

    Raises:
        TypeError: If a field is not declared by :func:`setting`.
    """
    found: dict[str, Setting] = {}
    for f in dataclasses.fields(cls):
        kind = types_of(cls)[f.name]
        if dataclasses.is_dataclass(kind):
            found |= settings_of(kind, f"{path}{f.name}.")
        elif _KEY in f.metadata:
            found[f"{path}{f.name}"] = f.metadata[_KEY]
        else:
            raise TypeError(f"{cls.__name__}.{f.name} has no rule for resuming; declare it by setting(..., resume=...)")
    return found


def given_values(config: Any) -> dict[str, Any]:
    """The fields that the creator of a config gave, with their values."""
    return {name: getattr(config, name) for name in given_names(config)}


def given_names(config: Any) -> frozenset[str]:
    """The names of the fields that the creator of a config gave."""
    return getattr(config, "_given", frozenset())


def changed(config: T, *, given: frozenset[str] | None = None, **changes: Any) -> T:
    """A changed copy of a config. Within sfactory every config is changed by it: `dataclasses.replace` is for users,
    whose changes then count as given.

    Args:
        given: The names of the fields that count as given by its creator; unset: those of the original.
    """
    result = dataclasses.replace(config, **changes)
    object.__setattr__(result, "_given", given_names(config) if given is None else frozenset(given))
    return result
