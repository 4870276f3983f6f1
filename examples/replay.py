"""Train with replay: half of every batch is experience from before.

    python examples/replay.py
    python -m sfactory.train --env CartPole-v1 --batch-source examples.replay:Replay

A batch source gets the fresh segments of every batch and puts others behind them. V-trace corrects for what the policy
has become since; the clip keeps each update near the present policy, whatever the age of a sample (as in IMPACT, Luo et
al. 2020).
"""

import argparse
import dataclasses
from collections import deque

import torch

from sfactory import Config, evaluate, train
from sfactory.data.batch import Batch


class Replay:
    """Puts one of the last batches, drawn at random, behind the fresh columns.

    Args:
        fresh: Number of fresh columns in a batch.
        config: Configuration of the run.
        size: Batches that are kept.
    """

    def __init__(self, fresh: int, config: Config, size: int = 16) -> None:
        self.columns = 2 * fresh
        self.memory: deque[Batch] = deque(maxlen=size)
        self.generator = torch.Generator().manual_seed(config.seed)

    def __call__(self, fresh: Batch) -> Batch:
        if self.memory:
            old = self.memory[int(torch.randint(len(self.memory), (), generator=self.generator))]
        else:  # samples that are not active do not count
            old = dataclasses.replace(fresh, active=torch.zeros_like(fresh.active))
        batch = fresh.beside(old)
        self.memory.append(fresh.copy())
        return batch


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--run", default="runs/replay")
    args = parser.parse_args()

    train(Config(env="CartPole-v1", steps=args.steps, run=args.run, overwrite=True, batch_source=Replay))
    result = evaluate(args.run, episodes=20)
    print(f"return {result.return_mean:.1f} +- {result.return_std:.1f}")
