"""sfactory: the fastest way to train a reinforcement-learning agent on one workstation.

Public names are imported on first use, so that ``import sfactory`` costs nothing in processes that need only a part.
"""

from __future__ import annotations

import importlib
import sys
import types
from pathlib import Path
from typing import Any

__version__ = "0.1.0"
_HOME = {
    "Config": "sfactory.config",
    "ModelConfig": "sfactory.config",
    "OptimConfig": "sfactory.config",
    "LossConfig": "sfactory.config",
    "RuntimeConfig": "sfactory.config",
    "LogConfig": "sfactory.config",
    "EvalConfig": "sfactory.config",
    "ConfigError": "sfactory.errors",
    "train": "sfactory.runtime.runner",
    "evaluate": "sfactory.eval",
    "load_policy": "sfactory.policy",
    "register_env": "sfactory.envs",
}
__all__ = list(_HOME)

if not (Path(__file__).parent / "envs").is_dir():  # run from a checkout, where envs/ lies beside sfactory/
    _checkout = Path(__file__).parent.parent / "envs"
    if _checkout.is_dir():
        __path__.append(str(_checkout.parent))


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module 'sfactory' has no attribute {name!r}")


class _Package(types.ModuleType):
    """Keeps the import system from putting the module ``sfactory.train`` in the place of the function of that name."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in _HOME or not isinstance(value, types.ModuleType):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
