"""Small tasks are solved with the defaults: an environment without a preset of its own, a number of steps and a seed,
nothing else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import small_tasks
from gymnasium import spaces

from sfactory import Config, evaluate, train
from sfactory.config import LogConfig, ModelConfig
from sfactory.player import Evaluation

SEED = 11


def return_mean(result: Evaluation) -> float:
    return result.return_mean


@dataclass(frozen=True)
class Task:
    """What must be reached: a score at least, after so many env steps.

    Attributes:
        core: Of the model, where the task needs memory.
        deterministic: Off where the most probable action may be right without any learning.
        episodes: Of the evaluation; many where a score just below 1 must be told from `least`.
    """

    env: Any
    steps: int
    least: float
    env_kwargs: dict[str, Any] = field(default_factory=dict)
    core: str = "none"
    deterministic: bool = True
    episodes: int = 100
    score: Callable[[Evaluation], float] = return_mean

    def trained(self, folder: Path, seed: int) -> float:
        """The score of a run, in fresh environments."""
        log = LogConfig(display="none", tensorboard=False)
        model = ModelConfig() if self.core == "none" else ModelConfig(core=self.core)
        train(
            Config(
                env=self.env,
                env_kwargs=self.env_kwargs,
                steps=self.steps,
                seed=seed,
                run=str(folder),
                model=model,
                log=log,
            )
        )
        played = {"env": self.env, "env_kwargs": self.env_kwargs, "deterministic": self.deterministic}
        return self.score(evaluate(folder, self.episodes, max_steps=200, **played))


TASKS = {
    "bandit": Task(small_tasks.Bandit, 30_000, 0.95, deterministic=False),
    "password": Task(small_tasks.Password, 50_000, 1.0),
    "memory": Task(small_tasks.Memory, 40_000, 0.95, core="lstm"),
    "catch": Task(small_tasks.Catch, 50_000, 0.95),
    "identity": Task(small_tasks.Identity, 30_000, 98.0, {"space": spaces.Discrete(10)}),
    "identity-multi": Task(small_tasks.Identity, 30_000, 98.0, {"space": spaces.MultiDiscrete([4, 3])}),
    "umbrella": Task(
        small_tasks.UmbrellaChain, 400_000, 0.95, episodes=1000, score=lambda result: result.extras["right"]
    ),
    "frozen-lake": Task("FrozenLake-v1", 60_000, 1.0, {"is_slippery": False}),
    "picked": Task(small_tasks.Picked, 80_000, 18.5),
    "both": Task(small_tasks.Both, 50_000, 19.0),
    "target": Task(small_tasks.Target, 200_000, -1.0),
    "crowd": Task(small_tasks.Crowd, 30_000, 19.5),
}
SLOW = {
    "taxi": Task("Taxi-v4", 300_000, 6.0),
    "cliff-walking": Task("CliffWalking-v1", 300_000, -17.0),
}


@pytest.mark.parametrize("name", TASKS)
def test_the_defaults_solve(name: str, tmp_path: Path, nothing_is_left: None) -> None:
    assert TASKS[name].trained(tmp_path / "run", SEED) >= TASKS[name].least


@pytest.mark.long
@pytest.mark.parametrize("name", SLOW)
def test_the_defaults_solve_what_takes_longer(name: str, tmp_path: Path, nothing_is_left: None) -> None:
    assert SLOW[name].trained(tmp_path / "run", SEED) >= SLOW[name].least
