"""The actor-critic: encoders, a recurrent core, and heads for policy and value."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sfactory.config import ModelConfig
from sfactory.config.importing import load_object
from sfactory.distributions import Distribution, make_distribution, parametrized_as_built_in
from sfactory.errors import ConfigError
from sfactory.model.contracts import checked_core, checked_model, construct
from sfactory.model.cores import Core, GRUCore, LSTMCore
from sfactory.model.encoders import IMAGE_ENCODERS, KNOWN, build_encoders
from sfactory.model.heads import PolicyHead, ValueHead
from sfactory.model.initialization import orthogonal, skip_orthogonal
from sfactory.model.interface import Model
from sfactory.model.layers import Dense
from sfactory.model.normalizer import ObservationNormalizer, PixelNormalizer, ValueUnit
from sfactory.model.precision import full_precision
from sfactory.spaces import ActionSpec, Leaf, ObservationSpec

CORES = {"gru": GRUCore, "lstm": LSTMCore}


class Trunk(nn.Module):
    """Observations to features: encoders of the leaves, a layer that merges several, and a core.

    The layer that merges has a ReLU whatever `model.activation` is: an image encoder's features have no bound, and grow
    until they would saturate a tanh.

    Attributes:
        out_features: Width H of the features.
        state_size: Floats of the core's state of one row; 0 without a core.
    """

    def __init__(self, leaves: Sequence[Leaf], config: ModelConfig) -> None:
        super().__init__()
        encoders, self._reads = build_encoders(leaves, config)
        self.encoders = nn.ModuleList(encoders)
        width = sum(encoder.out_features for encoder in encoders)
        self.merge = None
        if len(encoders) > 1:
            merged = config.features if any(leaf.is_image for leaf in leaves) else (config.features, *config.hidden)[-1]
            self.merge = Dense(width, merged)
            width = merged
        self.core = _build_core(width, config)
        self.out_features = width if self.core is None else self.core.out_features
        self.state_size = 0 if self.core is None else self.core.state_size

    def forward(self, obs: tuple[Tensor, ...], state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """One step: leaves ``[N, *shape]`` and state ``[N, S]`` to features ``[N, H]`` and the next state."""
        features = self._encode(obs)
        return (features, None) if self.core is None else self.core(features, state)

    def unroll(self, obs: tuple[Tensor, ...], first: Tensor, state: Tensor | None) -> Tensor:
        """T steps: leaves ``[T, B, *shape]``, ``first [T, B]`` and state ``[B, S]`` to features ``[T, B, H]``."""
        features = self._encode(tuple(leaf.flatten(0, 1) for leaf in obs)).unflatten(0, first.shape)
        return features if self.core is None else self.core.unroll(features, first, cast(Tensor, state))

    def _encode(self, obs: tuple[Tensor, ...]) -> Tensor:
        features = [encoder(*(obs[i] for i in read)) for encoder, read in zip(self.encoders, self._reads, strict=True)]
        return features[0] if self.merge is None else F.relu(self.merge(torch.cat(features, -1)))


class ActorCritic(Model):
    """A policy and a value function, with shared or separate trunks. Its RNN state is the actor's, then the critic's
    where that is separate."""

    def __init__(self, observation: ObservationSpec, action: ActionSpec, config: ModelConfig) -> None:
        super().__init__()
        self.observation, self.action = observation, action
        self.normalizer = _normalizer_of(observation, config)
        self.unit = ValueUnit()
        self.distribution = make_distribution(action, config.distribution)
        leaves = observation.leaves if self.normalizer is None else self.normalizer.leaves
        self.actor = Trunk(leaves, config)
        self.critic = None if shares_trunk(observation, config) else Trunk(leaves, config)
        self.policy = _policy_head(self.actor.out_features, self.distribution, config)
        self.value = ValueHead((self.critic or self.actor).out_features)
        self.state_size = self.actor.state_size + (self.critic.state_size if self.critic else 0)

    def forward(self, obs: tuple[Tensor, ...], state: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor | None]:
        obs = obs if self.normalizer is None else self.normalizer(obs)
        of_actor, of_critic = self._split(state)
        features, state = self.actor(obs, of_actor)
        critic_features = features
        if self.critic is not None:
            critic_features, critic_state = self.critic(obs, of_critic)
            state = None if state is None else torch.cat((state, critic_state), -1)
        return *self.heads(features, critic_features), state

    def unroll(self, obs: tuple[Tensor, ...], first: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return self.heads(*self.features(obs, first, state))

    def features(self, obs: tuple[Tensor, ...], first: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
        """What T steps give to the heads, with the arguments of `unroll`: the actor's and the critic's features
        ``[T, B, H]``, one tensor where they share a trunk."""
        obs = obs if self.normalizer is None else self.normalizer(obs)
        of_actor, of_critic = self._split(state)
        features = self.actor.unroll(obs, first, of_actor)
        return features, features if self.critic is None else self.critic.unroll(obs, first, of_critic)

    def heads(self, actor_features: Tensor, critic_features: Tensor) -> tuple[Tensor, Tensor]:
        """Features ``[..., H]`` to policy parameters ``[..., P]`` and values ``[...]``, float32."""
        with full_precision(actor_features.device):
            x = actor_features.float()
            y = x if critic_features is actor_features else critic_features.float()
            return self.policy(x), self.value(y)

    def rescale_values(self, scale: Tensor, shift: Tensor) -> None:
        """From here on every value is what it was, times `scale`, plus `shift`; both ``[]``."""
        self.value.rescale(scale, shift)

    def _split(self, state: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        if state is None or self.critic is None:
            return state, None
        return state[:, : self.actor.state_size], state[:, self.actor.state_size :]


def _normalizer_of(observation: ObservationSpec, config: ModelConfig) -> ObservationNormalizer | None:
    """What is asked for of the leaves that there are; a user's own encoder gets images as they are stored."""
    floats = config.normalize_obs and observation.has_floats
    images = config.normalize_images and config.encoder in ("auto", *IMAGE_ENCODERS)
    images = images and any(map(PixelNormalizer.fits, observation.leaves))
    return ObservationNormalizer(observation.leaves, floats, images) if floats or images else None


