"""Action distributions, and the sampler that draws from them.

The built-in one has K independent categorical components and D Gaussian dimensions.
Parameters are one float32 tensor ``params [..., P]`` with ``P = logits + 2 D``: categorical logits, Gaussian means,
Gaussian log standard deviations. An action is a pair (categorical ``[..., K]`` int32 or int64, continuous ``[..., D]``
float32). Continuous values are the Gaussian's own ``u`` before it is squashed into a Box. The squashing's Jacobian
depends on ``u`` alone, so it cancels in every probability ratio and KL divergence; ``log_prob`` and ``entropy`` leave
it out.

A mask is bool ``[..., logits]``, True where a category is allowed. A component whose mask allows nothing counts as
fully allowed, so that a row without meaning (a dead agent, the end of an episode) cannot put NaN into a batch.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from sfactory.config.importing import load_object
from sfactory.errors import ConfigError
from sfactory.spaces import ActionSpec

FORBIDDEN = -1e9
"""Logit of a category that is not allowed: finite, so that 0 * log(0) stays 0 in entropies and KL divergences."""
HALF_LOG_2PI = 0.5 * math.log(2 * math.pi)


class Distribution:
    """Base of action distributions, which turn a policy's parameters into densities, samples and modes of actions.

    A subclass is made with the :class:`~sfactory.spaces.ActionSpec` alone. It must work on any device, leave gradients
    to autograd, and hold no tensors. Shapes have any leading dimensions ``[...]``.

    Attributes:
        action: The action space: K categorical components of `action.sizes`, and D = `action.continuous` dimensions.
    """

    action: ActionSpec

    def __init__(self, action: ActionSpec) -> None:
        self.action = action

    @property
    def width(self) -> int:
        """Width P of the policy's parameters ``params [..., P]``."""
        raise NotImplementedError

    def log_prob(self, params: Tensor, categorical: Tensor, continuous: Tensor, mask: Tensor | None = None) -> Tensor:
        """Log-density of actions: ``[...]``.

        Args:
            params: float32 ``[..., P]``.
            categorical: Integers ``[..., K]``.
            continuous: float32 ``[..., D]``, before squashing.
            mask: bool ``[..., logits]``, True where a category is allowed; None: everywhere.
        """
        raise NotImplementedError

    def entropy(self, params: Tensor, mask: Tensor | None = None) -> Tensor:
        """Entropy in nats, before squashing: ``[...]``."""
        raise NotImplementedError

    def log_prob_and_entropy(
        self, params: Tensor, categorical: Tensor, continuous: Tensor, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """:meth:`log_prob` and :meth:`entropy`, for distributions that can share work between them."""
        return self.log_prob(params, categorical, continuous, mask), self.entropy(params, mask)

    def kl_from_uniform(self, params: Tensor, mask: Tensor | None = None) -> Tensor:
        """KL(policy || uniform over the allowed categories): ``[...]``; needed only with ``loss.exploration kl``."""
        raise ConfigError(f"loss.exploration kl needs {type(self).__name__}.kl_from_uniform; use entropy")

    def sample(
        self, params: Tensor, mask: Tensor | None = None, generator: torch.Generator | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Draw one action for each row.

        Returns:
            Categorical int32 ``[..., K]``, continuous ``[..., D]`` and their log-probability ``[...]``.
        """
        raise NotImplementedError

    def mode(self, params: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The most probable action: categorical int32 ``[..., K]``, continuous ``[..., D]``."""
        raise NotImplementedError


def make_distribution(action: ActionSpec, name: Any = "auto") -> Distribution:
    """The action distribution that ``model.distribution`` means.

    Raises:
        ConfigError: If it cannot be made, is no :class:`Distribution`, or its width is no positive integer.
    """
    if name == "auto":
        return ActionDistribution(action)
    role = f"model.distribution {name}"
    try:
        made = load_object(name, "model.distribution")(action)
        width = made.width if isinstance(made, Distribution) else None
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"{role} could not be made: {type(error).__name__}: {error}") from error
    if not isinstance(made, Distribution):
        raise ConfigError(
            f"{role} made a {type(made).__name__}; it must be a subclass of {Distribution.__module__}.Distribution"
        )
    if not isinstance(width, int) or width < 1:
        raise ConfigError(f"{role}: width is {width!r}; it must be a positive integer")
    return made


class ActionDistribution(Distribution):
    """Categorical components and Gaussian dimensions with a diagonal covariance."""

    @property
    def width(self) -> int:
        """Width P of ``params``."""
        return self.action.logits + 2 * self.action.continuous

    def log_prob(self, params: Tensor, categorical: Tensor, continuous: Tensor, mask: Tensor | None = None) -> Tensor:
        """Log-density of actions, summed over components and dimensions: float32 ``[...]``."""
        return _total(
            self._categorical_log_prob(self._log_probs(params, mask), categorical) if self.action.sizes else None,
            self._normal_log_prob(params, continuous) if self.action.continuous else None,
        )

    def entropy(self, params: Tensor, mask: Tensor | None = None) -> Tensor:
        """Entropy in nats, of the Gaussians before squashing: ``[...]``."""
        return _total(
            _categorical_entropy(self._log_probs(params, mask)) if self.action.sizes else None,
            self._normal_entropy(params) if self.action.continuous else None,
        )

    def log_prob_and_entropy(
        self, params: Tensor, categorical: Tensor, continuous: Tensor, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """`log_prob` and `entropy` from one softmax."""
        if not self.action.sizes:
            return self._normal_log_prob(params, continuous), self._normal_entropy(params)
        log_probs = self._log_probs(params, mask)
        log_prob, entropy = self._categorical_log_prob(log_probs, categorical), _categorical_entropy(log_probs)
        if not self.action.continuous:
            return log_prob, entropy
        return log_prob + self._normal_log_prob(params, continuous), entropy + self._normal_entropy(params)

    def kl_from_uniform(self, params: Tensor, mask: Tensor | None = None) -> Tensor:
        """KL(policy || uniform over the allowed categories) of the categorical components: ``[...]``; 0 without any.
        For each it is the logarithm of the number of allowed categories, less the entropy."""
        if not self.action.sizes:
            return params.new_zeros(params.shape[:-1])
        log_probs, uniform = self._log_probs(params, mask), self._log_probs(torch.zeros_like(params), mask)
        return (log_probs.exp() * (log_probs - uniform)).sum((-2, -1))

    def sample(
        self, params: Tensor, mask: Tensor | None = None, generator: torch.Generator | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Draw one action for each row: categories by inverting their cumulative distribution.

        Returns:
            Categorical int32 ``[..., K]``, continuous ``[..., D]`` and their log-probability ``[...]``.
        """
        mean, log_std = self._normal(params)
        uniforms = params.new_empty(*params.shape[:-1], len(self.action.sizes)).uniform_(generator=generator)
        continuous = mean + log_std.exp() * torch.empty_like(mean).normal_(generator=generator)
        if not self.action.sizes:
            return self._no_categories(params), continuous, self._normal_log_prob(params, continuous)
        log_probs = self._log_probs(params, mask)
        cumulative = log_probs.exp().cumsum(-1)
        categorical = (cumulative <= uniforms.unsqueeze(-1) * cumulative[..., -1:]).sum(-1, dtype=torch.int32)
        log_prob = self._categorical_log_prob(log_probs, categorical)
        return (
            categorical,
            continuous,
            _total(log_prob, self._normal_log_prob(params, continuous) if self.action.continuous else None),
        )

    def mode(self, params: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The most probable action: categorical int32 ``[..., K]``, continuous ``[..., D]``."""
        categorical = (
            self._logits(params, mask).argmax(-1).to(torch.int32) if self.action.sizes else self._no_categories(params)
        )
        return categorical, self._normal(params)[0]

    def _no_categories(self, params: Tensor) -> Tensor:
        return params.new_zeros((*params.shape[:-1], 0), dtype=torch.int32)

    def _normal(self, params: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and log standard deviation, each ``[..., D]``."""
        start = self.action.logits
        middle = start + self.action.continuous
        return params[..., start:middle], params[..., middle:]

    def _normal_log_prob(self, params: Tensor, continuous: Tensor) -> Tensor:
        mean, log_std = self._normal(params)
        z = (continuous - mean) * (-log_std).exp()
        return (z * z).mul(-0.5).sub(log_std).sum(-1) - self.action.continuous * HALF_LOG_2PI

    def _normal_entropy(self, params: Tensor) -> Tensor:
        return self._normal(params)[1].sum(-1) + self.action.continuous * (0.5 + HALF_LOG_2PI)

    def _split(self, flat: Tensor, filler: float | bool) -> Tensor:
        """``[..., logits]`` as ``[..., K, max size]``; shorter components are padded with `filler`."""
        widest = max(self.action.sizes)
        if min(self.action.sizes) == widest:
            return flat.unflatten(-1, (len(self.action.sizes), widest))
        parts = flat.split(self.action.sizes, -1)
        return torch.stack([F.pad(part, (0, widest - part.shape[-1]), value=filler) for part in parts], -2)

    def _logits(self, params: Tensor, mask: Tensor | None) -> Tensor:
        """Logits of all components ``[..., K, max size]``."""
        logits = self._split(params[..., : self.action.logits], FORBIDDEN)
        if mask is None:
            return logits
        allowed = self._split(mask, False)
        return logits.masked_fill(allowed.any(-1, keepdim=True) & ~allowed, FORBIDDEN)

    def _log_probs(self, params: Tensor, mask: Tensor | None) -> Tensor:
        """Normalised log-probabilities ``[..., K, max size]``."""
        return F.log_softmax(self._logits(params, mask), -1)

    @staticmethod
    def _categorical_log_prob(log_probs: Tensor, categorical: Tensor) -> Tensor:
        return log_probs.gather(-1, categorical.long().unsqueeze(-1)).sum((-2, -1))


def parametrized_as_built_in(distribution: Distribution) -> bool:
    """Whether the parameters of a distribution are logits, means and log standard deviations, as the built-in one's."""
    built_in = ActionDistribution(distribution.action)
    return isinstance(distribution, ActionDistribution) and distribution.width == built_in.width


def _categorical_entropy(log_probs: Tensor) -> Tensor:
    return -(log_probs.exp() * log_probs).sum((-2, -1))


def _total(categorical: Tensor | None, normal: Tensor | None) -> Tensor:
    """The sum of the parts that an action space has."""
    if categorical is None or normal is None:
        part = normal if categorical is None else categorical
        assert part is not None, "an action space has at least one part"
        return part
    return categorical + normal


class Sampler:
    """Draws the actions of a group of rows into its slot.

    Args:
        distribution: Of the model's actions.
        seed: Seed for action sampling.
    """

    def __init__(self, distribution: Distribution, seed: int) -> None:
        self._distribution, self._generator = distribution, torch.Generator().manual_seed(seed)

    def __call__(
        self,
        params: NDArray[np.float32],
        mask: NDArray[np.bool_] | None,
        categorical: NDArray[np.int32],
        continuous: NDArray[np.float32],
        log_prob: NDArray[np.float32],
    ) -> None:
        """Draw one action for each row, and write it with its log-probability.

        Args:
            params: ``[N, P]``, the policy's parameters.
            mask: ``[N, logits]``, allowed categories, or None.
            categorical: ``[N, K]``, written.
            continuous: ``[N, D]``, written; before squashing.
            log_prob: ``[N]``, written.
        """
        allowed = None if mask is None else torch.from_numpy(mask)
        drawn = self._distribution.sample(torch.from_numpy(params), allowed, self._generator)
        for out, tensor in zip((categorical, continuous, log_prob), drawn, strict=True):
            out[...] = tensor.numpy()
