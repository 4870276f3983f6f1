"""EnvPool's C++ environments, with env_backend envpool: Atari, classic control, MuJoCo and all others that EnvPool
knows by their id.

Ids are EnvPool's own; an Atari id of Gymnasium (``ALE/Pong-v5``) means the same game by the same protocol.
``env_kwargs`` are EnvPool's options. Environments reset in the step after an episode's end (NEXT_STEP). EnvPool counts
an episode that terminates in the very step of its time limit as truncated, and waits up to `noop_max` frames before a
further life of an Atari game, too.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium.vector import VectorWrapper

from sfactory.envs.families import vector
from sfactory.envs.families.atari import canonical_id
from sfactory.envs.families.atari_games import ENV_KWARGS, GameSettings
from sfactory.envs.families.vector import VectorGroup
from sfactory.envs.faults import probing
from sfactory.envs.interface import GOES_ON_KEY, EnvRequest, EnvSpec
from sfactory.envs.seeds import env_seed
from sfactory.errors import ConfigError, installing

_OTHER_NAMES = {"frame_skip": "frameskip"}
"""EnvPool's names of options of Atari games that have another one here."""
_FLOATS = (np.dtype(np.float32), np.dtype(np.float64))


def handles(request: EnvRequest) -> bool:
    """Everything, if the backend is envpool."""
    return request.backend == "envpool"


def probe(request: EnvRequest) -> EnvSpec:
    """Make one environment, read its spec, and close it.

    Raises:
        ConfigError: If envpool is missing, does not know the id, or does not take the `env_kwargs`.
    """
    with probing(_make(request, [0])) as env:
        spec = vector.read_spec(env, request)
        fps = 60 / env.frameskip if env.is_atari else spec.render_fps
        return dataclasses.replace(
            spec, family="envpool", frameskip=env.frameskip, render_fps=fps, protocol=_protocol(request)
        )


def make_group(request: EnvRequest, spec: EnvSpec, count: int, first_index: int, seed: int) -> VectorGroup:
    """A group of `count` environments. Raises as `probe` does."""
    env = _make(request, [env_seed(seed, first_index + row) for row in range(count)])
    return VectorGroup([env], lambda seeds: _make(request, seeds), request, spec, first_index, seed)


def _make(request: EnvRequest, seeds: Sequence[int]) -> PooledEnvironments:
    try:
        import envpool
    except ImportError as error:
        raise ConfigError(f"env_backend envpool needs the package envpool: {error}; {installing('envpool')}") from error
    if not isinstance(request.env, str):
        raise ConfigError(
            f"env_backend is envpool, but env is {request.env!r}; envpool takes ids only, use env_backend auto"
        )
    name, options = _translate(request.env)
    known = envpool.list_all_envs()
    if name not in known:
        near = difflib.get_close_matches(name, known, 3)
        hint = f"did you mean {' or '.join(near)}?" if near else "use env_backend auto"
        raise ConfigError(f"envpool knows no environment {name!r}; {hint}")
    options |= request.kwargs
    if request.render_mode is not None:
        options["render_mode"] = request.render_mode
    try:
        env = envpool.make(
            name, "gymnasium", num_envs=len(seeds), num_threads=request.threads, seed=list(seeds), **options
        )
    except Exception as error:
        raise ConfigError(
            f"envpool could not make {name} with env_kwargs {request.kwargs}: {type(error).__name__}: {error}"
        ) from error
    return PooledEnvironments(env)


def _translate(env: str) -> tuple[str, dict[str, Any]]:
    """EnvPool's id for an id, and the options that make it the same environment."""
    atari, protocol = canonical_id(env)
    return (env, {}) if atari is None else (atari.removeprefix("ALE/"), dict(protocol))


def _protocol(request: EnvRequest) -> str:
    """How an Atari game of Gymnasium is played; else nothing."""
    name, protocol = canonical_id(request.env)
    if name is None:
        return ""
    given = {_OTHER_NAMES.get(key, key): value for key, value in (protocol | request.kwargs).items()}
    return GameSettings(name, **{key: value for key, value in given.items() if key in ENV_KWARGS}).protocol


class PooledEnvironments(VectorWrapper):
    """An EnvPool as a Gymnasium vector environment: seeded when it is made, rendered all at once, without bookkeeping
    in its infos."""

    def __init__(self, env: Any) -> None:
        super().__init__(env)
        self._pool = env
        self._all = np.arange(env.num_envs, dtype=np.int32)
        modules = " ".join(cls.__module__ for cls in type(env).__mro__)
        self.is_atari = "atari" in modules
        # MuJoCo's counts integration steps
        self.frameskip = 1 if "mujoco" in modules else int(env.config.get("frame_skip", 1))

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        observation, _ = self.env.reset(options=options)
        return observation, {}

    def step(self, actions: Any) -> tuple[Any, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        observation, reward, terminated, truncated, info = self.env.step(actions)
        quantities = {
            key: value for key, value in info.items() if getattr(value, "dtype", None) in _FLOATS and key != "reward"
        }
        if "lives" in info and terminated.any():  # of an Atari game, which says by itself whether it is over
            quantities[GOES_ON_KEY] = terminated & (info["terminated"] == 0)
        return observation, reward, terminated, truncated, quantities

    def render(self) -> tuple[np.ndarray, ...]:
        return tuple(self._pool.render(env_ids=self._all))
