"""Environments on the device: vector environments that are made with ``num_envs`` and ``device`` and speak tensors.

A run steps them in its learner's process (:class:`sfactory.envs.tensors.group.TensorGroup`). Whatever else plays them,
evaluation for example, sees them through :class:`OnHost` as any other vector environment.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import gymnasium
import numpy as np
import torch
from torch import Tensor

from sfactory.config import env_name
from sfactory.config.env_source import source_of
from sfactory.config.presets import takes_device
from sfactory.envs.factory import make_environment
from sfactory.envs.families import vector
from sfactory.envs.faults import environment_name
from sfactory.envs.general import probe_made
from sfactory.envs.interface import TENSORS, EnvRequest, EnvSpec, Group
from sfactory.envs.tensors.group import TensorGroup
from sfactory.errors import ConfigError


def handles(request: EnvRequest) -> bool:
    """Callables that take ``num_envs`` and ``device``."""
    return not isinstance(request.env, str) and takes_device(request.env)


def probe(request: EnvRequest) -> EnvSpec:
    """Make one environment, read its spec, check its first observation, and close it.

    Raises:
        ConfigError: If any of these steps fails.
    """
    env, source = source_of(request.env, request.kwargs, lambda: make_on_host(request, 1))
    spec = probe_made(env, source, request, vector.read_spec, vector.VectorGroup)
    on_device = request.backend == TENSORS or (request.backend == "auto" and env.speaks_tensors)
    return dataclasses.replace(spec, family=TENSORS, own_rows=None) if on_device else spec


def make_group(request: EnvRequest, spec: EnvSpec, count: int, first_index: int, seed: int) -> Group:
    """A group of `count` rows on the host.

    Raises:
        ConfigError: If they cannot be made.
    """
    envs = [make_on_host(request, count)]
    return vector.VectorGroup(envs, lambda seeds: make_on_host(request, count), request, spec, first_index, seed)


def make_tensor_group(request: EnvRequest, spec: EnvSpec, count: int, device: torch.device) -> TensorGroup:
    """A group of `count` rows on a device.

    Raises:
        ConfigError: If they cannot be made there.
    """
    request = dataclasses.replace(request, kwargs=request.kwargs | {"device": str(device)})
    env = _checked(make_environment(request, count), request, count)
    name = environment_name(request, 0)
    return TensorGroup(env, spec, name, request.validate, device)


def make_on_host(request: EnvRequest, count: int) -> OnHost:
    """An environment of `count` rows, as it is seen from the host.

    Raises:
        ConfigError: If it cannot be made.
    """
    kwargs = {"device": "cpu"} | request.kwargs
    env = make_environment(dataclasses.replace(request, kwargs=kwargs, backend="auto"), count)
    return OnHost(_checked(env, request, count), torch.device(kwargs["device"]))


def _checked(env: Any, request: EnvRequest, count: int) -> gymnasium.vector.VectorEnv:
    if not isinstance(env, gymnasium.vector.VectorEnv) or env.num_envs != count:
        if "num_envs" in request.kwargs:
            raise ConfigError(f"{env_name(request.env)}: leave num_envs out of env_kwargs; --envs-per-worker sets it")
        what = f"num_envs {env.num_envs}" if hasattr(env, "num_envs") else f"a {type(env).__name__}"
        raise ConfigError(
            f"{env_name(request.env)} takes num_envs and device, as an environment on the device does, but made {what} "
            f"for {count} rows; return a gymnasium.vector.VectorEnv of that many, or rename its argument device"
        )
    return env


class OnHost(gymnasium.vector.VectorEnv):
    """An environment on the device as one that speaks NumPy.

    Args:
        env: The environment.
        device: Of its tensors.

    Attributes:
        speaks_tensors: Whether its last reset has returned any; one that speaks NumPy is given NumPy's actions.
    """

    def __init__(self, env: gymnasium.vector.VectorEnv, device: torch.device) -> None:
        self.env, self._device, self.speaks_tensors = env, device, True
        self.num_envs, self.metadata, self.render_mode = env.num_envs, env.metadata, env.render_mode
        self.single_observation_space, self.single_action_space = env.single_observation_space, env.single_action_space
        self.observation_space, self.action_space = env.observation_space, env.action_space

    @torch.no_grad()
    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """As the environment's own; of several seeds the first."""
        seed = seed[0] if isinstance(seed, list) else seed
        mask = (options or {}).get("reset_mask")
        options = {"reset_mask": self._to_device(mask)} if mask is not None else options
        observation, info = self.env.reset(seed=seed, options=options)
        self.speaks_tensors = _has_tensors(observation)
        return to_host(observation), to_host(info)

    @torch.no_grad()
    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """As the environment's own."""
        return tuple(map(to_host, self.env.step(_mapped(actions, self._to_device))))

    def render(self) -> Any:
        """As the environment's own."""
        return self.env.render()

    def close_extras(self, **kwargs: Any) -> None:
        """Close the environment."""
        self.env.close()

    def _to_device(self, value: Any) -> Any:
        is_foreign = self.speaks_tensors and isinstance(value, np.ndarray)
        return torch.as_tensor(value, device=self._device) if is_foreign else value


def _has_tensors(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_has_tensors, value.values()))
    return any(map(_has_tensors, value)) if isinstance(value, tuple | list) else isinstance(value, Tensor)


def to_host(value: Any) -> Any:
    """Tensors, nested in mappings and sequences, as arrays."""
    return _mapped(value, lambda x: _array(x) if isinstance(x, Tensor) else x)


def _array(tensor: Tensor) -> np.ndarray:
    """A tensor as an array; NumPy has no bfloat16."""
    tensor = tensor.detach()
    return (tensor.float() if tensor.dtype is torch.bfloat16 else tensor).cpu().numpy()


def _mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(value, Mapping):
        return {key: _mapped(each, change) for key, each in value.items()}
    if isinstance(value, tuple | list):
        return type(value)(_mapped(each, change) for each in value)
    return change(value)
