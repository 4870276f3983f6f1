"""Plans of one worker and a few environments, for the tests of a run's parts by themselves."""

from __future__ import annotations

from typing import Any

from sfactory.config import Config, resolve
from sfactory.profiling.ceiling import with_threads
from sfactory.runtime.plan import Plan
from sfactory.runtime.planning import make_plan


def small_config(env: Any, **settings: Any) -> Config:
    """A resolved config of one worker with 8 environments."""
    small = {"workers": 1, "envs_per_worker": 8, "rollout": 8, "batch_size": 64, "preset": "none", "device": "cpu"}
    return resolve(Config(env=env, **small | settings))


def small_plan(env: Any, **settings: Any) -> Plan:
    """The same as a plan, with one thread for each role."""
    return with_threads(make_plan(small_config(env, **settings)), 1)
