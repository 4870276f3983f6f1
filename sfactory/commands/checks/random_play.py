"""Many steps with random actions: what comes out of an environment, how long it takes, and whether memory grows."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from sfactory.commands.checks.autoreset import AutoresetCheck
from sfactory.commands.checks.findings import Facts, Finding, Spread
from sfactory.commands.checks.spaces import misfits
from sfactory.commands.checks.subjects import Step, Subject, VectorSubject
from sfactory.errors import shown
from sfactory.runtime.step_time import programs_s
from sfactory.telemetry.stopwatch import processor_wait_s

WALK_STEPS = 10_000
"""Steps over which memory, rewards and durations are observed, if there is time for so many."""
LOOKED_AT = 1_000
"""Steps whose observations are all looked at; later, one in ten is."""
READ_EVERY = 100
"""Steps between two readings of memory."""
LEAST_READINGS = 4
"""Fewest readings in the second half of the steps by which memory is judged."""
WAITS = 0.5
"""Times a step that it gives the processor away from which it waits by itself."""
LEAST_SHARE = 1e-3
"""Of its time that a process is taken to have the processor."""
LEAK_MIB = 4.0
"""Growth of memory over half of the steps that counts as a leak."""


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


def random_play(subject: Subject, seconds: float, output: Path, tell: Callable[[Facts], None]) -> Iterator[Finding]:
    """Play random actions; gives findings about what came out, and tells the facts."""
    rng, tally, process = np.random.default_rng(0), _Tally(subject.rows), psutil.Process()
    subject.step_s.clear()
    subject.reset_s.clear()
    subject.cpu_s, calls, waits = 0.0, 0, process.num_ctx_switches().voluntary
    begun, waited_s, programs = time.monotonic(), processor_wait_s(), programs_s(process.pid)
    resident: list[float] = []
    printed = os.path.getsize(output)
    tally.look_at(subject, subject.begin(0))
    autoreset = AutoresetCheck(subject) if isinstance(subject, VectorSubject) else None
    deadline = time.monotonic() + seconds
    while calls < WALK_STEPS and time.monotonic() < deadline:
        step = subject.act(rng)
        tally.add(step if autoreset is None else autoreset.without_rests(step))
        if calls < LOOKED_AT or calls % 10 == 0:
            tally.look_at(subject, step.observation)
        if autoreset is not None:
            autoreset.look_at(step)
        calls += 1
        if calls % READ_EVERY == 0:
            resident.append(process.memory_info().rss / 2**20)
    waits = process.num_ctx_switches().voluntary - waits
    subject.cpu_s += programs_s(process.pid) - programs  # steps that are computed elsewhere on this machine do not wait
    others = (processor_wait_s() - waited_s) / (time.monotonic() - begun)
    facts = _facts(subject, tally, waits / calls, max(1 - others, LEAST_SHARE))
    tell(facts)
    yield from _spaces_findings(tally)
    yield from _episode_findings(subject, tally, facts)
    if autoreset is not None:
        yield autoreset.finding()
    yield _memory_finding(resident[len(resident) // 2 :], calls)
    yield from _reward_findings(tally, facts)
    if (more := os.path.getsize(output) - printed) > 0:
        lines = output.read_bytes()[printed:].count(b"\n") or 1
        first = output.read_bytes()[printed:].decode(errors="replace").strip().partition("\n")[0]
        yield Finding(
            "output",
            "problem" if lines > calls / 100 else "note",
            f"it printed {lines} lines ({more} bytes) in {calls} steps, the first: {shown(first, 60)}; every worker "
            "would, which is slow; remove the print, or look for its lines in a run's output.log",
        )


def _facts(subject: Subject, tally: _Tally, waits: float, running_share: float) -> Facts:
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
        cpu_share=min(1.0, subject.cpu_s / (elapsed * running_share)) if elapsed and waits > WAITS else 1.0,
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
        running_share=running_share,
    )


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


def _steady_growth(resident: list[float]) -> float:
    """MiB by which memory grows along the line that fits its readings, 0 if most of it is one jump."""
    rises = np.diff(resident)
    slope = np.polyfit(np.arange(len(resident)), resident, 1)[0] * len(resident)
    steady = np.count_nonzero(rises > 0) >= 0.2 * len(rises) or rises.max(initial=0) < 0.5 * max(slope, 1e-9)
    return float(slope) if steady else 0.0


def _memory_finding(resident: list[float], calls: int) -> Finding:
    if len(resident) < LEAST_READINGS:
        needed = 2 * LEAST_READINGS * READ_EVERY
        return Finding(
            "memory",
            "note",
            f"not judged: there was time for {calls} steps of {needed}; --seconds gives it more",
        )
    growth = _steady_growth(resident)
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
