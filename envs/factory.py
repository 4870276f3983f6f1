"""Makes environments from ids and callables, and explains in one sentence why one could not be made."""

from __future__ import annotations

import difflib
import inspect
import multiprocessing
import sys
import traceback
import types
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import gymnasium
from gymnasium.envs import registration
from gymnasium.envs.registration import load_env_creator

from sfactory.config import env_name
from sfactory.envs.faults import close_quietly, is_interrupt
from sfactory.envs.interface import EnvRequest, EnvSpec
from sfactory.envs.registry import find_spec, remedy_for
from sfactory.envs.rendering import check_window
from sfactory.errors import ConfigError, SfactoryError, said, shown
from sfactory.spaces import ActionSpec, ObservationSpec

Maker = Callable[[Sequence[int]], Any]
"""Makes one more environment of a group. Its argument is the seeds of the rows, for environments that are seeded when
they are made."""
MANY_ROWS = 32
"""Default of ``num_envs`` from which on it is that of a training run."""
_NO_LIMIT = 2**31 - 1
"""Env steps of an episode that ends by itself alone; fits into the int32 by which vector environments count."""


def read_spaces(
    observation: Any, action: Any, request: EnvRequest, prefix: str = ""
) -> tuple[ObservationSpec, ActionSpec]:
    """The specs of an environment's two spaces.

    Args:
        prefix: Of the names of the attributes that hold them: ``single_`` in a vector environment.

    Raises:
        ConfigError: If one is not a Gymnasium space or is not supported.
    """
    for what, space in ((f"{prefix}observation_space", observation), (f"{prefix}action_space", action)):
        if not isinstance(space, gymnasium.Space):
            raise ConfigError(f"{env_name(request.env)}: {what} is {shown(space)}; it must be a gymnasium.spaces.Space")
    try:
        return ObservationSpec.from_space(observation, request.reading), ActionSpec.from_space(action, request.squash)
    except ConfigError as error:
        raise ConfigError(*(f"{env_name(request.env)}: {problem}" for problem in error.problems)) from None


def declared(env: Any, name: str, request: EnvRequest) -> Any:
    """An attribute that an environment declares itself by, such as its ``observation_space``; None if it has none.

    Raises:
        ConfigError: If it is a property that raises.
    """
    try:
        return getattr(env, name, None)
    except Exception as error:
        raise ConfigError(f"{env_name(request.env)}: {name} raised {type(error).__name__}: {error}") from error


def render_fps(env: Any) -> float:
    """Frame rate of videos in env steps per second, from ``metadata["render_fps"]``; 30 where it is missing."""
    fps = (getattr(env, "metadata", None) or {}).get("render_fps")
    return float(fps) if fps else 30.0


def is_vector(env: Any) -> bool:
    """Whether an environment is one of Gymnasium's vector environments."""
    return isinstance(env, gymnasium.vector.VectorEnv)


def is_parallel(env: Any) -> bool:
    """Whether an environment follows PettingZoo's parallel API."""
    methods = ("observation_space", "action_space", "reset", "step")
    is_aec = hasattr(env, "agent_iter")
    return (
        hasattr(env, "possible_agents") and not is_aec and all(callable(getattr(env, name, None)) for name in methods)
    )


def own_rows(env: gymnasium.vector.VectorEnv, request: EnvRequest) -> int | None:
    """How many environments a vector environment has unless it is told: those that its maker, or env_kwargs, gives it.
    None where its maker waits to be told, or has so few by default that the number was hardly meant for training."""
    if isinstance(request.env, str):
        return None
    if not _tells_rows(request):
        return env.num_envs
    default = _parameters(request.env)["num_envs"].default
    return default if isinstance(default, int) and default >= MANY_ROWS else None


def takes_rows(request: EnvRequest, spec: EnvSpec, count: int) -> bool:
    """Whether there can be groups of `count` environments; a vector environment may always have another number."""
    return spec.own_rows in (None, count) or _tells_rows(request)


def check_rows(request: EnvRequest, spec: EnvSpec, count: int) -> None:
    """Raise ConfigError if there cannot be groups of `count` environments."""
    if not takes_rows(request, spec, count):
        raise _other_rows(request, spec.own_rows, count)


def _tells_rows(request: EnvRequest) -> bool:
    """Whether a callable is told how many environments to make."""
    return "num_envs" in _parameters(request.env) and "num_envs" not in request.kwargs


