"""What reports tell the rest of a run."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from environments import Counting
from whole_runs import QUIET, config_for

from sfactory import train
from sfactory.runs.checkpoint import CheckpointStore


def test_only_a_whole_window_of_episodes_makes_a_checkpoint_the_best(tmp_path: Path) -> None:
    """Also after resuming, when the window begins anew."""
    config = config_for(
        tmp_path, env=Counting, serial=True, steps=32_768, log=dataclasses.replace(QUIET, episode_window=5)
    )
    assert train(config).status == "completed"
    store = CheckpointStore(config.run_dir / "checkpoints")
    settled = store.load_latest()
    assert settled.episode_return > 0
    longer = dataclasses.replace(config, steps=40_960, log=dataclasses.replace(QUIET, episode_window=10_000))
    assert train(longer).episode_return_mean > 0, "which reports tell all the same"
    assert store.load_latest().episode_return is None
    assert store.load_best().env_steps == settled.env_steps < store.load_latest().env_steps
