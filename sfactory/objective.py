"""What the learner minimises, in two halves: the targets of a batch, and the gradient of the loss with respect to a
network's outputs.

Targets are made once, when a batch is begun, with the proximal policy: the weights of that moment. V-trace corrects
from the policy that sampled to the proximal one; all epochs then keep near the proximal policy (decoupled PPO: Hilton
et al. 2022; IMPACT: Luo et al. 2020).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sfactory.config import Config
from sfactory.config.importing import load_object
from sfactory.data.arena import OWN_POLICY
from sfactory.data.batch import Batch, Samples, Targets
from sfactory.data.chunks import Columns, select_columns
from sfactory.distributions import Distribution
from sfactory.errors import ConfigError
from sfactory.gae import gae_torch
from sfactory.losses import (
    BatchStats,
    Terms,
    TermSamples,
    batch_stats,
    chunk_loss,
    weighted_advantages,
    without_departures,
)
from sfactory.model.critic_units import CriticUnits
from sfactory.model.networks import Outputs
from sfactory.vtrace import unweighted_vtrace

Estimator = Callable[..., tuple[Tensor, Tensor]]
"""An advantage estimator: has the arguments of :func:`sfactory.vtrace.unweighted_vtrace` and returns value targets and
advantages, in units of return, without V-trace's weight min(rho_bar_pg, w), which multiplies the advantages later."""


class Algo(NamedTuple):
    """What a value of ``algo`` means.

    Attributes:
        surrogate: The policy's loss is PPO's clipped surrogate; else the plain policy gradient.
        on_policy: The policy that sampled is taken for the proximal one: GAE, and no weights; else V-trace.
        bounded: ``loss.tv_limit`` holds.
    """

    surrogate: bool
    on_policy: bool
    bounded: bool


ALGOS = {
    "appo": Algo(surrogate=True, on_policy=False, bounded=True),
    "impala": Algo(surrogate=False, on_policy=False, bounded=False),
    "ppo": Algo(surrogate=True, on_policy=True, bounded=False),
}