def _other_rows(request: EnvRequest, given: Any, count: int) -> ConfigError:
    remedy = "leave it out of env_kwargs" if "num_envs" in request.kwargs else "let the callable take num_envs"
    return ConfigError(
        f"{env_name(request.env)} returned a vector environment with num_envs {given}, but a group has {count} "
        f"environments (envs_per_worker / runtime.groups); {remedy}, or change envs_per_worker"
    )


def make_environments(request: EnvRequest, count: int) -> list[Any]:
    """`count` single or multi-agent environments, or one vector environment of `count`.

    Raises:
        ConfigError: If the id, the callable or its arguments are wrong.
    """
    name = env_name(request.env)
    first = make_environment(request, count)
    if is_vector(first):
        if (given := declared(first, "num_envs", request)) != count:
            close_quietly(first)
            raise _other_rows(request, given, count)
        return [first]
    envs = [first]
    try:
        while len(envs) < count:
            envs.append(make_environment(request, count))
        unwrapped = [getattr(env, "unwrapped", env) for env in envs]
        if len(set(map(id, unwrapped))) < count:
            raise ConfigError(
                f"{name} returned the same environment twice, as it is or in a wrapper; it must make a new one at "
                "every call"
            )
    except BaseException:
        for env in envs:
            close_quietly(env)
        raise
    return envs


def make_environment(request: EnvRequest, count: int) -> Any:
    """One environment of any kind; a vector environment gets `count` environments where its maker takes ``num_envs``.

    Raises:
        ConfigError: If the id, the callable or its arguments are wrong.
    """
    check_window(request)
    kwargs = dict(request.kwargs)
    if request.render_mode is not None:
        kwargs["render_mode"] = request.render_mode
    if isinstance(request.env, str):
        return _make_by_id(request, kwargs, count)
    env = _make_by_call(request, kwargs, count)
    if request.backend == "vector" and not is_vector(env):
        raise ConfigError(
            f"env_backend is vector, but {env_name(request.env)} returned a {type(env).__name__}, which is no "
            "gymnasium.vector.VectorEnv; use env_backend auto"
        )
    return env


def _make_by_id(request: EnvRequest, kwargs: dict[str, Any], count: int) -> Any:
    spec = find_spec(request.env)
    if request.backend == "vector" and spec.vector_entry_point is None:
        raise ConfigError(
            f"env_backend is vector, but {spec.id} has no vector environment of its own; use env_backend auto"
        )
    if "num_envs" in kwargs and spec.vector_entry_point is not None:
        raise ConfigError(
            f"env_kwargs has num_envs, which a run gives to the vector environment of {spec.id} by itself; leave it "
            "out, and set envs_per_worker"
        )
    vector = (
        request.backend == "vector"
        or spec.entry_point is None
        or (request.backend == "auto" and _own_vector_serves(spec, kwargs))
    )
    maker = spec.vector_entry_point if vector else spec.entry_point
    try:
        if isinstance(maker, str):
            load_env_creator(maker)
        _show_mujoco_warnings_once()
        if vector:
            if kwargs.get("max_episode_steps") == -1:  # Gymnasium's word for no limit, known to single environments
                kwargs["max_episode_steps"] = _NO_LIMIT
            return gymnasium.make_vec(spec, num_envs=count, vectorization_mode="vector_entry_point", **kwargs)
        return gymnasium.make(spec, disable_env_checker=True, **kwargs)
    except BaseException as error:
        given = {"num_envs": count, **spec.kwargs, **kwargs} if vector else {**spec.kwargs, **kwargs}
        if not vector:  # gymnasium.make takes it
            given.pop("max_episode_steps", None)
        _explain(spec.id, maker, given, request, error)


def _own_vector_serves(spec: registration.EnvSpec, kwargs: Mapping[str, Any]) -> bool:
    """Whether an id has a vector environment of its own that takes these arguments. Videos need single environments."""
    if spec.vector_entry_point is None or spec.additional_wrappers or "render_mode" in kwargs:
        return False
    limit = {} if spec.max_episode_steps is None else {"max_episode_steps": spec.max_episode_steps}
    try:
        maker = spec.vector_entry_point
        inspect.signature(load_env_creator(maker) if isinstance(maker, str) else maker).bind(
            num_envs=1, **{**limit, **spec.kwargs, **kwargs}
        )
    except (ImportError, TypeError, ValueError):
        return False
    return True


