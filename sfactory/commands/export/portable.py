"""A policy as one function of tensors, from what an environment gives to what it takes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sfactory.envs.interface import EnvSpec
from sfactory.policy import Policy
from sfactory.spaces import Leaf
from sfactory.spaces.tensors import action_parts, torch_dtype

MASK, STATE = "action_mask", "state"
ACTION, PARAMS, VALUE, NEXT_STATE = "action", "params", "value", "next_state"
LARGEST = 1e6
"""Bounds of a Box that are farther away count as none where observations are drawn."""


class PortablePolicy(nn.Module):
    """The most probable action for N observations, with normalisation, memory and masks inside.

    Inputs and outputs are tensors by name, each with a leading dimension N.

    | input | shape | dtype | |
    |---|---|---|---|
    | ``obs``, ``obs/KEY`` | leaf's | uint8, float32; int64 for int32 categories | for each leaf of the space |
    | ``action_mask`` | ``[N, L]`` | bool | of all L categories in order; only if trained with masks |
    | ``state`` | ``[N, S]`` | float32 | zeros where an episode begins; only if the model has memory |

    | output | shape | dtype | |
    |---|---|---|---|
    | ``action``, ``action/KEY`` | space's | space's, int64 for Discrete | for each leaf, in its bounds |
    | ``params`` | ``[N, P]`` | float32 | of the action distribution, before masks |
    | ``value`` | ``[N]`` | float32 | in units of the rewards that were learned from |
    | ``next_state`` | ``[N, S]`` | float32 | `state` of the next step; only if the model has memory |

    Args:
        policy: On the CPU.
    """

    def __init__(self, policy: Policy) -> None:
        super().__init__()
        self.spec: EnvSpec = policy.spec
        self.model = policy.model
        self.leaves = nn.ModuleList(_StoredLeaf(leaf) for leaf in policy.spec.observation.leaves)
        self.action_names = ["/".join((ACTION, *map(str, part.path))) for part in policy.spec.action.parts]
        self.actions = nn.ModuleList(action_parts(policy.spec.action))
        self.state_size = int(policy.model.state_size)
        self.eval().requires_grad_(False)

    def forward(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        leaves = self.spec.observation.leaves
        obs = tuple(stored(inputs[leaf.name]) for leaf, stored in zip(leaves, self.leaves, strict=True))
        params, value, state = self.model(obs, inputs.get(STATE))
        outputs = self.decided(params, inputs.get(MASK))
        outputs |= {PARAMS: params, VALUE: value * self.model.unit.std + self.model.unit.mean}
        return outputs if state is None or not self.state_size else outputs | {NEXT_STATE: state}

    def decided(self, params: Tensor, mask: Tensor | None) -> dict[str, Tensor]:
        """The most probable actions of a distribution, by name."""
        categorical, continuous = self.model.distribution.mode(params, mask)
        actions = (part(categorical, continuous) for part in self.actions)
        return dict(zip(self.action_names, actions, strict=True))

    def examples(self, rows: int, seed: int = 0) -> dict[str, Tensor]:
        """Random inputs of so many rows, from the observation space."""
        random, observation = np.random.default_rng(seed), self.spec.observation
        inputs = {
            leaf.name: torch.from_numpy(_random_leaf(leaf, observation.space, rows, random))
            for leaf in observation.leaves
        }
        if self.spec.masked:
            mask = random.random((rows, self.spec.action.logits)) < 0.5
            mask[:, np.cumsum((0, *self.spec.action.sizes[:-1]))] = True
            inputs[MASK] = torch.from_numpy(mask)
        if self.state_size:
            inputs[STATE] = torch.from_numpy(random.uniform(-1, 1, (rows, self.state_size)).astype(np.float32))
        return inputs


class _StoredLeaf(nn.Module):
    """A leaf as the environment gives it to the leaf as the model reads it: categories from 0, in the stored dtype."""

    start: Tensor | None

    def __init__(self, leaf: Leaf) -> None:
        super().__init__()
        self.dtype = torch_dtype(leaf.dtype)
        start = torch.tensor(leaf.start).reshape(leaf.shape) if leaf.sizes else None
        self.register_buffer("start", start, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return x if self.start is None else (x - self.start).to(self.dtype)


def given_dtype(leaf: Leaf) -> np.dtype:
    """The dtype in which a leaf is given: as it is stored, but int64 for categories that need more than a byte."""
    return np.dtype(np.int64) if leaf.dtype == np.int32 else leaf.dtype


def _random_leaf(leaf: Leaf, space: Any, rows: int, random: np.random.Generator) -> np.ndarray:
    """A leaf of an observation space; normal where its numbers have no bounds that observations could reach."""
    if leaf.sizes:
        sizes, start = (np.reshape(values, leaf.shape) for values in (leaf.sizes, leaf.start))
        return (start + random.integers(sizes, size=(rows, *leaf.shape))).astype(given_dtype(leaf))
    if leaf.dtype == np.uint8:
        return random.integers(0, leaf.high + 1, (rows, *leaf.shape), np.uint8)
    for key in leaf.path:
        space = space.spaces[key]
    low, high = (np.clip(bound.astype(float), -LARGEST, LARGEST) for bound in (space.low, space.high))
    bounded, shape = (low > -LARGEST) & (high < LARGEST), (rows, *leaf.shape)
    return np.where(bounded, random.uniform(low, high, shape), random.normal(size=shape)).astype(np.float32)
