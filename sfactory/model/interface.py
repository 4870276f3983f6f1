"""What is trained, as the rest of the program knows it."""

from __future__ import annotations

from torch import Tensor, nn

from sfactory.distributions import Distribution
from sfactory.model.normalizer import ObservationNormalizer, ValueUnit
from sfactory.spaces import ActionSpec, ObservationSpec


class Model(nn.Module):
    """A policy and a value function. A model of a user's has the same methods, whether it is a subclass or not, and is
    given the attributes that it has not set; `state_size` it must set.

    Attributes:
        observation: What it reads.
        action: What it decides.
        state_size: Floats S of the RNN state of one row; 0 without a core.
        normalizer: Of observations, or None. The learner updates it.
        unit: Of the values. The learner sets it.
        distribution: Of its actions.
    """

    observation: ObservationSpec
    action: ActionSpec
    state_size: int
    normalizer: ObservationNormalizer | None
    unit: ValueUnit
    distribution: Distribution

    def forward(self, obs: tuple[Tensor, ...], state: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor | None]:
        """One step.

        Args:
            obs: Leaves ``[N, *leaf.shape]`` in their stored dtypes.
            state: float32 ``[N, S]``, already zero in rows whose episode begins; None without a core.

        Returns:
            Policy parameters ``[N, P]`` (:mod:`sfactory.distributions`), values ``[N]`` and the next state ``[N, S]``
            or None, all float32.
        """
        raise NotImplementedError

    def unroll(self, obs: tuple[Tensor, ...], first: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """T steps of segments in which episodes may begin anywhere; the same numbers as `forward` step by step.

        Args:
            obs: Leaves ``[T, B, *leaf.shape]``.
            first: bool ``[T, B]``; the state is zeroed before step t where ``first[t]``.
            state: float32 ``[B, S]`` before step 0; None without a core.

        Returns:
            Policy parameters ``[T, B, P]`` and values ``[T, B]``, float32.
        """
        raise NotImplementedError
