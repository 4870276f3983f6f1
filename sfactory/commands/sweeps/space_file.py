"""The file that says what a sweep searches, checked before anything starts."""

from __future__ import annotations

import dataclasses
import difflib
import math
import operator
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from sfactory.commands.sweeps.space import Dimension, Objective, Pruning, Space, parsed
from sfactory.config import Config, alike, check_types, from_dict, load_yaml, resolve
from sfactory.config.checking import LARGEST
from sfactory.config.declaring import settings_of, types_of
from sfactory.config.sources import working_directory_kept
from sfactory.errors import ConfigError, shown
from sfactory.runs.curves import EVALUATIONS, OWN_COLUMNS
from sfactory.telemetry.metrics import METRICS

_OF_THE_SWEEP = {
    "run": "each run has a folder of its own below the sweep's",
    "overwrite": "a sweep goes on with the runs in its folder",
    "seed": "name the seeds of every trial under seeds",
}
"""Fields that neither the base nor the search may have."""
MOST_SEEDS = 10_000
"""Beyond it, a number of seeds is taken for a mistake: a seed, which belongs into a list."""


def read_space(path: str | Path) -> tuple[Space, dict[str, Any]]:
    """Read and check a file.

    Returns:
        The space, and what the folder of a sweep keeps of it, which :func:`parse_space` reads.

    Raises:
        ConfigError: With every problem: unknown keys and fields, with the nearest known ones; values that a field
            cannot have; ranges that are none.
    """
    raw = load_yaml(path)
    space = parse_space(raw, path)
    kept = {key: raw[key] for key in ("base", "search", "objective") if raw.get(key) is not None}
    trials = {} if space.sampler == "grid" else {"trials": space.trials}
    return space, {**kept, "seeds": list(space.seeds), "sampler": space.sampler, **trials}


@working_directory_kept()
def parse_space(raw: Mapping[str, Any], path: str | Path) -> Space:
    """Check the keys and values of a file.

    Raises:
        ConfigError: As :func:`read_space`.
    """
    raw = {key: value for key, value in raw.items() if value is not None}
    problems: list[str] = []
    known = [f.name for f in dataclasses.fields(Space)]
    problems += [f"{path}: unknown key {key}{_hint(key, known)}" for key in raw if key not in known]
    base, search = (_mapping(raw, key, problems) for key in ("base", "search"))
    problems += [f"base.{key}: {why}" for key, why in _OF_THE_SWEEP.items() if key in base]
    try:
        config = from_dict(base)
        check_types(config)
    except ConfigError as error:
        raise ConfigError(*problems, *(f"base: {problem}" for problem in error.problems)) from None
    dimensions = {name: found for name, spec in search.items() if (found := _dimension(name, spec, problems))}
    problems += [
        f"search has {name} and its entry {entry}, and one would undo the other; search one of them"
        for name in search
        for entry in search
        if str(entry).startswith(f"{name}.")
    ]
    space = _space(raw, base, dimensions, problems)
    if not problems and space is not None:
        problems += _value_problems(space)
    if not problems and space is not None and space.prune is not None and space.prune.first >= space.least_steps:
        problems.append(
            f"prune.first is {space.prune.first:,}, and runs have {space.least_steps:,} env steps, so that no trial is "
            "compared; give a smaller one, or prune: false"
        )
    if problems or space is None:
        raise ConfigError(*problems)
    return space


