"""Actor-critic networks.

A model reads the leaves of an :class:`~sfactory.spaces.ObservationSpec` and gives the parameters of an action
distribution and a value. Policy workers use ``forward`` (one step), the learner uses ``unroll`` (segments); both give
the same numbers.

A user's own part is named in :class:`~sfactory.config.ModelConfig` by a callable or as ``"module:Name"``:

- ``model.encoder``: ``make(leaf: Leaf, **model.kwargs) -> nn.Module`` with attribute ``out_features: int`` and
  ``forward(x) -> [N, out_features]``, where x is ``[N, *leaf.shape]`` as stored (uint8 pixels, int32 categories,
  float32). Made once for each leaf, and again for a separate critic.
- ``model.core``: ``make(in_features: int, **model.kwargs) -> nn.Module`` with attributes ``out_features: int`` and
  ``state_size: int``, ``forward(x [N, F], state [N, S]) -> (y [N, H], state [N, S])`` and ``unroll(x [T, B, F], first
  [T, B], state [B, S]) -> y [T, B, H]``. A subclass of :class:`Core` inherits an ``unroll`` that steps.
- ``model.model``: ``make(observation, action, config: ModelConfig, **model.kwargs) -> nn.Module`` with attribute
  ``state_size: int`` and the methods ``forward`` and ``unroll`` of :class:`Model`. It may have a ``normalizer`` with
  a method ``update(obs, valid)`` that the learner calls, and a method ``rescale_values(scale, shift)`` that corrects
  its last layer when the unit of returns moves.

Parts that break their contract raise :class:`~sfactory.errors.ConfigError` before anything starts.
"""

from sfactory.model.actor_critic import ActorCritic, build_model, build_uninitialized, shares_trunk
from sfactory.model.cores import Core, GRUCore, LSTMCore
from sfactory.model.encoders import ImpalaResNet, MLPEncoder, NatureCNN
from sfactory.model.interface import Model
from sfactory.model.normalizer import ObservationNormalizer, RunningMeanStd

__all__ = [
    "ActorCritic",
    "Core",
    "GRUCore",
    "ImpalaResNet",
    "LSTMCore",
    "MLPEncoder",
    "Model",
    "NatureCNN",
    "ObservationNormalizer",
    "RunningMeanStd",
    "build_model",
    "build_uninitialized",
    "shares_trunk",
]
