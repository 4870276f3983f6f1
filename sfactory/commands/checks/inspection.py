"""Plays with an environment, and says what is wrong with it. Runs in a process of its own, which an environment may
block, print into, or end."""

from __future__ import annotations

import dataclasses
import os
import random
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import cloudpickle
import gymnasium
import numpy as np
import psutil
from gymnasium import spaces
from gymnasium.utils.env_checker import check_env

from sfactory.commands.checks.findings import Facts, Finding, Spread, Stage, Unmakeable
from sfactory.commands.checks.subjects import Step, Subject, VectorSubject, make_subject
from sfactory.envs import probe, resolve_env
from sfactory.envs.factory import ENV_ERRORS, close_quietly, find_spec, make_environment
from sfactory.envs.interface import EnvRequest, EnvSpec
from sfactory.errors import ConfigError, EnvironmentFault, said, shown

WALK_STEPS = 10_000
"""Steps over which memory, rewards and durations are observed, if there is time for so many."""
LOOKED_AT = 1_000
"""Steps whose observations are all looked at; later, one in ten is."""
COMPARED = 300
"""Steps of the trajectories that must be alike."""
FEWEST = 2
"""Steps of them that are compared however long they take."""
LEAK_MIB = 4.0
"""Growth of memory over half of the steps that counts as a leak."""
SHORT_S = 2.0
"""Seconds for each of the smaller checks."""
LONG_CONSTRUCTION_S = 5.0
Tell = Callable[[Any], None]


def inspect_environment(request: EnvRequest, seconds: float, output: Path, tell: Tell) -> None:
    """Make an environment and check it.

    Args:
        request: The environment.
        seconds: Seconds for the longest check, which plays :data:`WALK_STEPS` steps.
        output: The file that holds what the environment prints.
        tell: Takes each :class:`Stage`, :class:`Finding`, and the :class:`Facts`.
    """
    tell(Stage("construction"))
    begin = time.perf_counter()
    try:
        request = dataclasses.replace(request, env=resolve_env(request.env))
        spec = _probed(request)
        request = _plain(request, spec)
        made_s = (time.perf_counter() - begin) / 2
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
        ("determinism", lambda: _determinism(request, spec)),
        ("pickling", lambda: _pickling(request)),
        ("random actions", lambda: _walk(subject, seconds, output, tell)),
    ):
        tell(Stage(name))
        try:
            for finding in check():
                tell(finding)
        except ENV_ERRORS as error:
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
    """The request for an environment as its own package has it, where sfactory steps it in a way of its own."""
    own = spec.family in ("atari", "mujoco", "vizdoom", "envpool")
    return dataclasses.replace(request, backend="gymnasium") if own and request.backend == "auto" else request


def _described(error: BaseException) -> str:
    """An exception, and the place in the environment's code where it came from."""
    if isinstance(error, EnvironmentFault | ConfigError):
        return str(error)
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    return f"raised {type(error).__name__}: {said(error)}{where}"


# The checkers of the environments' own packages


def _others_checker(request: EnvRequest, subject: Subject) -> Iterator[Finding]:
    env = _single_of(request, subject)
    if env is None and subject.kind != "parallel":
        yield Finding("Gymnasium's checker", "ok", "is for single environments; this one is checked by ours alone")
        return
    name = "PettingZoo's checker" if subject.kind == "parallel" else "Gymnasium's checker"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            if env is None:
                from pettingzoo.test import parallel_api_test

                parallel_api_test(make_environment(request, 1), num_cycles=20)
            else:
                check_env(env.unwrapped, skip_render_check=True)
        except AssertionError as error:
            yield Finding(name, "problem", said(error) or _described(error))
            return
        except ENV_ERRORS as error:
            yield Finding(name, "problem", _described(error))
            return
    said_once = dict.fromkeys(_without_colour(str(warning.message)) for warning in caught if _matters(warning))
    if not said_once:
        yield Finding(name, "ok", "has nothing to say")
    for message in said_once:
        yield Finding(name, "note", message)


def _single_of(request: EnvRequest, subject: Subject) -> gymnasium.Env | None:
    """One more environment if it is a single one, or if an id has a single one, too."""
    if subject.kind == "single":
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


# Determinism


def _determinism(request: EnvRequest, spec: EnvSpec) -> Iterator[Finding]:
    """Compare trajectories of two environments with the same seed, of one that is seeded again, and of other seeds."""
    first, second = (make_subject(request, spec) for _ in range(2))
    try:
        one, other = _trajectory(first, 1), _trajectory(second, 1)
        if (step := _difference(one, other)) is not None:
            yield _indeterminate(first, second, f"two environments with the same seed differ at step {step}")
        elif (step := _difference(one, _trajectory(first, 1))) is not None:
            message = f"an environment that is reset with the same seed differs from its first time at step {step}"
            yield _indeterminate(first, second, f"{message}; reset(seed=...) must reset everything")
        elif _difference(one, _trajectory(first, 2)) is None:
            yield Finding(
                "determinism",
                "note",
                "the seed makes no difference: all environments of a run play the same episodes up to the actions; "
                "draw what varies from self.np_random",
            )
        else:
            yield Finding("determinism", "ok", f"the same seed gives the same {len(one) - 1} steps, another one others")
    finally:
        close_quietly(first)
        close_quietly(second)


