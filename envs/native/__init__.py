"""Environments written for sfactory: one compiled kernel steps a whole group and writes its results in place.

``sfactory/CartPole`` and ``sfactory/Pendulum`` are Gymnasium's CartPole-v1 and Pendulum-v1; ``sfactory/MemoryGrid``
cannot be solved without memory. Every environment has its own random stream, so results do not depend on how
environments are grouped.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from sfactory.envs.interface import EnvRequest, EnvSpec
from sfactory.envs.registry import ON_DEVICE
from sfactory.envs.seeds import env_seed
from sfactory.errors import ConfigError
from sfactory.files import forget_stale_kernels
from sfactory.spaces import ActionSpec, ObservationSpec

if TYPE_CHECKING:
    from sfactory.envs.native.base import NativeGroup

forget_stale_kernels(Path(__file__).parent)
_PREFIX = "sfactory/"
_MODULES = {"CartPole": "cartpole", "Pendulum": "pendulum", "MemoryGrid": "memory_grid"}
"""Modules that hold a group class of the same name as the id; imported when asked for, because they bring numba with
them."""


def handles(request: EnvRequest) -> bool:
    """Every id that begins with ``sfactory/``."""
    return isinstance(request.env, str) and request.env.startswith(_PREFIX)


def probe(request: EnvRequest) -> EnvSpec:
    """The spaces of a native environment.

    Raises:
        ConfigError: If there is no environment of that name, or it does not take its ``env_kwargs`` or the backend.
    """
    group = _make(request, [0])
    observation = ObservationSpec.from_space(group.observation_space, request.reading)
    action = ActionSpec.from_space(group.action_space, request.squash)
    return EnvSpec(observation, action, family="native", render_fps=group.render_fps)


def make_group(request: EnvRequest, spec: EnvSpec, count: int, first_index: int, seed: int) -> NativeGroup:
    """A group of `count` native environments. Raises as `probe` does."""
    return _make(request, [env_seed(seed, first_index + row) for row in range(count)])


def _make(request: EnvRequest, seeds: Sequence[int]) -> NativeGroup:
    name = request.env.removeprefix(_PREFIX)
    if name not in _MODULES:
        known = [*(_PREFIX + each for each in _MODULES), *ON_DEVICE]
        near = difflib.get_close_matches(request.env, known, 1)
        hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(known)}"
        raise ConfigError(f"no native environment is called {request.env!r}; {hint}")
    if request.backend not in ("auto", "vector"):
        raise ConfigError(
            f"env_backend is {request.backend}, but {request.env} has only its own vector environment; use env_backend "
            "auto"
        )
    group_type = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    takes = [key for key in inspect.signature(group_type).parameters if key not in ("seeds", "squash")]
    if unknown := [key for key in request.kwargs if key not in takes]:
        raise ConfigError(f"env_kwargs {unknown[0]!r} is not known to {request.env}; it takes {', '.join(takes)}")
    return group_type(seeds, request.squash, **request.kwargs)
