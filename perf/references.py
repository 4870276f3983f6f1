"""The learning references: what the presets alone must reach, and after how many env steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sfactory.runs.curves import interquartile_mean

SEEDS = (11, 12, 13, 14, 15)
"""Seeds that tune nothing, but that 11 and 12 chose loss.tv_limit (docs/lag.md)."""


@dataclass(frozen=True)
class Reference:
    """A task of perf.learning.

    Attributes:
        name: Of its run folders and curves.
        env: As for ``--env``.
        steps: Env steps of training.
        expected: What the interquartile mean over seeds must reach, each the mean of 50 evaluation episodes; with
            `at_most` what it must not exceed, where an agent is shown to lack what the task needs.
        minutes: What a seed takes on two cores, roughly.
        peer: What others have published.
        flags: Besides the preset.
        same_since: A commit from which on seeds count together, else only those of the newest commit do. It claims that
            ``train --serial`` has the same weights then and now, but for 9e2a74d, which gave policies other seeds.
        sampled: Whether evaluation draws actions, as it does where the published figure comes from; else it takes the
            most probable ones.
    """

    name: str
    env: str
    steps: int
    expected: float
    minutes: float
    peer: str = ""
    flags: tuple[str, ...] = ()
    at_most: bool = False
    sampled: bool = False
    same_since: str = ""

    @property
    def measure(self) -> str:
        """What a score is called in perf/data/learning.csv."""
        return "evaluation, sampled" if self.sampled else "evaluation"

    @property
    def env_name(self) -> str:
        """Of the environment, without its module."""
        return self.env.removesuffix(":parallel_env").split(":")[-1]

    @property
    def seeds(self) -> tuple[int, ...]:
        """As many as their time allows."""
        return SEEDS[: 5 if self.minutes <= 10 else 3 if self.minutes <= 90 else 1]

    def command(self, seed: int) -> list[str]:
        """Flags of ``sfactory.train`` besides the run folder."""
        return ["--env", self.env, "--steps", str(self.steps), "--seed", str(seed), *self.flags]

    def missed(self, scores: Sequence[float]) -> bool:
        """Whether the score is on the wrong side."""
        score = float(interquartile_mean(np.array(scores, float)[:, None])[0])
        return score > self.expected if self.at_most else score < self.expected


_LSTM = ("--model.core", "lstm")
_BREAKOUT = "BreakoutNoFrameskip-v4"
_MASKED = "examples.masked_cartpole:MaskedCartPole-v0"
REFERENCES = [
    Reference("cartpole", "CartPole-v1", 100_000, 500, 0.2, "SB3 zoo 500"),
    Reference("cartpole-lstm", _MASKED, 300_000, 500, 0.5, "SB3 zoo 500", _LSTM),
    Reference("acrobot", "Acrobot-v1", 500_000, -80, 1, "SB3 zoo -73"),
    Reference("mountaincar", "MountainCar-v0", 1_000_000, -110, 1, "SB3 zoo -110"),
    Reference("pendulum", "Pendulum-v1", 200_000, -160, 0.5, "SB3 zoo -172"),
    Reference("mountaincar-continuous", "MountainCarContinuous-v0", 200_000, 90, 0.2, "SB3 zoo 88 at 20,000"),
    Reference("lunarlander", "LunarLander-v3", 1_000_000, 260, 2, "SB3 zoo 242"),
    Reference("lunarlander-continuous", "LunarLanderContinuous-v3", 1_000_000, 260, 2, "SB3 zoo 271"),
    Reference("bipedalwalker", "BipedalWalker-v3", 3_000_000, 280, 12, "SB3 zoo 287 at 5M"),
    Reference("double-pendulum", "InvertedDoublePendulum-v5", 1_000_000, 7500, 2, "SB3 1,508 to 7,465"),
    Reference("swimmer", "Swimmer-v5", 1_000_000, 280, 2, "SB3 zoo 282"),
    Reference("hopper", "Hopper-v5", 1_000_000, 2500, 2, "SB3 zoo 2,410"),
    Reference("walker2d", "Walker2d-v5", 1_000_000, 3500, 2.5, "SB3 zoo 3,479"),
    Reference("halfcheetah", "HalfCheetah-v5", 1_000_000, 5800, 2, "SB3 zoo 5,819"),
    Reference("ant", "Ant-v5", 1_000_000, 2000, 5, "SB3 zoo 1,327"),
    Reference("halfcheetah-10m", "HalfCheetah-v5", 10_000_000, 6300, 20, "Sample Factory 6,263"),
    Reference("ant-10m", "Ant-v5", 10_000_000, 5900, 20, "Sample Factory 5,876", same_since="da31fdf"),
    Reference("humanoid-10m", "Humanoid-v5", 10_000_000, 5000, 60),
    Reference("doorkey", "MiniGrid-DoorKey-6x6-v0", 500_000, 0.95, 2, "SB3 zoo"),
    Reference("memory-s7", "MiniGrid-MemoryS7-v0", 2_000_000, 0.9, 20, "SB3 zoo", _LSTM),
    # FrozenLake-v1 with this map ends after 100 steps, in which the best policy reaches 0.64.
    Reference("frozenlake", "FrozenLake8x8-v1", 1_000_000, 0.7, 2, "optimum 0.91"),
    Reference("taxi", "Taxi-v4", 1_000_000, 7.5, 2, "optimum about 8"),
    Reference("pong-classic", "PongNoFrameskip-v4", 2_500_000, 20, 36, "CleanRL", sampled=True, same_since="309a2bd"),
    Reference("pong", "ALE/Pong-v5", 5_000_000, 18, 150, "Sample Factory", sampled=True),
    Reference("breakout-quarter", _BREAKOUT, 2_500_000, 200, 50, "SB3 398 at 10M", sampled=True, same_since="16a1006"),
    Reference("breakout-classic", _BREAKOUT, 10_000_000, 400, 240, "SB3 zoo 398", sampled=True),
    Reference("vizdoom-basic", "VizdoomBasic-v1", 300_000, 80, 5, "Sample Factory"),
    Reference("vizdoom-center", "VizdoomDefendCenter-v1", 2_000_000, 20, 80, "Sample Factory"),
    Reference("vizdoom-gathering", "VizdoomHealthGathering-v1", 2_000_000, 2000, 40, "most 2,100"),
    Reference("grid-world", "examples.grid_world:GridWorld-v0", 300_000, 1, 0.5),
    Reference("spread", "mpe2.simple_spread_v3:parallel_env", 300_000, -22, 1, "SB3 -22 at 200k"),
    Reference("memory", "sfactory/MemoryGrid", 500_000, 0.9, 0.5, "", _LSTM),
    # Without memory every door is a coin's toss: 50 episodes have mean 0 and standard error 0.14.
    Reference("memory-blind", "sfactory/MemoryGrid", 500_000, 0.5, 0.5, at_most=True),
]
BY_NAME = {reference.name: reference for reference in REFERENCES}
