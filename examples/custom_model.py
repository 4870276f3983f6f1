"""Train with an encoder of your own.

    python examples/custom_model.py
    python -m sfactory.train --env CartPole-v1 --model.encoder examples.custom_model:FourierEncoder \
        --model.kwargs '{frequencies: 64}'

It is made once for each leaf of the observation, and tells the width of its features in `out_features`.
"""

import argparse
import math

import torch
from torch import nn

from sfactory import Config, ModelConfig, evaluate, train
from sfactory.spaces import Leaf


class FourierEncoder(nn.Module):
    """Learned Fourier features: sines and cosines of linear maps of a vector (Tancik et al., NeurIPS 2020)."""

    def __init__(self, leaf: Leaf, frequencies: int = 32) -> None:
        super().__init__()
        self.project = nn.Linear(math.prod(leaf.shape), frequencies)
        self.mix = nn.Sequential(nn.Linear(2 * frequencies, 64), nn.Tanh())
        self.out_features = 64

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        angles = self.project(x.float().flatten(1))
        return self.mix(torch.cat((angles.sin(), angles.cos()), -1))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200_000)
    parser.add_argument("--run", default="runs/fourier")
    args = parser.parse_args()

    model = ModelConfig(encoder=FourierEncoder, kwargs={"frequencies": 64})
    train(Config(env="CartPole-v1", steps=args.steps, run=args.run, overwrite=True, model=model))
    # A class is not written into the run folder, so evaluation is told it again.
    result = evaluate(args.run, episodes=20, model=model)
    print(f"return {result.return_mean:.1f} +- {result.return_std:.1f}")
