"""Small runs in the test's own process, and what they leave behind."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import psutil

from sfactory import Config
from sfactory.config import EvalConfig, LogConfig
from sfactory.runs.checkpoint import CheckpointStore

BATCH = 128
QUIET = LogConfig(report_every_s=0.05, display="none", tensorboard=False)


def config_for(folder: Path, env: Any, **changes: Any) -> Config:
    """A small run on one worker."""
    settings = {
        "steps": 2048,
        "workers": 1,
        "envs_per_worker": 8,
        "rollout": 16,
        "batch_size": BATCH,
        "preset": "none",
        "device": "cpu",
    }
    settings["log"] = QUIET
    settings["eval"] = EvalConfig(at_end=False)  # which on a busy machine also small runs are long enough for
    return Config(env=env, run=str(folder / "run"), **settings | changes)


def summary(run: Path) -> dict[str, Any]:
    return json.loads((run / "summary.json").read_text())


def rows(run: Path) -> list[dict[str, str]]:
    """The reports in metrics.csv."""
    with (run / "metrics.csv").open() as file:
        return list(csv.DictReader(file))


def last_known(run: Path) -> dict[str, str]:
    """What the last report says, and those before where it knows nothing."""
    return {name: value for row in rows(run) for name, value in row.items() if value}


def saved_steps(run: Path) -> int:
    """Env steps of the newest checkpoint."""
    snapshot = CheckpointStore(run / "checkpoints").load_latest()
    return 0 if snapshot is None else snapshot.env_steps


def worker_process(name: str) -> psutil.Process:
    """A living worker process of a run of this process."""
    return next(p for p in psutil.Process().children(recursive=True) if p.name() == f"sf-{name}")
