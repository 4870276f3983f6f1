"""Train with an action distribution of your own.

    python examples/distribution.py
    python -m sfactory.train --env Pendulum-v1 --model.distribution examples.distribution:Beta

It turns `width` parameters of the policy into actions: K categorical components and D continuous values between -1 and
1, which are scaled to the bounds of the action space.
"""

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor

from sfactory import Config, ModelConfig, evaluate, train
from sfactory.distributions import Distribution


class Beta(Distribution):
    """Independent Beta distributions over the bounds of a Box, which no sample leaves (Chou et al. 2017)."""

    @property
    def width(self) -> int:
        return 2 * self.action.continuous

    def _beta(self, params: Tensor) -> torch.distributions.Beta:
        alpha, beta = (1.0 + F.softplus(params)).chunk(2, -1)
        return torch.distributions.Beta(alpha, beta)

    def log_prob(self, params: Tensor, categorical: Tensor, continuous: Tensor, mask: Tensor | None = None) -> Tensor:
        return self._beta(params).log_prob(self._share(continuous)).sum(-1)

    def entropy(self, params: Tensor, mask: Tensor | None = None) -> Tensor:
        return self._beta(params).entropy().sum(-1)

    def sample(
        self, params: Tensor, mask: Tensor | None = None, generator: torch.Generator | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        alpha, beta = (1.0 + F.softplus(params)).chunk(2, -1)
        gammas = torch._standard_gamma(torch.stack((alpha, beta)), generator=generator)
        continuous = 2.0 * gammas[0] / gammas.sum(0) - 1.0
        none = torch.zeros(*params.shape[:-1], 0, dtype=torch.int32)
        return none, continuous, self.log_prob(params, none, continuous)

    def mode(self, params: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        mean = self._beta(params).mean
        return torch.zeros(*params.shape[:-1], 0, dtype=torch.int32), 2.0 * mean - 1.0

    @staticmethod
    def _share(continuous: Tensor) -> Tensor:
        return ((continuous + 1.0) / 2.0).clamp(1e-6, 1.0 - 1e-6)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200_000)
    parser.add_argument("--run", default="runs/beta")
    args = parser.parse_args()

    model = ModelConfig(distribution=Beta)
    train(Config(env="Pendulum-v1", steps=args.steps, run=args.run, overwrite=True, model=model))
    result = evaluate(args.run, episodes=20, model=model)
    print(f"return {result.return_mean:.1f} +- {result.return_std:.1f}")
