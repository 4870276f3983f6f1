"""Presets: defaults for kinds of environments, tuned for return per env step on one machine."""

from __future__ import annotations

import contextlib
import difflib
import importlib
import inspect
import re
from typing import Any

from sfactory.errors import ConfigError

_UPDATES: dict[str, Any] = {"epochs": 4, "optim": {"lr": 1e-3, "minibatches": 8, "schedule": "linear"}}
"""Many small ones: of the default, of classic control and of grid worlds."""
_GRID: dict[str, Any] = {
    "envs_per_worker": 32,
    "rollout": 32,
    "batch_size": 1024,
    "epochs": 2,
    "optim": {"lr": 1e-3, "minibatches": 2, "schedule": "linear"},
    "loss": {"entropy_coef": 0.01},
}
"""Small worlds of cells, whatever the model."""
_CLASSIC: dict[str, Any] = {
    "envs_per_worker": 32,
    "rollout": 32,
    "batch_size": 1024,
    "loss": {"normalize_returns": True},
    "model": {"normalize_obs": True},
}
"""Classic control."""
_MUJOCO: dict[str, Any] = {
    "envs_per_worker": 16,
    "rollout": 128,
    "batch_size": 2048,
    "epochs": 10,
    "optim": {"lr": 3e-4, "minibatches": 16, "schedule": "linear"},
    "loss": {"normalize_returns": True},
    "model": {"normalize_obs": True},
}
"""Gymnasium's MuJoCo, and walkers like those."""
_BOX2D: dict[str, Any] = {
    "envs_per_worker": 32,
    "rollout": 64,
    "batch_size": 2048,
    "epochs": 4,
    "optim": {"lr": 1e-3, "minibatches": 16, "schedule": "linear"},
    "loss": {"gamma": 0.999, "lam": 0.98, "entropy_coef": 0.01, "normalize_returns": True},
    "model": {"normalize_obs": True},
}
"""LunarLander."""
_WITH_CORE = {"classic": "classic_memory"}
"""Presets that another replaces where the model has a core, whose minibatches are of whole rows."""
PRESETS: dict[str, dict[str, Any]] = {
    "default": _UPDATES
    | {
        "loss": {"entropy_coef": 0.01, "normalize_returns": True},
        "model": {"normalize_obs": True},
    },
    "classic": _CLASSIC | _UPDATES | {"loss": _CLASSIC["loss"] | {"gamma": 0.995}, "runtime": {"spare_batches": 0}},
    "classic_memory": _CLASSIC | {"epochs": 2, "optim": {"lr": 2e-3, "minibatches": 4, "schedule": "linear"}},
    "pendulum": {
        "envs_per_worker": 16,
        "rollout": 64,
        "batch_size": 1024,
        "epochs": 10,
        "optim": {"lr": 1e-3, "minibatches": 4, "schedule": "linear"},
        "loss": {"gamma": 0.97, "normalize_returns": True},
        "model": {"normalize_obs": True},
    },
    "box2d": _BOX2D,
    "box2d_low_noise": _BOX2D | {"model": _BOX2D["model"] | {"initial_log_std": -1.0}},
    "mujoco": _MUJOCO,
    "mujoco_in_step": _MUJOCO | {"runtime": {"spare_batches": 0}},
    "mujoco_low_noise": _MUJOCO | {"model": _MUJOCO["model"] | {"initial_log_std": -1.0}},
    "mujoco_few_updates": {
        "envs_per_worker": 32,
        "rollout": 64,
        "batch_size": 4096,
        "epochs": 2,
        "optim": {"lr": 3e-3, "minibatches": 4, "schedule": "linear", "max_grad_norm": 3.5},
        "loss": {"normalize_returns": True},
        "model": {"normalize_obs": True, "initial_log_std": -1.0},
    },
    "mujoco_small_steps": _MUJOCO | {"optim": _MUJOCO["optim"] | {"lr": 1e-4}},
    "mujoco_far_sighted": _MUJOCO
    | {
        "envs_per_worker": 4,
        "rollout": 512,
        "batch_size": 4096,
        "optim": _MUJOCO["optim"] | {"lr": 6e-4},
        "loss": _MUJOCO["loss"] | {"gamma": 0.9999, "lam": 0.98},
    },
    "atari": {
        "envs_per_worker": 8,
        "rollout": 128,
        "batch_size": 1024,
        "epochs": 4,
        "optim": {"lr": 2.5e-4, "minibatches": 4, "schedule": "linear", "hold": 0.8},
        "loss": {"entropy_coef": 0.01, "clip": 0.1, "reward_clip": 1.0, "normalize_returns": True},
        "model": {"normalize_images": True},
    },
    "vizdoom": {
        "envs_per_worker": 16,
        "rollout": 32,
        "batch_size": 1024,
        "epochs": 1,
        "optim": {"lr": 5e-4, "minibatches": 4, "schedule": "linear"},
        "loss": {"entropy_coef": 0.003, "normalize_returns": True},
    },
    "grid": _GRID | _UPDATES | {"model": {"encoder": "mlp", "categories": 11}},
    "car_racing": {
        "envs_per_worker": 16,
        "rollout": 64,
        "batch_size": 1024,
        "epochs": 4,
        "optim": {"lr": 3e-4, "minibatches": 8, "schedule": "linear"},
        "loss": {"normalize_returns": True},
    },
    "procgen": {
        "envs_per_worker": 32,
        "rollout": 64,
        "batch_size": 4096,
        "epochs": 3,
        "optim": {"lr": 5e-4, "minibatches": 8},
        "loss": {"gamma": 0.999, "entropy_coef": 0.01, "normalize_returns": True},
        "model": {"encoder": "impala_resnet", "features": 256},
    },
    "memory": _GRID | {"model": {"features": 128}},
    "tensors": {
        "envs_per_worker": 4096,
        "rollout": 16,
        "batch_size": 65_536,
        "epochs": 4,
        "optim": {"lr": 1e-3, "minibatches": 4, "schedule": "linear"},
        "loss": {"entropy_coef": 0.01, "normalize_returns": True},
        "model": {"normalize_obs": True},
    },
}

