"""What the learner minimises, in two halves: the targets of a batch, and the gradient of the loss with respect to a
network's outputs.

Targets are made once, when a batch is begun, with the proximal policy: the weights of that moment. V-trace corrects
from the policy that sampled to the proximal one; all epochs then keep near the proximal policy (decoupled PPO: Hilton
et al. 2022; IMPACT: Luo et al. 2020).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sfactory.config import Config
from sfactory.data.arena import OWN_POLICY
from sfactory.data.batch import Batch, Samples
from sfactory.data.chunks import Columns
from sfactory.distributions import ActionDistribution
from sfactory.gae import gae_torch
from sfactory.losses import BatchStats, Targets, batch_stats, chunk_loss, weighted_advantages
from sfactory.model.normalizer import CriticUnits
from sfactory.spaces import ActionSpec
from sfactory.vtrace import unweighted_vtrace

Evaluation = Any
"""The policy's densities on a chunk: what an objective's `evaluate` gives to its other methods."""


@dataclass
class _Evaluation:
    """The outputs, and what follows from them for the actions that were taken."""

    params: Tensor
    value: Tensor
    log_prob: Tensor
    exploration: Tensor


class Estimates(NamedTuple):
    """What the proximal policy makes of what happened, ``[T, n]``, in units of return.

    Attributes:
        log_prob: log pi_prox(a_t|x_t).
        log_weights: log pi_prox(a_t|x_t) - log mu(a_t|x_t).
        values: Of its critic, V(x_t).
        advantages: Without weights.
        returns: Value targets.
        valid: bool; the samples that this learner's policy is trained on.
    """

    log_prob: Tensor
    log_weights: Tensor
    values: Tensor
    advantages: Tensor
    returns: Tensor
    valid: Tensor


class Gradients(NamedTuple):
    """Of a chunk's share of the loss.

    Attributes:
        params: With respect to the policy's parameters, in the shape of the network's outputs.
        value: With respect to the values, likewise.
        sums: For :func:`sfactory.losses.loss_stats`.
    """

    params: Tensor
    value: Tensor
    sums: Tensor


class Objective:
    """Targets and loss in tensor operations, on any device and without waiting for it.

    Args:
        config: Of the run.
        action: The action space.
        units: In which the critic predicts returns.
    """

    def __init__(self, config: Config, action: ActionSpec, units: CriticUnits) -> None:
        self.config, self.action, self.units = config, action, units
        self._distribution = ActionDistribution(action)

    def evaluate(self, params: Tensor, value: Tensor, samples: Batch | Samples, columns: Columns) -> Evaluation:
        """The present policy's densities of the actions that were taken.

        Args:
            params: Policy parameters float32 ``[T, n, P]``, or ``[T+1, n, P]`` on a batch; no gradient goes back
                through them.
            value: Values float32 ``[T, n]`` or ``[T+1, n]``, likewise.
            samples: What happened.
            columns: Which of its columns the chunk has.
        """
        params, value = params.detach().requires_grad_(), value.detach().requires_grad_()
        categorical, continuous, mask = samples.actions(columns)
        own = params[: len(continuous)]
        if self.config.loss.exploration == "entropy":
            log_prob, exploration = self._distribution.log_prob_and_entropy(own, categorical, continuous, mask)
        else:
            log_prob = self._distribution.log_prob(own, categorical, continuous, mask)
            exploration = self._distribution.kl_from_uniform(own, mask)
        return _Evaluation(params, value, log_prob, exploration)

    def estimate(self, evaluation: Evaluation, batch: Batch, columns: Columns) -> Estimates:
        """What the policy of an evaluation, the proximal one, makes of a chunk of a batch: V-trace's estimates, or
        GAE's for algo ppo."""
        chunk, loss = batch.select(columns), self.config.loss
        log_prob, values = evaluation.log_prob.detach(), self.units.to_returns(evaluation.value.detach())
        log_weights, ends = log_prob - chunk.log_prob, (chunk.terminated, chunk.truncated)
        outcome = self._rewards(chunk), values[:-1], values[-1], *ends, final_values(chunk, values)
        if self.config.algo == "ppo":
            advantages, returns = gae_torch(*outcome, loss.gamma, loss.lam)
        else:
            returns, advantages = unweighted_vtrace(
                log_weights, *outcome, loss.gamma, loss.lam, loss.rho_bar, loss.c_bar
            )
        return Estimates(log_prob, log_weights, values[:-1], advantages, returns, valid_samples(chunk))

    def targets(self, chunks: Sequence[Estimates]) -> tuple[Targets, BatchStats]:
        """The targets of a whole batch ``[T, B]``, whose columns the chunks are, in order; the critic's units learn of
        its returns."""
        whole = (
            Estimates(*(torch.cat(parts, 1) for parts in zip(*chunks, strict=True))) if len(chunks) > 1 else chunks[0]
        )
        loss, valid, weights = self.config.loss, whole.valid, whole.log_weights.exp()
        weights = torch.ones_like(weights) if self.config.algo == "ppo" else weights.clamp(max=loss.rho_bar_pg)
        advantages, mean, std = weighted_advantages(loss, whole.advantages, weights, valid)
        self.units.update(whole.returns, valid)
        returns, values = self.units.from_returns(whole.returns), self.units.from_returns(whole.values)
        return Targets(advantages, returns, values, whole.log_prob, valid), batch_stats(
            whole.log_weights, mean, std, valid
        )

    def gradients(self, evaluation: Evaluation, targets: Targets, columns: Columns, count: Tensor) -> Gradients:
        """The gradients of a chunk's share of the loss.

        Args:
            targets: Of all columns.
            columns: Which of them the chunk has.
            count: Number of valid samples of all chunks of the minibatch.
        """
        config, own = self.config, evaluation
        value = own.value[: len(own.log_prob)]
        loss, sums = chunk_loss(
            config.loss, config.algo, own.log_prob, value, own.exploration, targets.select(columns), count
        )
        return Gradients(*torch.autograd.grad(loss, (own.params, own.value), materialize_grads=True), sums)

    def _rewards(self, batch: Batch) -> Tensor:
        loss = self.config.loss
        reward = batch.reward if loss.reward_scale == 1.0 else batch.reward * loss.reward_scale
        return reward.clamp(-loss.reward_clip, loss.reward_clip) if loss.reward_clip > 0 else reward


def final_values(batch: Batch, values: Tensor) -> Tensor:
    """V(final_obs) where an episode was truncated: of the row that rests at t+1, or as stored where the environment
    could not rest.

    Args:
        values: ``[T+1, B]``, in units of return.
    """
    return torch.where(batch.final_value.isnan(), values[1:], batch.final_value)


def valid_samples(batch: Batch) -> Tensor:
    """bool ``[T, B]``; the samples that this learner's policy is trained on."""
    return batch.active[:-1] & (batch.owner == OWN_POLICY)
