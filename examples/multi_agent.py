"""Train several agents that share one policy, in a PettingZoo parallel environment: every agent is a row of the batch.

    python examples/multi_agent.py

A game that comes with PettingZoo is trained in the same way, for example ``Config(env=pistonball_v6.parallel_env,
env_kwargs={...})``.
"""

import argparse

import numpy as np
from gymnasium import spaces
from pettingzoo import ParallelEnv

from sfactory import Config, evaluate, train


class Rendezvous(ParallelEnv):
    """Two agents on a ring must meet; every step that they are apart costs both of them 0.1."""

    def __init__(self, cells: int = 12, limit: int = 30) -> None:
        self.cells, self.limit = cells, limit
        self.possible_agents = ["left", "right"]
        self.random = np.random.default_rng()
        self.seen = spaces.Dict(distance=spaces.Discrete(cells), role=spaces.Discrete(2))
        self.moves = spaces.Discrete(3)

    def observation_space(self, agent):
        return self.seen

    def action_space(self, agent):
        return self.moves

    def reset(self, seed=None, options=None):
        if seed is not None:
            self.random = np.random.default_rng(seed)
        self.agents, self.steps = list(self.possible_agents), 0
        self.places = self.random.choice(self.cells, 2, replace=False)
        return self._observe(), {agent: {} for agent in self.agents}

    def step(self, actions):
        self.places = (self.places + [actions[agent] - 1 for agent in self.agents]) % self.cells
        self.steps += 1
        met = bool(self.places[0] == self.places[1])
        late = not met and self.steps == self.limit
        parts = [dict.fromkeys(self.agents, value) for value in (1.0 if met else -0.1, met, late, {})]
        observations = self._observe()
        if met or late:
            self.agents = []
        return observations, *parts

    def _observe(self):
        return {
            agent: {"distance": (self.places[1 - i] - self.places[i]) % self.cells, "role": i}
            for i, agent in enumerate(self.agents)
        }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200_000)
    parser.add_argument("--run", default="runs/rendezvous")
    args = parser.parse_args()

    train(Config(env=Rendezvous, steps=args.steps, run=args.run, overwrite=True))
    result = evaluate(args.run, episodes=100, env=Rendezvous)
    print(f"return of an agent {result.return_mean:.2f}, steps until they meet {result.length_mean:.1f}")