def _space(
    raw: Mapping[str, Any], base: dict[str, Any], search: dict[str, Dimension], problems: list[str]
) -> Space | None:
    """The space, once everything but the fields' values is checked."""
    all_choices = all(dimension.choices for dimension in search.values())
    sampler = raw.get("sampler", "grid" if all_choices and "trials" not in raw else "tpe")
    if sampler not in ("grid", "random", "tpe"):
        problems.append(f"sampler is {shown(sampler)}; it must be grid, random or tpe")
    if sampler == "grid" and not all_choices:
        interval = next(name for name, dimension in search.items() if not dimension.choices)
        problems.append(f"sampler is grid, but {interval} is an interval; list its values, or use random or tpe")
    if sampler == "grid" and "trials" in raw:
        problems.append("sampler is grid, which tries all combinations; leave trials out, or use random or tpe")
    trials = math.prod(len(dimension.choices) for dimension in search.values())
    if sampler != "grid":
        trials = _number(raw, "trials", 1, problems, required=True) or 1
    if sampler != "grid" and not search:
        problems.append("search is empty; name the fields to search, or leave trials out to run the seeds alone")
    seeds = raw.get("seeds", [0])
    seeds = list(range(seeds)) if type(seeds) is int and seeds <= MOST_SEEDS else seeds
    if not _is_list_of_seeds(seeds):
        problems.append(
            f"seeds is {shown(raw['seeds'])}; it must be a list of different integers from 0 to 2**53, or how many"
        )
    objective = _group(Objective, _mapping(raw, "objective", problems), "objective", problems)
    columns, metric = [each.name for each in METRICS], str(objective.metric)
    if metric not in columns and not metric.startswith(OWN_COLUMNS):
        problems.append(
            f"objective.metric is {shown(metric)}, which is no column of metrics.csv{_hint(metric, columns)}"
        )
    evaluated = any((base.get("eval") or {}).get(name) or f"eval.{name}" in search for name in ("every", "at_end"))
    if metric.startswith(EVALUATIONS) and not evaluated:
        problems.append(
            f"objective.metric is {metric}, and nothing is evaluated; give base.eval.every in env steps, or "
            "base.eval.at_end: true for the evaluation at the end alone"
        )
    if objective.over_seeds == "min" and objective.direction == "minimize":
        problems.append(
            "objective.over_seeds is min, which of a metric to minimize is the best seed; write iqm, mean or median"
        )
    prune = _pruning(raw, sampler, problems)
    parallel = _number(raw, "parallel", 1, problems)
    if problems:
        return None
    return Space(base, search, trials, tuple(seeds), sampler, objective, prune, parallel)


def _pruning(raw: Mapping[str, Any], sampler: str, problems: list[str]) -> Pruning | None:
    asked = raw.get("prune", sampler == "tpe")
    if asked is False:
        return None
    if sampler != "tpe":
        problems.append(f"prune needs sampler tpe, which compares trials while they run, not {sampler}; leave it out")
    return _group(Pruning, {} if asked is True else _mapping(raw, "prune", problems), "prune", problems)


def _is_list_of_seeds(seeds: Any) -> bool:
    whole = isinstance(seeds, list) and all(type(seed) is int and 0 <= seed <= LARGEST for seed in seeds)
    return whole and len(seeds) > 0 and len(set(seeds)) == len(seeds)


def _mapping(raw: Mapping[str, Any], key: str, problems: list[str]) -> dict[str, Any]:
    value = raw.get(key, {})
    if isinstance(value, dict):
        return value
    problems.append(f"{key} is {shown(value)}; it must be a mapping")
    return {}


def _number(raw: Mapping[str, Any], key: str, least: int, problems: list[str], required: bool = False) -> int | None:
    value = raw.get(key)
    if value is None and not required:
        return None
    if type(value) is not int or value < least:
        problems.append(f"{key} is {'unset' if value is None else shown(value)}; it must be an integer from {least} on")
        return None
    return value


def _group(kind: type, given: Mapping[str, Any], name: str, problems: list[str]) -> Any:
    """One of the small groups of the file, with its types checked."""
    known = types_of(kind)
    problems += [f"unknown key {name}.{key}{_hint(key, known)}" for key in given if key not in known]
    fitting = {}
    for key, value in given.items():
        if (hint := known.get(key)) is int and (type(value) is not int or value < 0):
            problems.append(f"{name}.{key} is {shown(value)}; it must be an integer from 0 on")
        elif hint is float and not (type(value) in (int, float) and 0 < value <= 1):
            problems.append(
                f"{name}.{key} is {shown(value)}; it must be above 0 and at most 1: the share of a run's env steps, at "
                "its end, over which its value is the mean (not a number of reports)"
            )
        elif options := typing.get_args(hint):
            if value in options:
                fitting[key] = value
            else:
                problems.append(f"{name}.{key} is {shown(value)}; it must be one of {', '.join(options)}")
        elif hint is not None:
            fitting[key] = value
    group = kind(**fitting)
    if isinstance(group, Pruning) and group.factor < 2:
        problems.append(f"prune.factor is {group.factor}; it must be an integer from 2 on")
    return group


def _hint(name: Any, known: Iterable[str]) -> str:
    """The nearest known name: of similar spelling, or the same without its group."""
    known = list(known)
    near = [each for each in known if each.rpartition(".")[2] == name] or difflib.get_close_matches(str(name), known, 1)
    return f"; did you mean {near[0]}?" if near else f"; known: {', '.join(known)}"