def _indeterminate(first: Subject, second: Subject, message: str) -> Finding:
    """The finding, with the cause if it is the global generators."""
    alike = []
    for subject in (first, second):
        random.seed(0)
        np.random.seed(0)
        alike.append(_trajectory(subject, 1))
    cause = "call super().reset(seed=seed) and draw from self.np_random"
    if _difference(*alike) is None:
        cause = f"it draws from the global generators of random or numpy; {cause}"
    return Finding("determinism", "problem", f"{message}; {cause}")


def _trajectory(subject: Subject, seed: int) -> list[bytes]:
    """What an environment shows under the same actions, step by step."""
    rng, deadline = np.random.default_rng(0), time.monotonic() + SHORT_S
    shown_so_far = [_bytes(subject.begin(seed))]
    while len(shown_so_far) <= COMPARED and (time.monotonic() < deadline or len(shown_so_far) <= FEWEST):
        step = subject.act(rng)
        shown_so_far.append(_bytes(step.observation) + step.rewards.tobytes() + step.ended.tobytes())
    return shown_so_far


def _difference(one: list[bytes], other: list[bytes]) -> int | None:
    """The first step at which two trajectories differ, as far as both go."""
    return next((t for t, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), None)


def _bytes(value: Any) -> bytes:
    if isinstance(value, Mapping):
        return b"".join(str(key).encode() + _bytes(value[key]) for key in sorted(value, key=str))
    if isinstance(value, tuple | list):
        return b"".join(map(_bytes, value))
    return np.asarray(value).tobytes() if not isinstance(value, str) else value.encode()


# Pickling


def _pickling(request: EnvRequest) -> Iterator[Finding]:
    """Worker processes get what makes the environments, pickled by value where it is no import."""
    try:
        cloudpickle.loads(cloudpickle.dumps((request.env, request.kwargs)))
    except ENV_ERRORS as error:
        yield Finding(
            "pickling",
            "problem",
            f"what makes the environment cannot be sent to worker processes ({type(error).__name__}: {said(error)}); "
            "let it hold no lock, file, generator or connection, and make these in the environment's constructor",
        )
        return
    yield Finding("pickling", "ok", "what makes the environment reaches worker processes")


# Many steps with random actions


class _Tally:
    """What is counted while random actions are played."""

    def __init__(self, rows: int) -> None:
        self.rewards: list[np.ndarray] = []
        self.returns: list[float] = []
        self.lengths: list[int] = []
        self.misfits: Counter[str] = Counter()
        self.not_finite = 0
        self.largest = 0.0
        self._return, self._length = np.zeros(rows), np.zeros(rows, int)

    def add(self, step: Step) -> None:
        rewards = step.rewards[step.acted]
        self.not_finite += not np.isfinite(rewards).all()
        self.rewards.append(rewards)
        self._return[step.acted] += rewards
        self._length += step.acted
        for row in np.flatnonzero(step.ended):
            self.returns.append(float(self._return[row]))
            self.lengths.append(int(self._length[row]))
            self._return[row], self._length[row] = 0, 0

    def look_at(self, subject: Subject, observation: Any) -> None:
        for name, space, value in subject.spaces(observation):
            self.misfits.update(misfits(name, space, value))
        for array in _float_leaves(observation):
            if array.size and np.isfinite(array).all():
                self.largest = max(self.largest, float(np.abs(array).max()))


