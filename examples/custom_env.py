"""Train on an environment of your own.

    python examples/custom_env.py

It may be any class or callable that makes a ``gymnasium.Env``, also one of the script itself; worker processes get it
by value.
"""

import argparse

import gymnasium
import numpy as np
from gymnasium import spaces

from sfactory import Config, evaluate, train


class Catch(gymnasium.Env):
    """Move a paddle under a falling ball: +1 for a catch, -1 for a miss."""

    def __init__(self, width: int = 7, height: int = 10) -> None:
        self.width, self.height = width, height
        self.observation_space = spaces.Box(-1.0, 1.0, (3,))
        self.action_space = spaces.Discrete(3)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.ball, self.paddle = self.np_random.integers(self.width, size=2)
        self.fallen = 0
        return self._observe(), {}

    def step(self, action):
        self.paddle = min(max(self.paddle + action - 1, 0), self.width - 1)
        self.fallen += 1
        landed = self.fallen == self.height
        reward = (1.0 if self.paddle == self.ball else -1.0) if landed else 0.0
        return self._observe(), reward, landed, False, {"caught": float(reward > 0)}

    def _observe(self):
        return np.array(
            [(self.ball - self.paddle) / self.width, self.paddle / self.width, self.fallen / self.height], np.float32
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--run", default="runs/catch")
    args = parser.parse_args()

    # Ids have a preset by their name; for an environment of your own, name the family that is most like it.
    train(Config(env=Catch, env_kwargs={"width": 9}, steps=args.steps, run=args.run, preset="classic", overwrite=True))
    # A class is not written into the run folder, so evaluation is told it again.
    result = evaluate(args.run, episodes=100, env=Catch)
    print(f"return {result.return_mean:.2f}, caught {result.extras['caught']:.0%}")
