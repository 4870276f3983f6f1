"""Train with a loss term of your own, and with an auxiliary head that it trains.

    python examples/loss_term.py
    python -m sfactory.train --env CartPole-v1 --model.model examples.loss_term:Predicting \
        --loss.terms examples.loss_term:reward_prediction --loss.term-coefs '{reward_error: 0.5}'

The model's `unroll` returns further outputs by name, here the reward that it expects; the terms read them in
`samples.auxiliary`. Terms are tensors [T, B]; masks, means and logging (as term/reward_error) are not theirs to do.
"""

import argparse

from torch import Tensor, nn

from sfactory import Config, LossConfig, ModelConfig, evaluate, train
from sfactory.losses import TermSamples
from sfactory.model import ActorCritic


class Predicting(ActorCritic):
    """An actor-critic that also predicts the reward of the next step (as in UNREAL, Jaderberg et al. 2017)."""

    def __init__(self, observation, action, config: ModelConfig) -> None:
        super().__init__(observation, action, config)
        self.expected_reward = nn.Linear(self.actor.out_features, 1)

    def unroll(self, obs, first, state=None):
        of_actor, of_critic = self.features(obs, first, state)
        return *self.heads(of_actor, of_critic), {"reward": self.expected_reward(of_actor).squeeze(-1)}


def reward_prediction(samples: TermSamples, config: Config) -> dict[str, Tensor]:
    """Squared error of the predicted reward."""
    return {"reward_error": (samples.auxiliary["reward"] - samples.reward).square()}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200_000)
    parser.add_argument("--run", default="runs/loss_term")
    args = parser.parse_args()

    model, loss = ModelConfig(model=Predicting), LossConfig(terms=reward_prediction, term_coefs={"reward_error": 0.5})
    train(Config(env="CartPole-v1", steps=args.steps, run=args.run, overwrite=True, model=model, loss=loss))
    result = evaluate(args.run, episodes=20, model=model)
    print(f"return {result.return_mean:.1f} +- {result.return_std:.1f}")
