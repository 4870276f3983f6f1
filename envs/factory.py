"""Makes environments from ids and callables, and explains in one sentence why one could not be made."""

from __future__ import annotations

import contextlib
import difflib
import importlib.util
import inspect
import multiprocessing
import pkgutil
import sys
import traceback
import types
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import gymnasium
from gymnasium.envs import registration
from gymnasium.envs.registration import find_highest_version, get_env_id, load_env_creator, parse_env_id

from sfactory.config import env_name
from sfactory.envs.interface import EnvRequest
from sfactory.errors import ConfigError, EnvironmentFault, SfactoryError, installing, said, shown
from sfactory.spaces import ActionSpec, ObservationSpec

Maker = Callable[[Sequence[int]], Any]
"""Makes one more environment of a group. Its argument is the seeds of the rows, for environments that are seeded when
they are made."""
_registered: dict[str, Callable[..., Any]] = {}
ON_DEVICE = {
    "sfactory/TensorCartPole": ("sfactory.envs.tensors.cartpole", "CartPole"),
    "sfactory/TensorMemoryGrid": ("sfactory.envs.tensors.memory_grid", "MemoryGrid"),
}
"""Module and class of sfactory's own environments on the device."""
_ID_PACKAGES = {
    "MiniGrid-": "minigrid",
    "BabyAI-": "minigrid",
    "ALE/": "ale_py",
    "Vizdoom": "vizdoom.gymnasium_wrapper",
    "NetHack": "nle",
    "MiniHack-": "minihack",
    "Crafter": "sfactory.envs.crafter",
    "dm_control/": "shimmy",
}
"""Packages that register ids with these prefixes when they are imported."""
_EXTRAS = {
    "ale_py": "atari",
    "vizdoom": "vizdoom",
    "mujoco": "mujoco",
    "Box2D": "box2d",
    "minigrid": "minigrid",
    "pettingzoo": "multiagent",
    "mpe2": "multiagent",
    "pymunk": "multiagent",
    "envpool": "envpool",
    "nle": "nethack",
    "minihack": "nethack",
    "crafter": "crafter",
    "shimmy": "dm-control",
    "dm_control": "dm-control",
}
"""The extra of sfactory that installs a package."""


def register_env(name: str, factory: Callable[..., Any]) -> None:
    """Register a factory of environments under a name, for this process and the worker processes of its runs.

    Args:
        name: Value of ``--env`` that stands for the factory.
        factory: Called with the entries of ``env_kwargs``; returns a ``gymnasium.Env``, a
            ``gymnasium.vector.VectorEnv`` or a PettingZoo
            parallel environment. For worker processes it must be picklable: a class, or a function of a module.

    Raises:
        ConfigError: If `factory` is not callable.
    """
    if not callable(factory):
        raise ConfigError(
            f"register_env({name!r}, ...) was given {factory!r}; pass a callable that makes an environment, like its "
            "class"
        )
    _registered[name] = factory


def resolve_env(env: Any) -> Any:
    """Resolve the name of an environment: gives the factory of a registered name, of an environment on the device or of
    ``module:callable``, and anything else unchanged.

    Raises:
        ConfigError: If a module in ``module:Name`` cannot be imported, or the name is code.
    """
    if not isinstance(env, str):
        return env
    if env in _registered:
        return _registered[env]
    if env in ON_DEVICE:
        module_name, name = ON_DEVICE[env]
        return getattr(importlib.import_module(module_name), name)
    if env.startswith(("lambda", "<")):
        raise ConfigError(
            f"env is {env!r}; a lambda or class of a Python program has no place in YAML or on the command line: write "
            "it into a module and name it there, as my_module:make_env, or call sfactory.train(Config(env=...))"
        )
    module_name, colon, name = env.rpartition(":")
    if colon:
        module = _import(module_name, env)
        if name not in gymnasium.registry and callable(factory := getattr(module, name, None)):
            return factory
    return env


def environment_name(request: EnvRequest, index: int) -> str:
    """Name of environment number `index` of the run in error messages."""
    return f"environment {index} ({env_name(request.env)})"


