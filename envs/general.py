"""The general family: environments that Gymnasium or a user's callable makes, classified by the object that was
made."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from sfactory.config.env_source import EnvSource, source_of, source_of_id
from sfactory.envs.factory import is_parallel, is_vector, make_environment, make_environments
from sfactory.envs.families import gymnasium, multiagent, vector
from sfactory.envs.faults import probing
from sfactory.envs.interface import EnvRequest, EnvSpec, Group
from sfactory.envs.observations import new_step_buffers
from sfactory.envs.registry import find_spec


def handles(request: EnvRequest) -> bool:
    """Every environment."""
    return True


def probe(request: EnvRequest) -> EnvSpec:
    """Make one environment, read its spec, check its first observation, and close it.

    Raises:
        ConfigError: If any of these steps fails.
    """
    env, source = _make_known(request)
    return probe_made(env, source, request, *_kind(env))


def probe_made(
    env: Any,
    source: EnvSource,
    request: EnvRequest,
    read_spec: Callable[[Any, EnvRequest], EnvSpec],
    group_type: Callable[..., Group],
) -> EnvSpec:
    """The spec of an environment that has been made, whose first observation is checked; then it is closed.

    Args:
        source: Code that the environment comes from.
        read_spec: Reads the spec of this kind of environment.
        group_type: The group of this kind.

    Raises:
        ConfigError: If it cannot be trained on.
    """
    request = dataclasses.replace(request, compiled=False)
    with probing(env):
        spec = dataclasses.replace(read_spec(env, request), source=source)
        # Nothing is made anew here: the first fault is raised.
        group = group_type([env], lambda seeds: env, request, spec, 0, 0)
        group.reset(new_step_buffers(spec, group.rows))
    return spec


def _make_known(request: EnvRequest) -> tuple[Any, EnvSource]:
    """One environment, and the source of its code."""
    if isinstance(request.env, str):
        env, spec = make_environment(request, 1), find_spec(request.env)
        entry: Any = spec.entry_point or spec.vector_entry_point
        return env, source_of_id(entry)
    return source_of(request.env, request.kwargs, lambda: make_environment(request, 1))


def make_group(request: EnvRequest, spec: EnvSpec, count: int, first_index: int, seed: int) -> Group:
    """A group of single, vector or multi-agent environments.

    Raises:
        ConfigError: If they cannot be made.
    """
    envs = make_environments(request, count)
    _, group_type = _kind(envs[0])
    return group_type(envs, lambda seeds: make_environment(request, count), request, spec, first_index, seed)


def _kind(env: Any) -> tuple[Callable[[Any, EnvRequest], EnvSpec], Callable[..., Any]]:
    """The reader of specs and the group type for environments of this kind."""
    if is_vector(env):
        return vector.read_spec, vector.VectorGroup
    if is_parallel(env):
        return multiagent.read_spec, multiagent.ParallelGroup
    return gymnasium.read_spec, gymnasium.SingleGroup
