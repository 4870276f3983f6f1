"""Plays with an environment, and says what is wrong with it. Runs in a process of its own, which an environment may
block, print into, or end."""

from __future__ import annotations

import dataclasses
import io
import os
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import gymnasium
import numpy as np
from gymnasium.utils.env_checker import check_env

from sfactory.commands.checks.determinism import determinism
from sfactory.commands.checks.findings import Finding, Stage, Unmakeable
from sfactory.commands.checks.random_play import random_play
from sfactory.commands.checks.subjects import Subject, make_subject
from sfactory.envs import probe, resolve_env
from sfactory.envs.factory import make_environment
from sfactory.envs.families.shared import KINDS
from sfactory.envs.faults import close_quietly
from sfactory.envs.interface import EnvRequest, EnvSpec
from sfactory.envs.registry import find_spec
from sfactory.errors import ConfigError, EnvironmentFault, said
from sfactory.runtime.processes import EventSender
from sfactory.runtime.worker_process import settle_process

LONG_CONSTRUCTION_S = 5.0
FAR = 2.0
"""Distance of the only bound of an action from 0 beyond which hardly any sample of an untrained policy, of mean 0 and
deviation 1, is within it."""
DEMANDS = ("should return the exact same space object", "agent cannot be revived once dead")
"""What PettingZoo's checker demands, and training does without."""
Tell = Callable[[Any], None]


def process_main(name: str, events: EventSender, folder: str, pickled: bytes, seconds: float) -> None:
    """The process that checks. Where :mod:`sfactory.commands.check` is ``__main__``, it could find nothing of that."""
    settle_process(name, folder)
    output = Path(folder) / "output"
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for standard in (1, 2):
        os.dup2(descriptor, standard)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)
    inspect_environment(cloudpickle.loads(pickled), seconds, output, events.put)
    events.put(None)


def inspect_environment(request: EnvRequest, seconds: float, output: Path, tell: Tell) -> None:
    """Make an environment and check it.

    Args:
        request: The environment.
        seconds: Seconds for the longest check, which plays random actions.
        output: The file that holds what the environment prints.
        tell: Takes each :class:`Stage`, :class:`Finding`, and the :class:`Facts`.
    """
    tell(Stage("construction"))
    begin = time.perf_counter()
    try:
        request = dataclasses.replace(request, env=resolve_env(request.env))
        spec = _probed(request)
        request = _plain(request, spec)
        made_s = time.perf_counter() - begin
        subject = make_subject(request, spec)
    except ConfigError as error:
        tell(Finding("construction", "problem", str(error)) if _can_be_made(request) else Unmakeable(str(error)))
        return
    except EnvironmentFault as fault:
        tell(Finding("construction", "problem", str(fault)))
        return
    slow = made_s > LONG_CONSTRUCTION_S
    tell(
        Finding(
            "construction",
            "note" if slow else "ok",
            f"made and reset in {made_s:.2g} s" + ("; every rollout worker makes all of its environments" * slow),
        )
    )
    for name, check in (
        ("Gymnasium's checker", lambda: _others_checker(request, subject)),
        ("determinism", lambda: determinism(request, spec)),
        ("pickling", lambda: _pickling(request)),
        ("actions", lambda: _far_actions(spec)),
        ("random actions", lambda: random_play(subject, seconds, output, tell)),
    ):
        tell(Stage(name))
        try:
            for finding in check():
                tell(finding)
        except BaseException as error:
            tell(Finding(name, "problem", _described(error)))
    close_quietly(subject)


def _can_be_made(request: EnvRequest) -> bool:
    """Whether an environment that cannot be trained on is there at all."""
    try:
        close_quietly(make_environment(request, 1))
    except ConfigError:
        return False
    return True


def _probed(request: EnvRequest) -> EnvSpec:
    """The spec that training reads. What the environment itself does wrong is a finding, not a failure to make it."""
    try:
        return probe(request)
    except ConfigError as error:
        if isinstance(error.__cause__, EnvironmentFault):
            raise EnvironmentFault(str(error)) from error
        raise


def _plain(request: EnvRequest, spec: EnvSpec) -> EnvRequest:
    """The request for an environment as its own package has it, where sfactory steps the same one in a way of its
    own."""
    shares = spec.family in {kind.family for kind in KINDS}
    return dataclasses.replace(request, backend="gymnasium") if shares else request


def _described(error: BaseException) -> str:
    """An exception, and the place in the environment's code where it came from."""
    if isinstance(error, EnvironmentFault | ConfigError):
        return str(error)
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    return f"raised {type(error).__name__}: {said(error)}{where}"


# The checkers of the environments' own packages


