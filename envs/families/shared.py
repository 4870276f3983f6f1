"""Ids of Gymnasium whose environments share one with env_backend auto: MuJoCo's, Acrobot, MountainCar."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from sfactory.envs.factory import make_environment
from sfactory.envs.families import vector
from sfactory.envs.families.classic_control import ClassicControl
from sfactory.envs.families.mujoco import SharedSimulation
from sfactory.envs.families.shared_env import SharedEnv
from sfactory.envs.families.vector import VectorGroup
from sfactory.envs.faults import probing
from sfactory.envs.interface import EnvRequest, EnvSpec
from sfactory.envs.registry import find_spec

KINDS: tuple[type[SharedEnv], ...] = (SharedSimulation, ClassicControl)


def handles(request: EnvRequest) -> bool:
    """Ids of these environments without wrappers of their own; a video needs environments that draw one by one."""
    return (
        isinstance(request.env, str)
        and request.backend == "auto"
        and request.render_mode is None
        and "render_mode" not in request.kwargs
        and _kind(request.env) is not None
    )


def probe(request: EnvRequest) -> EnvSpec:
    """Make one environment, read its spec, and close it.

    Raises:
        ConfigError: If its package is missing or `env_kwargs` do not fit.
    """
    with probing(_make(request, 1)) as env:
        return dataclasses.replace(vector.read_spec(env, request), family=env.family)


def make_group(request: EnvRequest, spec: EnvSpec, count: int, first_index: int, seed: int) -> VectorGroup:
    """A group of `count` environments. Raises as `probe` does."""

    def make(seeds: Sequence[int]) -> SharedEnv:
        return _make(request, count)

    return VectorGroup([_make(request, count)], make, request, spec, first_index, seed)


def _kind(env: str) -> type[SharedEnv] | None:
    spec = find_spec(env)
    if spec.additional_wrappers:
        return None
    return next((kind for kind in KINDS if spec.entry_point in kind.entry_points), None)


def _make(request: EnvRequest, count: int) -> SharedEnv:
    kind = _kind(request.env)
    assert kind is not None, "an environment that handles() does not take"
    return kind(make_environment(request, 1), count)