_PRESETS_BY_ID: tuple[tuple[str, str], ...] = (
    ("tensors", r"sfactory/Tensor"),
    ("atari", r"ALE/|.*NoFrameskip-v\d"),
    ("vizdoom", r"Vizdoom"),
    ("grid", r"MiniGrid-|BabyAI-"),
    ("memory", r"sfactory/MemoryGrid"),
    ("pendulum", r"Pendulum-|sfactory/Pendulum"),
    ("classic", r"(.*CartPole|Acrobot-|MountainCar-)|sfactory/CartPole"),
    ("box2d_low_noise", r"LunarLanderContinuous-v\d"),
    ("box2d", r"LunarLander"),
    ("car_racing", r"CarRacing-"),
    ("procgen", r"procgen-|procgen_gym/procgen-"),
    ("mujoco_few_updates", r"Ant-v\d"),
    ("mujoco_low_noise", r"HalfCheetah-v\d"),
    ("mujoco_in_step", r"Walker2d-v\d"),
    ("mujoco_small_steps", r"InvertedDoublePendulum-v\d"),
    ("mujoco_far_sighted", r"Swimmer-v\d"),
    (
        "mujoco",
        r"(BipedalWalker(Hardcore)?|Hopper|Humanoid|HumanoidStandup|InvertedPendulum|Pusher|Reacher)-v\d",
    ),
)


def preset_for_env(env: Any) -> str:
    """The name of the preset for an environment; `default` for most callables and for unknown ids. An id without a
    version has that of its versions."""
    if takes_device(env):
        return "tensors"
    if not isinstance(env, str):
        return "default"
    name = env.rpartition(":")[2]
    if not (re.search(r"-v\d+$", name) or callable(_named(env))):
        name += "-v0"
    return next((preset for preset, pattern in _PRESETS_BY_ID if re.match(pattern, name)), "default")


def takes_device(env: Any) -> bool:
    """Whether an environment is made with ``num_envs`` and ``device``, as those are whose steps are tensors: a callable
    or the ``module:Name`` of one."""
    with contextlib.suppress(Exception, SystemExit):  # what is wrong with it is told by who makes it
        env = _named(env) if isinstance(env, str) else env
        return callable(env) and {"num_envs", "device"} <= inspect.signature(env).parameters.keys()
    return False


def _named(env: str) -> Any:
    """What a ``module:Name`` names; None for an id."""
    module, colon, name = env.rpartition(":")
    with contextlib.suppress(Exception, SystemExit):
        return getattr(importlib.import_module(module), name, None) if colon else None
    return None


def preset_for(preset: str, env: Any, algo: str = "appo", core: Any = "none") -> tuple[str, dict[str, Any]]:
    """The name and the nested values of the preset that a config asks for.

    The presets' passes over a batch rest on PPO's clip; the plain policy gradient of impala makes one.

    Raises:
        ConfigError: If there is no preset of that name.
    """
    if preset == "none":
        return "none", {}
    name = preset
    if preset == "auto":
        name = preset_for_env(env)
        name = name if core == "none" else _WITH_CORE.get(name, name)
    if not isinstance(name, str) or name not in PRESETS:
        near = difflib.get_close_matches(str(preset), PRESETS, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise ConfigError(f"unknown preset {preset!r}; {hint}use auto, none or one of {', '.join(PRESETS)}")
    return name, PRESETS[name] | ({"epochs": 1} if algo == "impala" else {})