ENV_ERRORS = (Exception, SystemExit)
"""Exceptions of an environment that count as its fault. SystemExit is one, because an environment that calls exit()
must not end the worker."""


def environment_fault(name: str, doing: str, error: BaseException, row: int | None = None) -> EnvironmentFault:
    """The fault for an exception of an environment, with the environment's own traceback.

    Args:
        name: Name of the environment.
        doing: The call that raised, for example ``step(1)``.
        error: The exception.
        row: The row at fault, if it is a single one.
    """
    frames = error.__traceback__ and (error.__traceback__.tb_next or error.__traceback__)
    lines = "".join(traceback.format_exception(type(error), error, frames))
    return EnvironmentFault(f"{name} raised {type(error).__name__} in {doing}: {said(error)}\n{lines.rstrip()}", row)


def close_quietly(env: Any) -> None:
    """Close an environment and ignore its exceptions."""
    with contextlib.suppress(*ENV_ERRORS):
        env.close()


def check_reset(name: str, reset: Callable[[], Any], row: int | None = None) -> tuple[Any, dict[str, Any]]:
    """Call reset(); gives (observation, info).

    Raises:
        EnvironmentFault: If it raises, or returns something else.
    """
    try:
        result = reset()
    except ENV_ERRORS as error:
        raise environment_fault(name, "reset()", error, row) from error
    if not isinstance(result, tuple) or len(result) != 2 or not isinstance(result[1], dict):
        raise EnvironmentFault(
            f"{name}: reset() returned {shown(result)}; it must return the two values observation, info (a dict)", row
        )
    return result


def read_spaces(observation: Any, action: Any, request: EnvRequest) -> tuple[ObservationSpec, ActionSpec]:
    """The specs of an environment's two spaces.

    Raises:
        ConfigError: If one is not a Gymnasium space or is not supported.
    """
    for what, space in (("observation_space", observation), ("action_space", action)):
        if not isinstance(space, gymnasium.Space):
            raise ConfigError(f"{env_name(request.env)}: {what} is {shown(space)}; it must be a gymnasium.spaces.Space")
    try:
        return ObservationSpec.from_space(observation, request.reading), ActionSpec.from_space(action, request.squash)
    except ConfigError as error:
        raise ConfigError(*(f"{env_name(request.env)}: {problem}" for problem in error.problems)) from None


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


def make_environments(request: EnvRequest, count: int) -> list[Any]:
    """`count` single or multi-agent environments, or one vector environment of `count`.

    Raises:
        ConfigError: If the id, the callable or its arguments are wrong.
    """
    name = env_name(request.env)
    first = make_environment(request, count)
    if is_vector(first):
        if first.num_envs != count:
            first.close()
            raise ConfigError(
                f"{name} returned a vector environment with num_envs {first.num_envs}, but a group has {count} "
                "environments "
                "(envs_per_worker / runtime.groups); let the callable take num_envs, or change envs_per_worker"
            )
        return [first]
    envs = [first, *(make_environment(request, count) for _ in range(count - 1))]
    if len(set(map(id, envs))) < count:
        raise ConfigError(f"{name} returned the same environment twice; it must make a new one at every call")
    return envs


def make_environment(request: EnvRequest, count: int) -> Any:
    """One environment of any kind; a vector environment gets `count` environments where its maker takes ``num_envs``.

    Raises:
        ConfigError: If the id, the callable or its arguments are wrong.
    """
    kwargs = dict(request.kwargs)
    if request.render_mode is not None:
        kwargs["render_mode"] = request.render_mode
    if isinstance(request.env, str):
        return _make_by_id(request, kwargs, count)
    env = _make_by_call(request.env, kwargs, count)
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
            return gymnasium.make_vec(spec, num_envs=count, vectorization_mode="vector_entry_point", **kwargs)
        return gymnasium.make(spec, disable_env_checker=True, **kwargs)
    except ENV_ERRORS as error:
        given = {"num_envs": count, **spec.kwargs, **kwargs} if vector else {**spec.kwargs, **kwargs}
        given.pop("max_episode_steps", None)
        _explain(spec.id, maker, given, error)


