"""The names of environments: finds what a name stands for, and explains in one sentence why it stands for nothing."""

from __future__ import annotations

import contextlib
import difflib
import importlib.util
import pkgutil
import re
import sys
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import gymnasium
from gymnasium.envs import registration
from gymnasium.envs.registration import find_highest_version, get_env_id, parse_env_id

from sfactory.envs.faults import is_interrupt
from sfactory.errors import ConfigError, installing, said, shown

_registered: dict[str, Callable[..., Any]] = {}
ON_DEVICE = {
    "sfactory/TensorCartPole": ("sfactory.envs.tensors.cartpole", "CartPole"),
    "sfactory/TensorMemoryGrid": ("sfactory.envs.tensors.memory_grid", "MemoryGrid"),
}
"""Module and class of sfactory's own environments on the device."""
_ID_PACKAGES = {
    r"MiniGrid-": "minigrid",
    r"BabyAI-": "minigrid",
    r"ALE/|\w+NoFrameskip-v": "ale_py",
    r"Vizdoom": "vizdoom.gymnasium_wrapper",
    r"NetHack": "nle",
    r"MiniHack-": "minihack",
    r"Crafter": "sfactory.envs.crafter",
    r"dm_control/": "shimmy",
}
"""Packages that register ids with these beginnings when they are imported."""
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
    "pkg_resources": "nethack",
}
"""The extra of sfactory that installs a package."""


def register_env(name: str, factory: Callable[..., Any]) -> None:
    """Register a factory of environments under a name, for this process and the worker processes of its runs.

    Args:
        name: Value of ``--env`` that stands for the factory.
        factory: Called with the entries of ``env_kwargs``; returns a ``gymnasium.Env``, a
            ``gymnasium.vector.VectorEnv`` or a PettingZoo parallel environment. For worker processes it must be
            picklable: a class, or a function of a module.

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
    ``module:callable``, the latest version of an id without one, and anything else unchanged.

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
    with contextlib.suppress(ConfigError):  # of a package that is missing, which find_spec tells
        return module_name + colon + _latest(name)
    return env


def find_spec(env: str) -> registration.EnvSpec:
    """The registered spec of an id or ``module:Id``; an id without a version means its latest one."""
    module, colon, name = env.rpartition(":")
    if colon:
        _import(module, env)
    name = _latest(name)
    if name in gymnasium.registry:
        return gymnasium.registry[name]
    raise ConfigError(_unknown(env, module, name))


def _latest(name: str) -> str:
    """The latest version of an id without one; any other name unchanged."""
    for beginning, package in _ID_PACKAGES.items():
        if re.match(beginning, name) and name not in gymnasium.registry:
            _register_package(package, name)
    if name not in gymnasium.registry:
        with contextlib.suppress(gymnasium.error.Error):
            space, base, version = parse_env_id(name)
            if version is None:
                return get_env_id(space, base, find_highest_version(space, base))
    return name


def _unknown(env: str, module: str, name: str) -> str:
    """Explanation of an unknown name of an environment. Its module, if it names one, has been imported before."""
    if module:
        found = vars(sys.modules[module])
        if name in found and callable(getattr(found[name], "parallel_env", None)):
            return f"env is {env!r}, which is the module of a game; write {found[name].__name__}:parallel_env"
        if name in found:
            return f"env is {env!r}, but {name} of the module {module} is {shown(found[name])}, which cannot be called"
        near = difflib.get_close_matches(name, [key for key, value in found.items() if callable(value)], 3)
        near = [f"{module}:{key}" for key in near] or _near(name)
        hint = f"did you mean {' or '.join(near)}?" if near else "correct its name"
        return f"no environment is called {env!r}: the module {module} has no {name}, and registers no such id; {hint}"
    if _looks_like_a_module(env):
        maker = "parallel_env" if env.startswith("pettingzoo.") else "name_of_a_class_or_function"
        return (
            f"env is {env!r}, which is the name of a module; name what makes the environment in it, too: {env}:{maker}"
        )
    near = _near(name)
    hint = f"did you mean {' or '.join(near)}?" if near else "no known id is like it."
    return (
        f"no environment is called {env!r}; {hint} An id that a package registers when it is imported is written "
        f"module:{name}"
    )


def _near(name: str) -> list[str]:
    """At most three ids that are like a name, capitals, namespaces and versions aside, as ``--env`` takes them. Those
    of packages that are installed are known, too."""
    makers = {known: known for known in (*_registered, *gymnasium.registry)}
    for package in dict.fromkeys(_ID_PACKAGES.values()):
        with contextlib.suppress(Exception), warnings.catch_warnings(action="ignore"):  # not installed, or not working
            gymnasium.register_envs(importlib.import_module(package))
        for new in gymnasium.registry.keys() - makers.keys():
            alone = any(re.match(beginning, new) for beginning in _ID_PACKAGES)
            makers[new] = new if alone else f"{package}:{new}"
    latest: dict[str, str] = {}
    for known in sorted(makers, key=_version):
        latest[_unversioned(known)] = known
    bases: dict[str, list[str]] = {}
    for known in latest.values():
        bases.setdefault(_base(known), []).append(known)
    like: list[str] = []
    for base in difflib.get_close_matches(_base(name), bases, 3, 0.65):
        like += sorted(bases[base], key=lambda known: (-_version(known), -_likeness(name, known)))
    return [makers[known] for known in like[:3]]


def _base(name: str) -> str:
    """An id without namespace and version, in small letters."""
    return _unversioned(name.rpartition("/")[2]).casefold()


def _unversioned(name: str) -> str:
    return re.sub(r"-v\d+$", "", name)


def _likeness(name: str, other: str) -> float:
    return difflib.SequenceMatcher(None, name.casefold(), other.casefold()).ratio()


def _version(name: str) -> int:
    found = re.search(r"-v(\d+)$", name)
    return int(found[1]) if found else -1


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
    except BaseException as error:
        if is_interrupt(error):
            raise
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


def remedy_for(name: str, clues: str, error: Exception) -> str:
    """What to do where something could not be imported: installs a package that the error or the text `clues` names and
    that is missing, or names the latest version of the id `name`."""
    named = [package for package in _EXTRAS if package.lower() in clues.lower()]
    if isinstance(error, ModuleNotFoundError) and error.name:
        named.append(error.name.partition(".")[0])
    if missing := next((package for package in named if importlib.util.find_spec(package) is None), None):
        return _install(missing)
    versions = [known for known in gymnasium.registry if _unversioned(known) == _unversioned(name)]
    newest = max(versions, key=_version, default=name)
    return "install what it needs" if newest == name else f"use {newest}, or install what it needs"


def _install(package: str) -> str:
    """The command that installs a package."""
    top = package.partition(".")[0]
    return installing(_EXTRAS[top]) if top in _EXTRAS else f"pip install {top}"
