"""Run folders for the tests of what uses them: made in a second, in one process."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sfactory.config import Config, LogConfig
from sfactory.runs.checkpoint import CheckpointStore
from sfactory.runs.run_folder import RunFolder, open_run
from sfactory.runtime.runner import train


@contextlib.contextmanager
def begun_run(config: Config) -> Iterator[RunFolder]:
    """The folder of a run that has begun and not reported."""
    with open_run(config) as run:
        run.begin()
        yield run


def short_run(folder: Path, env: Any, **changes: Any) -> Path:
    """Train for a few env steps; gives the run folder."""
    settings = {
        "steps": 128,
        "envs_per_worker": 4,
        "rollout": 8,
        "batch_size": 64,
        "preset": "none",
        "device": "cpu",
        "serial": True,
        "log": LogConfig(display="none", tensorboard=False),
    }
    train(Config(env=env, run=str(folder), **settings | changes))
    return folder


def favour(run: Path, category: int, by: float = 5.0, episode_return: float | None = None) -> None:
    """Add a checkpoint, said to have reached a return, whose policy prefers one category by so much in the logits,
    whatever it sees."""
    store = CheckpointStore(run / "checkpoints")
    snapshot = store.load_latest()
    weights = dict(snapshot.model)
    weights["policy.linear.weight"] = weights["policy.linear.weight"] * 0
    weights["policy.linear.bias"] = weights["policy.linear.bias"] * 0
    weights["policy.linear.bias"][category] = by
    store.save(
        dataclasses.replace(snapshot, model=weights, env_steps=snapshot.env_steps + 1, episode_return=episode_return)
    )
