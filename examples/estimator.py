"""Train with an advantage estimator of your own.

    python examples/estimator.py
    python -m sfactory.train --env CartPole-v1 --loss.estimator examples.estimator:n_step

An estimator takes what V-trace takes (sfactory.vtrace.unweighted_vtrace) and returns value targets and advantages.
"""

import argparse

import torch
from torch import Tensor

from sfactory import Config, LossConfig, evaluate, train

STEPS = 5


def n_step(
    log_weights: Tensor,
    rewards: Tensor,
    values: Tensor,
    bootstrap_value: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    final_values: Tensor,
    gamma: float,
    lam: float,
    rho_bar: float,
    c_bar: float,
) -> tuple[Tensor, Tensor]:
    """Returns of five steps, uncorrected (as A3C's, Mnih et al. 2016), all tensors [T, B] but bootstrap_value [B]."""
    following = torch.cat((values[1:], bootstrap_value[None]))
    following = torch.where(truncated, final_values, following).masked_fill(terminated, 0.0)
    goes_on = ~(terminated | truncated)
    returns = rewards + gamma * following
    for _ in range(STEPS - 1):  # each pass looks one step further where the episode goes on
        later = torch.cat((returns[1:], bootstrap_value[None]))
        returns = rewards + gamma * torch.where(goes_on, later, following)
    return returns, returns - values


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200_000)
    parser.add_argument("--run", default="runs/estimator")
    args = parser.parse_args()

    loss = LossConfig(estimator=n_step)
    train(Config(env="CartPole-v1", steps=args.steps, run=args.run, overwrite=True, loss=loss))
    result = evaluate(args.run, episodes=20)
    print(f"return {result.return_mean:.1f} +- {result.return_std:.1f}")