def _walk(subject: Subject, seconds: float, output: Path, tell: Tell) -> Iterator[Finding]:
    """Play random actions; gives findings about what came out, and tells the facts."""
    rng, tally, process = np.random.default_rng(0), _Tally(subject.rows), psutil.Process()
    subject.step_s.clear()
    subject.reset_s.clear()
    subject.cpu_s, calls, waits = 0.0, 0, process.num_ctx_switches().voluntary
    resident: list[float] = []
    printed = os.path.getsize(output)
    tally.look_at(subject, subject.begin(0))
    autoreset = _Autoreset(subject) if isinstance(subject, VectorSubject) else None
    deadline = time.monotonic() + seconds
    while calls < WALK_STEPS and time.monotonic() < deadline:
        step = subject.act(rng)
        tally.add(step if autoreset is None else autoreset.without_rests(step))
        if calls < LOOKED_AT or calls % 10 == 0:
            tally.look_at(subject, step.observation)
        if autoreset is not None:
            autoreset.look_at(step)
        calls += 1
        if calls % 100 == 0:
            resident.append(process.memory_info().rss / 2**20)
    growth = _steady_growth(resident[len(resident) // 2 :])
    waits = process.num_ctx_switches().voluntary - waits
    facts = _facts(subject, tally, growth, waits / calls)
    tell(facts)
    yield from _spaces_findings(tally)
    yield from _episode_findings(subject, tally, facts)
    if autoreset is not None:
        yield autoreset.finding()
    yield _memory_finding(growth, calls)
    yield from _reward_findings(tally, facts)
    if (more := os.path.getsize(output) - printed) > 0:
        lines = output.read_bytes()[printed:].count(b"\n") or 1
        first = output.read_bytes()[printed:].decode(errors="replace").strip().partition("\n")[0]
        yield Finding(
            "output",
            "problem" if lines > calls / 100 else "note",
            f"it printed {lines} lines ({more} bytes) in {calls} steps, the first: {shown(first, 60)}; every worker "
            "would, which is slow and covers the display; remove the print, or use logging",
        )


def _facts(subject: Subject, tally: _Tally, growth: float, waits: float) -> Facts:
    rewards = np.concatenate(tally.rewards) if tally.rewards else np.zeros(1)
    rewards = rewards[np.isfinite(rewards)] if np.isfinite(rewards).any() else np.zeros(1)
    values, counts = np.unique(rewards, return_counts=True)
    returns = np.array(tally.returns or [0.0])
    elapsed = sum(subject.step_s)
    return Facts(
        kind=subject.kind,
        rows=subject.rows,
        agents=subject.spec.agents,
        steps=len(rewards),
        step=Spread.of(subject.step_s),
        reset=Spread.of(subject.reset_s),
        cpu_share=min(1.0, subject.cpu_s / elapsed) if elapsed and waits > 0.5 else 1.0,
        episodes=len(tally.returns),
        episode_length=float(np.mean(tally.lengths)) if tally.lengths else 0.0,
        episode_return=float(returns.mean()),
        episode_return_std=float(returns.std()),
        reward_mean=float(rewards.mean()),
        reward_std=float(rewards.std()),
        reward_min=float(values[0]),
        reward_max=float(values[-1]),
        reward_usual=float(values[counts.argmax()]),
        reward_share=1 - float(counts.max() / counts.sum()),
        observation_max=tally.largest,
        growth_mib=growth,
    )


def misfits(name: str, space: spaces.Space, value: Any) -> Iterator[str]:
    """In which ways a value is not in its space."""
    match space:
        case spaces.Dict():
            if not isinstance(value, Mapping) or value.keys() != space.spaces.keys():
                yield (
                    f"{name} has the keys {shown(list(value) if isinstance(value, Mapping) else value, 80)}; its "
                    f"space has {list(space.spaces)}"
                )
                return
            for key, part in space.spaces.items():
                yield from misfits(f"{name}[{key!r}]", part, value[key])
        case spaces.Tuple():
            if not isinstance(value, tuple) or len(value) != len(space.spaces):
                yield f"{name} is {shown(value, 80)}; its space is a tuple of {len(space.spaces)}"
                return
            for index, part in enumerate(space.spaces):
                yield from misfits(f"{name}[{index}]", part, value[index])
        case spaces.Box():
            yield from _box_misfits(name, space, value)
        case _ if not space.contains(value):
            yield f"{name} is not in its space {space}"


def _box_misfits(name: str, space: spaces.Box, value: Any) -> Iterator[str]:
    array = np.asarray(value)
    if array.shape != space.shape:
        yield f"{name} has shape {array.shape}; its space has {space.shape}"
        return
    if not isinstance(value, np.ndarray):
        yield f"{name} is a {type(value).__name__}; its space promises an array of {space.dtype}"
    elif array.dtype != space.dtype:
        yield f"{name} has dtype {array.dtype}; its space has {space.dtype}"
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        yield f"{name} has entries that are not finite (NaN or infinity)"
    elif array.dtype.kind in "fiub" and ((array < space.low) | (array > space.high)).any():
        yield f"{name} leaves the bounds of its space"


def _spaces_findings(tally: _Tally) -> Iterator[Finding]:
    for message, count in tally.misfits.most_common(5):
        yield Finding("spaces", "problem", f"{message} (in {count} of the observations)")
    if not tally.misfits:
        yield Finding("spaces", "ok", "observations are what the spaces promise")


def _episode_findings(subject: Subject, tally: _Tally, facts: Facts) -> Iterator[Finding]:
    lengths = tally.lengths
    if not lengths:
        yield Finding(
            "episodes",
            "note",
            f"no episode ended within {facts.steps} env steps of random actions; where the task does not end by "
            "itself, wrap it in gymnasium.wrappers.TimeLimit, which truncates",
        )
    elif subject.kind == "single" and len(lengths) > 2 and lengths[0] > 1 and set(lengths[1:]) == {1}:
        yield Finding(
            "episodes",
            "problem",
            f"the first episode took {lengths[0]} steps, and all others end at their first step: reset() does not "
            "begin a new episode; reset every attribute that tells the end",
        )
    else:
        yield Finding("episodes", "ok", f"{facts.episodes} episodes, {facts.episode_length:.4g} env steps in the mean")


class _Autoreset:
    """Whether a vector environment resets its environments as its metadata says."""

    def __init__(self, subject: VectorSubject) -> None:
        self._subject = subject
        self._ended = np.zeros(subject.rows, bool)
        self._looked_at = 0
        self._problem = ""

    def without_rests(self, step: Step) -> Step:
        """A step in which rows that were only reset did not act."""
        if self._subject.mode != "NEXT_STEP":
            return step
        return step._replace(acted=~self._ended)

    def look_at(self, step: Step) -> None:
        """Look at one step, knowing which rows ended in the one before."""
        mode, info = self._subject.mode, self._subject.info
        if mode == "NEXT_STEP" and (at := self._ended & ((step.rewards != 0) | step.ended)).any():
            self._problem = (
                f"says NEXT_STEP, but row {np.flatnonzero(at)[0]} got reward {step.rewards[at][0]:g}"
                f"{' and ended again' if step.ended[at][0] else ''} in the step after its end, which must only reset it"
            )
        has_finals = isinstance(info, Mapping) and ("final_obs" in info or "final_observation" in info)
        if mode == "SAME_STEP" and step.ended.any() and not has_finals:
            self._problem = (
                "says SAME_STEP, but info has no final_obs when a row ends; its value is bootstrapped from it"
            )
        self._looked_at += int(np.count_nonzero(self._ended))
        self._ended = step.ended

    def finding(self) -> Finding:
        mode = self._subject.mode
        if self._problem:
            return Finding(
                "autoreset", "problem", f"metadata['autoreset_mode'] {self._problem}; correct one of the two"
            )
        return Finding("autoreset", "ok", f"{mode}, looked at after {self._looked_at} ends")


def _steady_growth(resident: list[float]) -> float:
    """MiB by which memory grows along the line that fits its readings, 0 if most of it is one jump."""
    if len(resident) < 4:
        return 0.0
    rises = np.diff(resident)
    slope = np.polyfit(np.arange(len(resident)), resident, 1)[0] * len(resident)
    steady = np.count_nonzero(rises > 0) >= 0.2 * len(rises) or rises.max(initial=0) < 0.5 * max(slope, 1e-9)
    return float(slope) if steady else 0.0


def _memory_finding(growth: float, calls: int) -> Finding:
    if growth > LEAK_MIB:
        per_million = growth / (calls / 2) * 1e6 / 1024
        return Finding(
            "memory",
            "problem",
            f"memory grew steadily by {growth:.1f} MiB in {calls // 2} steps, which is {per_million:.1f} GiB for each "
            "million steps of one environment; look for a list or cache that reset() does not empty",
        )
    return Finding("memory", "ok", f"grew by {max(0.0, growth):.1f} MiB over the second half of {calls} steps")


def _reward_findings(tally: _Tally, facts: Facts) -> Iterator[Finding]:
    if tally.not_finite:
        yield Finding(
            "rewards",
            "problem",
            f"rewards were not finite (NaN or infinity) in {tally.not_finite} steps, which training cannot use",
        )
    elif facts.sparse:
        rare = f"only {facts.reward_share:.2%} of them were another" if facts.reward_share else "none was another"
        yield Finding(
            "rewards",
            "note",
            f"sparse: the reward was {facts.reward_usual:g} in {facts.steps} env steps of random actions, and {rare}, "
            "so that they show the policy hardly anything; consider a denser reward, or easier tasks first",
        )
    else:
        yield Finding(
            "rewards",
            "ok",
            f"mean {facts.reward_mean:.3g}, deviation {facts.reward_std:.3g}, from {facts.reward_min:.3g} to "
            f"{facts.reward_max:.3g}; return {facts.episode_return:.4g} +- {facts.episode_return_std:.3g} with random "
            "actions",
        )


def _float_leaves(value: Any) -> Iterator[np.ndarray]:
    if isinstance(value, Mapping):
        for part in value.values():
            yield from _float_leaves(part)
    elif isinstance(value, tuple | list):
        for part in value:
            yield from _float_leaves(part)
    elif isinstance(value, np.ndarray) and value.dtype.kind == "f":
        yield value