def _dimension(name: Any, spec: Any, problems: list[str]) -> Dimension | None:
    """What is said of a searched field, or None and a problem."""
    if name in _OF_THE_SWEEP:
        problems.append(f"search.{name}: {_OF_THE_SWEEP[name]}")
        return None
    hint = _type_of(name)
    if hint is None:
        problems.append(f"search has the unknown field {name}{_hint(name, settings_of(Config))}")
        return None
    choices = spec.get("choice") if isinstance(spec, dict) else spec
    if isinstance(choices, list) and choices and (isinstance(spec, list) or len(spec) == 1):
        meant = [parsed(name, choice) for choice in choices]
        if again := [choice for at, choice in enumerate(meant) if any(alike(choice, other) for other in meant[:at])]:
            problems.append(f"search.{name} has {shown(again[0])} more than once; leave one out")
        return Dimension(name, tuple(choices))
    interval = _interval(name, spec, hint, problems) if isinstance(spec, dict) else None
    if interval is None:
        problems.append(
            f"search.{name} is {shown(spec)}; write a list of choices, {{range: [low, high]}} (with step: if you "
            "like), or {log: [low, high]}"
        )
    return interval


def _type_of(name: Any) -> Any:
    """The annotated type of a field by its dotted name; None if there is none. Entries of a mapping are of any type."""
    kind: Any = Config
    *groups, last = str(name).split(".")
    for group in groups:
        if group not in types_of(kind):
            return None
        kind = types_of(kind)[group]
        if not dataclasses.is_dataclass(kind):
            return Any if typing.get_origin(kind) is dict else None
    found = types_of(kind).get(last)
    return None if dataclasses.is_dataclass(found) else found


def _interval(name: str, spec: Mapping[str, Any], hint: Any, problems: list[str]) -> Dimension | None:
    """An interval of a numeric field; None if it is said in another way."""
    kinds = (hint, *typing.get_args(hint))
    log = "log" in spec
    ends = spec.get("log" if log else "range")
    others = set(spec) - ({"log"} if log else {"range", "step"})
    if others or not (isinstance(ends, list) and len(ends) == 2):
        return None
    try:  # YAML reads 1e-3, without a point, as a string
        low, high, step = (None if each is None else float(each) for each in (*ends, spec.get("step")))
    except (TypeError, ValueError):
        return None
    if low is None or high is None or not (math.isfinite(low) and math.isfinite(high)):
        return None
    if hint is not Any and not {int, float} & set(kinds):
        problems.append(f"search.{name}: {name} is no number, so it has no range; write a list of choices")
    elif low >= high or (log and low <= 0) or (step is not None and step <= 0):
        problems.append(
            f"search.{name} is {shown(dict(spec))}; the first end must be below the second one"
            f"{', and above 0' if log else ', and step above 0'}"
        )
    elif step is not None and step > high - low:
        problems.append(f"search.{name} has step {step:g}, which is wider than its range; give a smaller one")
    if hint is Any:  # as written: [0.0, 1.0] are numbers, [0, 1] integers
        whole = all(type(each) is int for each in (*ends, spec.get("step", 1)))
    else:
        whole = float not in kinds and all(each is None or each.is_integer() for each in (low, high, step))
    if int in kinds and not whole:
        problems.append(f"search.{name}: {name} is an integer; give integers as its ends")
    number = int if whole else float
    return Dimension(name, (), number(low), number(high), log, None if step is None else number(step), whole)


def _value_problems(space: Space) -> list[str]:
    """Choices and ends of intervals that their fields cannot have."""
    problems = []
    first = {name: dimension.ends[0] for name, dimension in space.search.items()}
    declared = settings_of(Config)
    for name, dimension in space.search.items():
        for value in dimension.ends:
            try:
                config = from_dict(space.values({**first, name: value}))
                check_types(config)
                if name in ("env", "preset", "algo"):
                    resolve(config)
            except ConfigError as error:
                problems += [f"search.{name}: {problem}" for problem in error.problems]
                continue
            if name not in declared or (limits := declared[name].limits) is None:
                continue
            found = operator.attrgetter(name)(config)
            if not all(
                entry is None or limits.allow(entry) for entry in (found if isinstance(found, tuple) else [found])
            ):
                problems.append(f"search.{name} reaches {shown(found)}; it must be {limits}")
    return list(dict.fromkeys(problems))