def _own_vector_serves(spec: registration.EnvSpec, kwargs: Mapping[str, Any]) -> bool:
    """Whether an id has a vector environment of its own that takes these arguments. Videos need single environments."""
    if spec.vector_entry_point is None or spec.additional_wrappers or "render_mode" in kwargs:
        return False
    limit = {} if spec.max_episode_steps is None else {"max_episode_steps": spec.max_episode_steps}
    try:
        maker = spec.vector_entry_point
        inspect.signature(load_env_creator(maker) if isinstance(maker, str) else maker).bind(
            num_envs=1, **limit | spec.kwargs | kwargs
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


def _make_by_call(maker: Any, kwargs: dict[str, Any], count: int) -> Any:
    name = env_name(maker)
    if not callable(maker):
        remedy = "name a Gymnasium id, or pass a callable that makes an environment, such as its class or lambda: ..."
        if isinstance(maker, types.ModuleType) and callable(getattr(maker, "parallel_env", None)):
            remedy = f"pass what makes the environment in it, {maker.__name__}.parallel_env"
        raise ConfigError(f"env is {shown(maker)}; {remedy}")
    if "num_envs" in _parameters(maker):
        kwargs.setdefault("num_envs", count)
    try:
        env = maker(**kwargs)
    except ENV_ERRORS as error:
        _explain(name, maker, kwargs, error)
    if isinstance(env, gymnasium.Env) or is_vector(env) or is_parallel(env):
        return env
    remedy = "it must return a gymnasium.Env, a gymnasium.vector.VectorEnv or a PettingZoo parallel environment"
    if hasattr(env, "agent_iter"):
        remedy += "; pettingzoo.utils.conversions.aec_to_parallel makes one of a turn-based environment"
    elif callable(getattr(env, "action_spec", None)) and callable(getattr(env, "observation_spec", None)):
        remedy += (
            "; shimmy.dm_control_compatibility.DmControlCompatibilityV0 makes one of a dm_env environment (pip install "
            "shimmy)"
        )
    elif callable(getattr(env, "step", None)):
        remedy += "; derive its class from gymnasium.Env"
    raise ConfigError(f"{name} returned {shown(env)}; {remedy}")


def find_spec(env: str) -> registration.EnvSpec:
    """The registered spec of an id or ``module:Id``; an id without a version means its latest one."""
    module, colon, name = env.rpartition(":")
    if colon:
        _import(module, env)
    for beginning, package in _ID_PACKAGES.items():
        if name.startswith(beginning) and name not in gymnasium.registry:
            _register_package(package, name)
    if name not in gymnasium.registry:
        with contextlib.suppress(gymnasium.error.Error):
            space, base, version = parse_env_id(name)
            if version is None:
                name = get_env_id(space, base, find_highest_version(space, base))
    if name in gymnasium.registry:
        return gymnasium.registry[name]
    raise ConfigError(_unknown(env, module, name))


def _unknown(env: str, module: str, name: str) -> str:
    """Explanation of an unknown name of an environment. Its module, if it names one, has been imported before."""
    known = [*_registered, *gymnasium.registry]
    if module:
        found = vars(sys.modules[module])
        if name in found and callable(getattr(found[name], "parallel_env", None)):
            return f"env is {env!r}, which is the module of a game; write {found[name].__name__}:parallel_env"
        if name in found:
            return f"env is {env!r}, but {name} of the module {module} is {shown(found[name])}, which cannot be called"
        near = difflib.get_close_matches(name, [key for key, value in found.items() if callable(value)], 3)
        near = [f"{module}:{key}" for key in near] or difflib.get_close_matches(name, known, 3)
        hint = f"did you mean {' or '.join(near)}?" if near else "correct its name"
        return f"no environment is called {env!r}: the module {module} has no {name}, and registers no such id; {hint}"
    if _looks_like_a_module(env):
        maker = "parallel_env" if env.startswith("pettingzoo.") else "name_of_a_class_or_function"
        return (
            f"env is {env!r}, which is the name of a module; name what makes the environment in it, too: {env}:{maker}"
        )
    near = difflib.get_close_matches(name, known, 3)
    hint = f"did you mean {' or '.join(near)}?" if near else "no known id is like it."
    return (
        f"no environment is called {env!r}; {hint} An id that a package registers when it is imported is written "
        f"module:{name}"
    )


def _looks_like_a_module(name: str) -> bool:
    """Whether a name is that of a module or of a member of an installed package. Imports nothing."""
    package, *rest = name.split(".")
    if not all(map(str.isidentifier, (package, *rest))):
        return False
    try:
        return package in _EXTRAS or importlib.util.find_spec(package) is not None
    except ValueError:  # of a module that was not found where modules are, as __main__
        return True


def _import(module: str, env: str) -> Any:
    try:
        return importlib.import_module(module)
    except (ImportError, ValueError) as error:
        raise ConfigError(
            f"cannot import the module {module!r} of env {env!r}: {error}; {_remedy(module, error)}"
        ) from error
    except ENV_ERRORS as error:
        trace = "".join(traceback.format_exception(error)).rstrip()
        raise ConfigError(
            f"the module {module!r} of env {env!r} raised {type(error).__name__} when imported: {said(error)}\n{trace}"
        ) from error


def _remedy(module: str, error: Exception) -> str:
    """What to do about a module that cannot be imported."""
    parent, _, name = module.rpartition(".")
    missing = getattr(error, "name", None) or module
    if missing == module and parent in sys.modules:
        there = [each.name for each in pkgutil.iter_modules(getattr(sys.modules[parent], "__path__", []))]
        if near := difflib.get_close_matches(name, there, 1):
            return f"did you mean {parent}.{near[0]}?"
    if missing.partition(".")[0] in _EXTRAS and missing.partition(".")[0] not in sys.modules:
        return _install(missing)
    return "install it, or correct its name"


def _register_package(package: str, env: str) -> None:
    """Import a package that registers its environments with Gymnasium."""
    try:
        module = importlib.import_module(package)
    except ImportError as error:
        missing = error.name or package
        raise ConfigError(
            f"{env} needs the package {missing.partition('.')[0]}: {error}; {_install(missing)}"
        ) from error
    gymnasium.register_envs(module)


def _install(package: str) -> str:
    """The command that installs a package."""
    top = package.partition(".")[0]
    return installing(_EXTRAS[top]) if top in _EXTRAS else f"pip install {top}"


def _parameters(maker: Any) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(maker).parameters
    except (TypeError, ValueError):
        return {}


def _explain(name: str, maker: Any, kwargs: Mapping[str, Any], error: BaseException) -> NoReturn:
    """Raise the ConfigError that says why `maker`, a callable or ``module:attribute``, raised `error` when called with
    `kwargs`."""
    if isinstance(error, SfactoryError):
        raise error
    if isinstance(error, ImportError | gymnasium.error.DependencyNotInstalled):
        clues = f"{maker} {getattr(maker, '__module__', '')} {error}".lower()
        missing = [
            package for package in _EXTRAS if package.lower() in clues and importlib.util.find_spec(package) is None
        ]
        remedy = _install(missing[0]) if missing else "install what it needs"
        raise ConfigError(f"{name} needs a package that cannot be imported: {error}; {remedy}") from error
    if isinstance(error, TypeError):
        _check_arguments(name, load_env_creator(maker) if isinstance(maker, str) else maker, kwargs, error)
    trace = "".join(traceback.format_exception(error)).rstrip()
    raise ConfigError(
        f"{name} could not be made with env_kwargs {dict(kwargs)}: {type(error).__name__}: {said(error)}\n{trace}"
    ) from error


def _check_arguments(name: str, maker: Any, kwargs: Mapping[str, Any], error: TypeError) -> None:
    """Raise ConfigError if `maker` does not take the arguments `kwargs`."""
    try:
        inspect.signature(maker).bind(**kwargs)
    except ValueError:  # a maker written in C has no signature
        return
    except TypeError as misfit:
        takes = _parameters(maker)
        if "render_mode" in kwargs and "render_mode" not in takes:
            raise ConfigError(
                f"{name} does not take render_mode, which a video needs; let it take render_mode and pass it on"
            ) from error
        listed = ", ".join(takes) or "nothing"
        raise ConfigError(f"env_kwargs {dict(kwargs)} do not fit {name}: {misfit}; it takes {listed}") from error