@dataclass
class ActionDensities:
    """A network's outputs on a chunk, and what follows from them for the actions that were taken: what
    :meth:`Objective.evaluate_actions` gives to the other methods.

    Attributes:
        params, value: Policy parameters and values ``[T(+1), n, ...]``, where gradients end.
        log_prob: log pi(a_t|x_t) ``[T, n]``.
        exploration: The exploration bonus ``[T, n]``.
        auxiliary: The network's other outputs, by name; gradients end there too.
        kept: What the objective that made them saved for :meth:`Objective.gradients`.
    """

    params: Tensor
    value: Tensor
    log_prob: Tensor
    exploration: Tensor
    auxiliary: dict[str, Tensor]
    kept: Any = None


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
        sums: For :func:`sfactory.losses.loss_stats`, and behind them those of the user's own terms.
        auxiliary: With respect to the network's other outputs, by name.
    """

    params: Tensor
    value: Tensor
    sums: Tensor
    auxiliary: Mapping[str, Tensor] = MappingProxyType({})


class Objective:
    """Targets and loss in tensor operations, on any device and without waiting for it.

    Args:
        config: Configuration of the run.
        distribution: Action distribution of the policy.
        units: Units in which the critic predicts returns.

    Attributes:
        term_names: Names of the user's own loss terms, in the order of their sums; known from the first gradients on.
        bounds_shift: Whether the total variation between the policy and the behaviour policy has a limit.
    """

    def __init__(self, config: Config, distribution: Distribution, units: CriticUnits) -> None:
        self.config, self.distribution, self.units = config, distribution, units
        self.term_names: list[str] = []
        self._estimator, self._terms = advantage_estimator(config), _terms(config)
        self.bounds_shift = self.algo.bounded and config.loss.tv_limit > 0

    @property
    def algo(self) -> Algo:
        """What the configuration's ``algo`` means."""
        return ALGOS[self.config.algo]

    def begin_critic(self, batch: Batch) -> None:
        """Tell an untrained critic where to begin, from the first batch: at r / (1 - gamma) for the mean reward r, if
        episodes were cut off by time alone, and no reward is that of more than half of the samples; else at 0.

        From far above its targets a critic falls first where the policy has been, which drives the policy elsewhere.
        That finds the goals of tasks whose rewards are all alike, and spoils those whose rewards tell more
        (docs/decisions/018).
        """
        valid, gamma, rewards = valid_samples(batch), self.config.loss.gamma, self._rewards(batch).double()
        if gamma == 1:
            return
        count = valid.sum().clamp(min=1)
        usual = rewards.where(valid, math.nan).nanmedian()
        alike = ((rewards == usual) & valid).sum() > count / 2
        goes_on = (batch.truncated & valid).any() & ~(batch.terminated & valid).any() & ~alike
        value = rewards.where(valid, 0.0).sum() / count / (1 - gamma)
        self.units.begin_at(value.where(goes_on, 0.0))

    def evaluate_actions(self, outputs: Outputs, samples: Batch | Samples, columns: Columns) -> ActionDensities:
        """The present policy's densities of the actions that were taken.

        Args:
            outputs: The network's, of T steps, or T+1 on a batch; no gradient goes back through them.
            samples: What happened.
            columns: Which of its columns the chunk has.
        """
        params, value = outputs.params.detach().requires_grad_(), outputs.value.detach().requires_grad_()
        auxiliary = {name: tensor.detach().requires_grad_() for name, tensor in outputs.auxiliary.items()}
        categorical, continuous, mask = samples.actions(columns)
        own = params[: len(continuous)]
        if self.config.loss.exploration == "entropy":
            log_prob, exploration = self.distribution.log_prob_and_entropy(own, categorical, continuous, mask)
        else:
            log_prob = self.distribution.log_prob(own, categorical, continuous, mask)
            exploration = self.distribution.kl_from_uniform(own, mask)
        return ActionDensities(params, value, log_prob, exploration, auxiliary)

    def estimate(self, densities: ActionDensities, batch: Batch, columns: Columns) -> Estimates:
        """What the policy of the densities, the proximal one, makes of a chunk of a batch, by the estimator that
        ``loss.estimator`` names."""
        chunk, loss = batch.select(columns), self.config.loss
        log_prob, values = densities.log_prob.detach(), self.units.to_returns(densities.value.detach())
        log_weights, ends = log_prob - chunk.log_prob, (chunk.terminated, chunk.truncated)
        outcome = self._rewards(chunk), values[:-1], values[-1], *ends, final_values(chunk, values)
        returns, advantages = self._estimator(log_weights, *outcome, loss.gamma, loss.lam, loss.rho_bar, loss.c_bar)
        return Estimates(log_prob, log_weights, values[:-1], advantages, returns, valid_samples(chunk))

    def targets(self, chunks: Sequence[Estimates]) -> tuple[Targets, BatchStats]:
        """The targets of a whole batch ``[T, B]``, whose columns the chunks are, in order; the critic's units learn of
        its returns."""
        whole = (
            Estimates(*(torch.cat(parts, 1) for parts in zip(*chunks, strict=True))) if len(chunks) > 1 else chunks[0]
        )
        loss, valid, weights = self.config.loss, whole.valid, whole.log_weights.exp()
        weights = torch.ones_like(weights) if self.algo.on_policy else weights.clamp(max=loss.rho_bar_pg)
        advantages = weighted_advantages(loss, whole.advantages, weights, valid)
        self.units.update(whole.returns, valid)
        returns, values = self.units.from_returns(whole.returns), self.units.from_returns(whole.values)
        targets = Targets(advantages, returns, values, whole.log_prob, whole.log_weights, valid)
        return targets, batch_stats(whole.log_weights, valid)

    def totals(self, densities: ActionDensities, targets: Targets, columns: Columns) -> Tensor:
        """What :meth:`gradients` has to know of all chunks of a minibatch, added up: float64 ``[2]``, the number of
        valid samples and the sum of |pi / mu - 1| over them.

        Args:
            targets: Of all columns.
            columns: Which of them the chunk has.
        """
        part = targets.select(columns)
        count = part.valid.sum().double()
        if not self.bounds_shift:
            return torch.stack((count, torch.zeros_like(count)))
        shift = torch.where(part.valid, _log_shift(densities, part), 0.0).expm1().abs().sum()
        return torch.stack((count, shift.double()))

    def gradients(
        self, densities: ActionDensities, samples: Batch | Samples, targets: Targets, columns: Columns, totals: Tensor
    ) -> Gradients:
        """The gradients of a chunk's share of the loss.

        Args:
            samples: What happened.
            targets: Of all columns.
            columns: Which of them the chunk has.
            totals: Of the whole minibatch, as :meth:`totals` gives them.
        """
        config, own, part = self.config, densities, targets.select(columns)
        count, shift = totals
        if self.bounds_shift:
            far = shift > 2 * config.loss.tv_limit * count
            part = replace(part, advantages=without_departures(part.advantages, _log_shift(own, part), far))
        value = own.value[: len(own.log_prob)]
        loss, sums = chunk_loss(config.loss, self.algo.surrogate, own.log_prob, value, own.exploration, part, count)
        if self._terms is not None:
            more, term_sums = self._term_loss(own, samples, part, columns, count)
            loss, sums = loss + more, torch.cat((sums, term_sums))
        leaves = (own.params, own.value, *own.auxiliary.values())
        of_params, of_value, *others = torch.autograd.grad(loss, leaves, materialize_grads=True)
        return Gradients(of_params, of_value, sums, dict(zip(own.auxiliary, others, strict=True)))

    def terms(
        self, densities: ActionDensities, samples: Batch | Samples, targets: Targets, columns: Columns
    ) -> Mapping[str, Tensor]:
        """The user's own terms of a chunk, by name, as they are; the configuration has to name some.

        Args:
            targets: Of the chunk.
        """
        own, steps = densities, len(densities.log_prob)
        obs, first, _ = samples.inputs(columns)
        categorical, continuous, mask = samples.actions(columns)
        auxiliary = {name: tensor[:steps] for name, tensor in own.auxiliary.items()}
        seen = TermSamples(
            tuple(leaf[:steps] for leaf in obs), mask, first[:steps], categorical, continuous,
            select_columns(samples.reward, columns, 1), own.params[:steps], own.value[:steps], own.log_prob, auxiliary,
            targets,
        )  # fmt: skip
        assert self._terms is not None
        return self._terms(seen, self.config)

    def _term_loss(
        self, densities: ActionDensities, samples: Batch | Samples, targets: Targets, columns: Columns, count: Tensor
    ) -> tuple[Tensor, Tensor]:
        """A chunk's share of the user's own terms: what is minimised, and the sum of each, float64 ``[terms]``."""
        terms, coefs = self.terms(densities, samples, targets, columns), self.config.loss.term_coefs
        self.term_names = list(terms)
        sums = {name: torch.where(targets.valid, term, 0.0).sum() for name, term in terms.items()}
        loss = torch.stack([coefs.get(name, 1.0) * total for name, total in sums.items()]).sum() / count.clamp(min=1)
        return loss, torch.stack([total.detach().double() for total in sums.values()])

    def _rewards(self, batch: Batch) -> Tensor:
        loss = self.config.loss
        reward = batch.reward if loss.reward_scale == 1.0 else batch.reward * loss.reward_scale
        return reward.clamp(-loss.reward_clip, loss.reward_clip) if loss.reward_clip > 0 else reward


