"""What the learner minimises: from a network's outputs on a chunk of a batch to the gradient with respect to them.

The loss needs moments of all chunks of a minibatch, so a chunk is evaluated first and differentiated when all are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sfactory.batch import Batch
from sfactory.chunks import Columns
from sfactory.config import Config
from sfactory.distributions import ActionDistribution
from sfactory.gae import gae_for
from sfactory.losses import Targets, advantage_moments, chunk_loss, joint_moments
from sfactory.model.normalizer import RunningMeanStd
from sfactory.spaces import ActionSpec
from sfactory.vtrace import vtrace_for

OWN_POLICY = 0
Evaluation = Any
"""A chunk before its gradients: what an objective's `evaluate` gives to its other methods."""


@dataclass
class _Evaluation:
    """The outputs and what follows from them, targets, and moments of the advantages."""

    params: Tensor
    value: Tensor
    log_prob: Tensor
    exploration: Tensor
    targets: Targets
    moments: Tensor


class Gradients(NamedTuple):
    """Of a chunk.

    Attributes:
        params: ``[T+1, B, P]``, with respect to the policy's parameters.
        value: ``[T+1, B]``, with respect to the values.
        sums: For :func:`sfactory.losses.loss_stats`.
    """

    params: Tensor
    value: Tensor
    sums: Tensor


class Objective:
    """The loss in tensor operations, on any device and without waiting for it.

    Args:
        config: Of the run.
        action: The action space.
        returns: Running moments that returns are normalised with, or None.
        device: Where the tensors are.
    """

    def __init__(self, config: Config, action: ActionSpec, returns: RunningMeanStd | None, device: torch.device) -> None:
        self.config, self.action, self.returns = config, action, returns
        self._distribution = ActionDistribution(action)
        self._vtrace, self._gae = vtrace_for(device), gae_for(device)

    def evaluate(self, params: Tensor, value: Tensor, batch: Batch, columns: Columns, fixed: Targets | None = None) -> Evaluation:
        """All of a chunk that comes before the gradients.

        Args:
            params: Policy parameters float32 ``[T+1, n, P]`` of the present weights; no gradient goes back through them.
            value: Values float32 ``[T+1, n]`` of the present weights, likewise.
            batch: What happened.
            columns: Which of its columns the chunk has.
            fixed: Targets of the batch that do not change over the epochs (GAE); V-trace's otherwise.
        """
        chunk = batch.select(columns)
        params, value = params.detach().requires_grad_(), value.detach().requires_grad_()
        log_prob, exploration = self._densities(params[:-1], chunk)
        targets = self._vtrace_targets(chunk, log_prob.detach(), value.detach()) if fixed is None else fixed.select(columns)
        return _Evaluation(params, value, log_prob, exploration, targets, advantage_moments(targets))

    def joint(self, evaluations: Sequence[Evaluation], fixed: bool) -> Tensor:
        """Moments of the advantages of all chunks of a minibatch; also brings returns into the critic's units unless they are `fixed`."""
        if not fixed and self.returns is not None:
            returns, valid = ([getattr(each.targets, name) for each in evaluations] for name in ("returns", "valid"))
            for each, normalized in zip(evaluations, self.normalized(returns, valid), strict=True):
                each.targets = replace(each.targets, returns=normalized)
        return joint_moments(torch.stack([each.moments for each in evaluations]))

    def gradients(self, evaluation: Evaluation, moments: Tensor) -> Gradients:
        """The gradients of a chunk's share of the loss; `moments` are those of all chunks."""
        config, own = self.config, evaluation
        loss, sums = chunk_loss(config.loss, config.algo, own.log_prob, own.value[:-1], own.exploration, own.targets, moments)
        return Gradients(*torch.autograd.grad(loss, (own.params, own.value), materialize_grads=True), sums)

    def normalized(self, returns: Sequence[Tensor], valid: Sequence[Tensor]) -> list[Tensor]:
        """Returns ``[T, n]`` of several chunks in the critic's units; the running moments learn of them first."""
        if self.returns is None:
            return list(returns)
        self.returns.update(torch.cat(tuple(returns), 1), torch.cat(tuple(valid), 1))
        return [(each - self.returns.mean) / self.returns.std for each in returns]

    def gae_targets(self, batch: Batch, value: Tensor) -> Targets:
        """Targets of a whole batch, with normalised returns, by generalised advantage estimation from the values ``[T+1, B]``."""
        loss, values = self.config.loss, self._true_values(value)
        advantages, returns = self._gae(
            self._rewards(batch), values[:-1], values[-1], batch.terminated, batch.truncated, self.final_values(batch, values),
            loss.gamma, loss.lam,
        )  # fmt: skip
        targets = self._targets(batch, advantages, returns)
        return replace(targets, returns=self.normalized([returns], [targets.valid])[0])

    def final_values(self, batch: Batch, values: Tensor) -> Tensor:
        """V(final_obs) where an episode was truncated: of the row that rests at t+1, or as stored where the environment could not rest.

        Args:
            values: ``[T+1, B]``, in units of return.
        """
        stored = self._true_values(batch.final_value)
        return torch.where(stored.isnan(), values[1:], stored)

    def _densities(self, params: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Log-probabilities of the actions and the exploration bonus, each ``[T, B]``."""
        mask = None if batch.mask is None else batch.mask[:-1]
        if self.config.loss.exploration == "entropy":
            return self._distribution.log_prob_and_entropy(params, batch.categorical, batch.continuous, mask)
        log_prob = self._distribution.log_prob(params, batch.categorical, batch.continuous, mask)
        return log_prob, self._distribution.kl_from_uniform(params, mask)

    def _vtrace_targets(self, batch: Batch, log_prob: Tensor, value: Tensor) -> Targets:
        loss, values = self.config.loss, self._true_values(value)
        vs, advantages = self._vtrace(
            log_prob - batch.log_prob, self._rewards(batch), values[:-1], values[-1], batch.terminated, batch.truncated,
            self.final_values(batch, values), loss.gamma, loss.lam, loss.rho_bar, loss.c_bar, loss.rho_bar_pg,
        )  # fmt: skip
        return self._targets(batch, advantages, vs)

    @staticmethod
    def _targets(batch: Batch, advantages: Tensor, returns: Tensor) -> Targets:
        return Targets(advantages, returns, batch.value[:-1], batch.log_prob, valid_samples(batch))

    def _rewards(self, batch: Batch) -> Tensor:
        loss = self.config.loss
        reward = batch.reward if loss.reward_scale == 1.0 else batch.reward * loss.reward_scale
        return reward.clamp(-loss.reward_clip, loss.reward_clip) if loss.reward_clip > 0 else reward

    def _true_values(self, value: Tensor) -> Tensor:
        """The critic's output in units of return."""
        return value if self.returns is None else value * self.returns.std + self.returns.mean


def valid_samples(batch: Batch) -> Tensor:
    """bool ``[T, B]``; the samples that this learner's policy is trained on."""
    return batch.active[:-1] & (batch.owner == OWN_POLICY)