def _show_mujoco_warnings_once() -> None:
    """MuJoCo, once imported, prints a warning for every environment that causes it, and appends it to a file in the
    current folder.

    Deprecations in a model's description are the same in every process, so only the main process shows them.
    """
    if (mujoco := sys.modules.get("mujoco")) is not None:
        mujoco.set_mju_user_warning(_show_mujoco_warning)


def _show_mujoco_warning(message: str) -> None:
    if multiprocessing.parent_process() is None or "deprecated" not in message:
        warnings.warn(f"MuJoCo: {message}", stacklevel=1)


def _make_by_call(request: EnvRequest, kwargs: dict[str, Any], count: int) -> Any:
    maker, name = request.env, env_name(request.env)
    if not callable(maker):
        remedy = "name a Gymnasium id, or pass a callable that makes an environment, such as its class or lambda: ..."
        if isinstance(maker, types.ModuleType) and callable(getattr(maker, "parallel_env", None)):
            remedy = f"pass what makes the environment in it, {maker.__name__}.parallel_env"
        raise ConfigError(f"env is {shown(maker)}; {remedy}")
    if "num_envs" in _parameters(maker):
        kwargs.setdefault("num_envs", count)
    try:
        env = maker(**kwargs)
    except BaseException as error:
        _explain(name, maker, kwargs, request, error)
    if isinstance(env, gymnasium.Env) or is_vector(env) or is_parallel(env):
        return env
    remedy = "it must return a gymnasium.Env, a gymnasium.vector.VectorEnv or a PettingZoo parallel environment"
    if hasattr(env, "agent_iter"):
        if (getattr(env, "metadata", None) or {}).get("is_parallelizable"):
            remedy += "; pettingzoo.utils.conversions.aec_to_parallel makes one of this environment"
        else:
            remedy = "games whose agents act one after the other (AEC) are not supported (docs/multi-agent.md)"
    elif callable(getattr(env, "action_spec", None)) and callable(getattr(env, "observation_spec", None)):
        remedy += (
            "; shimmy.dm_control_compatibility.DmControlCompatibilityV0 makes one of a dm_env environment (pip install "
            "shimmy)"
        )
    elif callable(getattr(env, "step", None)):
        remedy += "; derive its class from gymnasium.Env"
    raise ConfigError(f"{name} returned {shown(env)}; {remedy}")


def _parameters(maker: Any) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(maker).parameters
    except (TypeError, ValueError):
        return {}


def _explain(name: str, maker: Any, kwargs: Mapping[str, Any], request: EnvRequest, error: BaseException) -> NoReturn:
    """Raise the ConfigError that says why `maker`, a callable or ``module:attribute``, raised `error` when called with
    `kwargs` for `request`."""
    if isinstance(error, SfactoryError) or is_interrupt(error):
        raise error
    if isinstance(error, ImportError | gymnasium.error.DependencyNotInstalled):
        remedy = remedy_for(name, f"{maker} {getattr(maker, '__module__', '')} {error}", error)
        raise ConfigError(f"{name} needs a package that cannot be imported: {error}; {remedy}") from error
    if isinstance(error, TypeError):
        maker = load_env_creator(maker) if isinstance(maker, str) else maker
        _check_arguments(name, maker, kwargs, request.render_mode is not None, error)
    trace = "".join(traceback.format_exception(error)).rstrip()
    raise ConfigError(
        f"{name} could not be made with env_kwargs {dict(kwargs)}: {type(error).__name__}: {said(error)}\n{trace}"
    ) from error


def _check_arguments(name: str, maker: Any, kwargs: Mapping[str, Any], for_video: bool, error: TypeError) -> None:
    """Raise ConfigError if `maker` does not take the arguments `kwargs`."""
    try:
        inspect.signature(maker).bind(**kwargs)
    except ValueError:  # a maker written in C has no signature
        return
    except TypeError as misfit:
        takes = _parameters(maker)
        if for_video and "render_mode" not in takes:
            raise ConfigError(
                f"{name} does not take render_mode, which a video needs; let it take render_mode and pass it on"
            ) from error
        unknown = {key: value for key, value in kwargs.items() if key not in takes}
        near = [known for key in unknown for known in difflib.get_close_matches(key, takes, 1)]
        hint = f"; did you mean {' and '.join(near)}?" if near else ""
        raise ConfigError(
            f"env_kwargs {unknown or dict(kwargs)} do not fit {name}: {misfit}; it takes "
            f"{', '.join(takes) or 'nothing'}{hint}"
        ) from error