def on_policy_gae(
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
    """GAE as an estimator: the policy that sampled is taken for the proximal one, so weights and their truncations do
    not matter."""
    advantages, returns = gae_torch(rewards, values, bootstrap_value, terminated, truncated, final_values, gamma, lam)
    return returns, advantages


ESTIMATORS: dict[Any, Estimator] = {"vtrace": unweighted_vtrace, "gae": on_policy_gae}
"""Those that ``loss.estimator`` may name."""


def advantage_estimator(config: Config) -> Estimator:
    """The one that a configuration means.

    Raises:
        ConfigError: If there is none of that name, or it cannot be loaded.
    """
    name = config.loss.estimator
    if name == "auto":
        name = "gae" if ALGOS[config.algo].on_policy else "vtrace"
    if isinstance(name, str) and name in ESTIMATORS:
        return ESTIMATORS[name]
    if isinstance(name, str) and ":" not in name:
        known = ", ".join(["auto", *ESTIMATORS])
        raise ConfigError(f"unknown loss.estimator {name!r}; known: {known}, or a callable or module:function")
    return load_object(name, "loss.estimator")


def _terms(config: Config) -> Terms | None:
    """The user's own loss terms, if there are any."""
    return None if config.loss.terms == "none" else load_object(config.loss.terms, "loss.terms")


def _log_shift(densities: ActionDensities, targets: Targets) -> Tensor:
    """log pi(a_t|x_t) - log mu(a_t|x_t) of a chunk ``[T, n]``."""
    return densities.log_prob.detach() - targets.old_log_prob + targets.log_weights


def final_values(batch: Batch, values: Tensor) -> Tensor:
    """V(final_obs) of truncated episodes. Normally the value at t+1. If the environment had already reset, V(final_obs)
    is V(x_t) plus the behaviour critic's difference V(final_obs) - V(x_t); its absolute value would be stale.

    Args:
        values: ``[T+1, B]``, in units of return.
    """
    return torch.where(batch.final_change.isnan(), values[1:], values[:-1] + batch.final_change)


def valid_samples(batch: Batch) -> Tensor:
    """bool ``[T, B]``; the samples that this learner's policy is trained on."""
    return batch.active[:-1] & (batch.owner == OWN_POLICY)
