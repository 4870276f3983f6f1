"""Whether an environment plays the same under the same seed, and something else under another one."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from sfactory.commands.checks.findings import Finding
from sfactory.commands.checks.subjects import Subject, make_subject
from sfactory.envs.faults import close_quietly
from sfactory.envs.interface import EnvRequest, EnvSpec

COMPARED = 300
"""Steps of the trajectories that must be alike."""
FEWEST = 2
"""Steps of them that are compared however long they take."""
SHORT_S = 2.0
"""Seconds for each trajectory, unless even the fewest steps take longer."""


def determinism(request: EnvRequest, spec: EnvSpec) -> Iterator[Finding]:
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