def _others_checker(request: EnvRequest, subject: Subject) -> Iterator[Finding]:
    name = "PettingZoo's checker" if subject.kind == "parallel" else "Gymnasium's checker"
    if subject.spec.masked:
        yield Finding(name, "ok", "plays masked actions, too; this environment is checked by ours alone")
        return
    env = _one_more(request, subject)
    if env is None:
        yield Finding(name, "ok", "is for single environments of a package's own; this one is checked by ours alone")
        return
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            if subject.kind == "parallel":
                from pettingzoo.test import parallel_api_test

                parallel_api_test(_with_newcomers_told(env), num_cycles=20)
            else:
                check_env(_with_python_bools(env.unwrapped), skip_render_check=True)
        except AssertionError as error:
            message = said(error) or _described(error)
            yield Finding(name, "note" if any(each in message for each in DEMANDS) else "problem", message)
            return
        except BaseException as error:
            yield Finding(name, "problem", _described(error))
            return
        finally:
            close_quietly(env)
    said_once = dict.fromkeys(_without_colour(str(warning.message)) for warning in caught if _matters(warning))
    if not said_once:
        yield Finding(name, "ok", "has nothing to say")
    for message in said_once:
        yield Finding(name, "note", message)


def _with_python_bools(env: gymnasium.Env) -> gymnasium.Env:
    """The same environment, whose ends of episodes are not NumPy's: Gymnasium's checker looks for ``False`` itself."""
    step = env.step

    def step_with_bools(action: Any) -> Any:
        result = step(action)
        if not isinstance(result, tuple) or len(result) != 5:
            return result
        ends = (bool(end) if isinstance(end, np.bool_) else end for end in result[2:4])
        return (*result[:2], *ends, result[4])

    env.step = step_with_bools  # type: ignore[method-assign]
    return env


def _with_newcomers_told(env: Any) -> Any:
    """The same environment, which says of agents that did not act yet that they have not ended: PettingZoo's checker
    looks that up."""
    step = env.step

    def step_with_newcomers(actions: Any) -> Any:
        result = step(actions)
        if not isinstance(result, tuple) or len(result) != 5 or not all(isinstance(part, dict) for part in result):
            return result
        newcomers = [agent for agent in env.agents if agent not in actions]
        nothing: tuple[Any, ...] = (0.0, False, False, {})
        told = (dict.fromkeys(newcomers, value) | part for value, part in zip(nothing, result[1:], strict=True))
        return (result[0], *told)

    env.step = step_with_newcomers
    return env


def _one_more(request: EnvRequest, subject: Subject) -> Any:
    """One more environment if it is a single or parallel one, or if an id has a single one, too; else None."""
    if subject.kind in ("single", "parallel"):
        return make_environment(request, 1)
    if subject.kind == "vector" and isinstance(request.env, str) and find_spec(request.env).entry_point is not None:
        return make_environment(dataclasses.replace(request, backend="gymnasium"), 1)
    return None


def _matters(warning: warnings.WarningMessage) -> bool:
    """Whether a warning is about the environment and matters to training."""
    text = str(warning.message)
    if issubclass(warning.category, DeprecationWarning | ResourceWarning):
        return False
    return not any(
        part in text for part in ("probably too low", "probably too high", "render_mode", "alternative render")
    )


def _without_colour(text: str) -> str:
    """A message without the escapes and the beginning that Gymnasium's logger gives it."""
    for escape in ("\x1b[33m", "\x1b[31m", "\x1b[0m"):
        text = text.replace(escape, "")
    return text.removeprefix("WARN: ")


# What the policy can do


def _far_actions(spec: EnvSpec) -> Iterator[Finding]:
    """Boxes with one bound, from which samples of the policy are too far: all are clipped to it."""
    for part in spec.action.parts:
        if not isinstance(part.space, gymnasium.spaces.Box):
            continue
        low, high, bounded = part.scale.low, part.scale.high, part.scale.bounded
        far = ~bounded & ((low > FAR) | (high < -FAR))
        if far.any():
            bound = float(np.where(low > FAR, low, high)[far][0])
            yield Finding(
                "actions",
                "problem",
                f"the space {part.space} has one bound alone, {bound:g}, to which samples are clipped; a policy begins "
                "with a mean of 0 and a deviation of 1, so that nearly all of its actions would be that bound; declare "
                "both bounds, or shift the actions in a wrapper",
            )


# What worker processes get


def _pickling(request: EnvRequest) -> Iterator[Finding]:
    """Worker processes get what makes the environments, pickled by value where it is no import."""
    try:
        cloudpickle.loads(cloudpickle.dumps((request.env, request.kwargs)))
    except BaseException as error:
        yield Finding(
            "pickling",
            "problem",
            f"what makes the environment cannot be sent to worker processes ({type(error).__name__}: {said(error)}); "
            "let it hold no lock, file, generator or connection, and make these in the environment's constructor",
        )
        return
    yield Finding("pickling", "ok", "what makes the environment reaches worker processes")
