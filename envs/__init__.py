"""Environments of every kind behind one interface (:mod:`sfactory.envs.interface`).

:func:`probe` reads the spec of an environment before any worker starts, :func:`make_group` makes the environments that
a worker steps. Both ask the environment families in turn; the last one accepts whatever Gymnasium or a user's callable
makes.
"""

from __future__ import annotations

import dataclasses
import importlib
from typing import TYPE_CHECKING, Any

from sfactory.envs.interface import EnvRequest, EnvSpec, Finals, Group, Outcome, StepBuffers
from sfactory.envs.seeds import env_seed

if TYPE_CHECKING:
    import torch

    from sfactory.envs.registry import register_env, resolve_env
    from sfactory.envs.tensors.group import TensorGroup

__all__ = [
    "EnvRequest",
    "EnvSpec",
    "Finals",
    "Group",
    "Outcome",
    "StepBuffers",
    "env_seed",
    "make_group",
    "make_tensor_group",
    "probe",
    "register_env",
    "resolve_env",
]

_FAMILIES = (
    "families.tensors",
    "native",
    "families.atari",
    "families.vizdoom",
    "families.shared",
    "families.envpool",
    "general",
)
"""Modules with ``handles(request)``, ``probe(request)`` and ``make_group(request, spec, count, first_index, seed)``;
the first that handles an environment gets it."""


def __getattr__(name: str) -> Any:
    """What needs Gymnasium is imported on first use: a saved policy is played without it."""
    if name in ("register_env", "resolve_env"):
        return getattr(importlib.import_module("sfactory.envs.registry"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def probe(request: EnvRequest) -> EnvSpec:
    """Make one environment in this process, read what it is, and close it. What it changes of the process, such as the
    working directory, is as before then (:func:`sfactory.envs.globals.globals_kept`).

    Raises:
        ConfigError: If it cannot be made or trained on, with what to do.
    """
    from sfactory.envs.globals import globals_kept

    request, family = _dispatch(request)
    with globals_kept():
        return family.probe(request)


def make_group(request: EnvRequest, spec: EnvSpec, count: int, first_index: int, seed: int) -> Group:
    """Make `count` environments that step together.

    Args:
        request: The environment and its options.
        spec: Result of :func:`probe` for the same request.
        count: Number of environments.
        first_index: Number in the run of the first of them. Environment i of a run is seeded with ``env_seed(seed,
        i)``.
        seed: Seed of the run.

    Raises:
        ConfigError: If they cannot be made.
    """
    request, family = _dispatch(request)
    return family.make_group(request, spec, count, first_index, seed)


def make_tensor_group(request: EnvRequest, spec: EnvSpec, count: int, device: torch.device) -> TensorGroup:
    """Make `count` environments of the family ``tensors`` on a device.

    Raises:
        ConfigError: If they cannot be made there.
    """
    request, family = _dispatch(request)
    return family.make_tensor_group(request, spec, count, device)


def _dispatch(request: EnvRequest) -> tuple[EnvRequest, Any]:
    """The request with a registered name replaced by its factory, and the module of its family."""
    from sfactory.envs.registry import resolve_env

    request = dataclasses.replace(request, env=resolve_env(request.env))
    for name in _FAMILIES:
        family = importlib.import_module(f"sfactory.envs.{name}")
        if family.handles(request):
            return request, family
    raise AssertionError("the general family handles everything")