def _policy_head(in_features: int, distribution: Distribution, config: ModelConfig) -> nn.Module:
    """Features to the parameters of the policy's distribution."""
    if parametrized_as_built_in(distribution):
        return PolicyHead(in_features, distribution.action, config.adaptive_std, config.initial_log_std)
    return orthogonal(nn.Linear(in_features, distribution.width), 0.01)


def shares_trunk(observation: ObservationSpec, config: ModelConfig) -> bool:
    """Whether policy and value have one encoder and core: as asked for, else where these are large, for images and with
    a core.

    A small trunk that serves both is worth less than it saves: the value's gradients, whose size follows the returns,
    then shape what the policy sees.
    """
    if config.shared_critic is not None:
        return config.shared_critic
    return config.core != "none" or observation.has_images


def is_built_in(config: ModelConfig) -> bool:
    """Whether a model consists of sfactory's own parts alone."""
    return config.model == "none" and config.encoder in KNOWN and config.core in ("none", *CORES)


def build_model(observation: ObservationSpec, action: ActionSpec, config: ModelConfig) -> Model:
    """The model that a configuration asks for: an :class:`ActorCritic`, or the user's own.

    Weights come from torch's global random state.

    Raises:
        ConfigError: On an unknown encoder or core, or a user's module that cannot be loaded or breaks its contract.
    """
    if config.model == "none":
        return ActorCritic(observation, action, config)
    role = f"model.model {config.model}"
    made = construct(load_object(config.model, "model.model"), role, observation, action, config, **config.kwargs)
    distribution = make_distribution(action, config.distribution)
    model = checked_model(made, role, observation, distribution.width)
    defaults = {"observation": observation, "action": action, "normalizer": None, "unit": ValueUnit()}
    for name, value in (defaults | {"distribution": distribution}).items():
        if not hasattr(model, name):
            setattr(model, name, value)
    return model


def build_uninitialized(observation: ObservationSpec, action: ActionSpec, config: ModelConfig) -> Model:
    """As :func:`build_model`, but without the orthogonal weights that learning begins with, which take most of its
    time, and without a change of torch's global random state: for whoever asks for sizes, or loads weights."""
    with skip_orthogonal(), torch.random.fork_rng(devices=[]):
        return build_model(observation, action, config)


def _build_core(in_features: int, config: ModelConfig) -> Core | None:
    name = config.core
    if isinstance(name, str):
        if name == "none":
            return None
        if name in CORES:
            return CORES[name](in_features, config.core_size, config.core_layers)
        if ":" not in name:
            raise ConfigError(
                f"unknown model.core {name!r}; known: none, {', '.join(CORES)}, or a callable or module:Class"
            )
    role = f"model.core {name}"
    core = construct(load_object(name, "model.core"), role, in_features, **config.kwargs)
    return checked_core(core, role, in_features)
