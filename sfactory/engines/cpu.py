"""What an engine is, and the engines on the CPU.

- :class:`DirectEngine`: small fully connected models on the CPU, request by request.
- :class:`TorchEngine`: any model on the CPU, one forward pass for all requests.
- :class:`sfactory.engines.graphed.GraphedEngine`: any model on CUDA, recorded forward passes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from sfactory.data.arena import Arena
from sfactory.data.weights import FlatWeights, PublishedWeights
from sfactory.kernels import DenseNetwork, lower_weights
from sfactory.model.interface import Model
from sfactory.model.precision import mixed_precision
from sfactory.telemetry.stopwatch import Stopwatch

Request = tuple[int, int, int, bool]
"""Slot, group, step and whether only the values are asked for; see :func:`sfactory.data.queues.unpack_request`."""


class Engine(Protocol):
    """What a policy worker needs of an engine.

    The RNN state of a group stays in the engine, on its device; what a segment begins with is written into the slot at
    step 0. A request for values alone leaves the state as it is.
    """

    def refresh(self, weights: PublishedWeights) -> int:
        """Take over the newest weights; gives their version."""

    def answers(self, requests: list[Request]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """For each request, in order, policy parameters float32 ``[rows, P]`` and values ``[rows]``, valid until the
        next call."""


class DirectEngine:
    """Answers each request by itself, from where its observations lie.

    Args:
        network: Answers with the weights in `flat`.
        flat: The model's weights.
    """

    def __init__(self, network: DenseNetwork, flat: FlatWeights, arena: Arena) -> None:
        self._network, self._flat, self._obs = network, flat, arena.obs

    def refresh(self, weights: PublishedWeights) -> int:
        version = weights.read(self._flat.vector)
        self._network.refresh()
        return version

    def answers(self, requests: list[Request]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for slot, _, t, _ in requests:
            yield self._network(tuple(leaf[slot, t] for leaf in self._obs))


class TorchEngine:
    """Answers all requests with one forward pass on the CPU.

    Args:
        model: The actor-critic, in evaluation mode.
        flat: The model's weights.
        groups: Of the run.
        autocast: torch dtype to compute in, or None for float32.
    """

    def __init__(
        self,
        model: Model,
        flat: FlatWeights,
        arena: Arena,
        groups: int,
        autocast: torch.dtype | None,
        watch: Stopwatch,
    ) -> None:
        self._model, self._flat, self._arena, self._autocast, self._watch = model, flat, arena, autocast, watch
        self._joined = [np.empty((arena.rows * groups, *leaf.shape[3:]), leaf.dtype) for leaf in arena.obs]
        self._states, self._joined_states = np.zeros((2, groups, arena.rows, model.state_size), np.float32)

    def refresh(self, weights: PublishedWeights) -> int:
        version = weights.read(self._flat.vector)
        lower_weights(self._model, self._autocast)
        return version

    def answers(self, requests: list[Request]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        with torch.inference_mode(), mixed_precision("cpu", self._autocast):
            obs = tuple(
                self._join(i, [leaf[slot, t] for slot, _, t, _ in requests]) for i, leaf in enumerate(self._arena.obs)
            )
            states = self._load_states(requests)
            self._watch.lap("copying")
            params, value, state = self._model(obs, states)
            self._store_states(requests, state)
        shape = len(requests), self._arena.rows
        return zip(params.float().numpy().reshape(*shape, -1), value.float().numpy().reshape(shape), strict=True)

    def _join(self, leaf: int, blocks: list[np.ndarray]) -> Tensor:
        """One tensor ``[sum of rows, *shape]``: one block as it is, several in memory that is kept."""
        if len(blocks) == 1:
            return torch.from_numpy(blocks[0])
        return torch.from_numpy(np.concatenate(blocks, out=self._joined[leaf][: len(blocks) * self._arena.rows]))

    def _load_states(self, requests: list[Request]) -> Tensor | None:
        """The RNN states of all requested rows, zeroed where an episode begins; kept in the slot where a segment
        begins."""
        size = self._model.state_size
        if not size:
            return None
        for (slot, group, t, value_only), joined in zip(requests, self._joined_states, strict=False):
            if t == 0 and not value_only:
                self._arena.rnn_state[slot] = self._states[group]
            joined[:] = self._states[group]
            if not value_only:
                joined[self._arena.first[slot, t]] = 0.0
        return torch.from_numpy(self._joined_states[: len(requests)]).view(-1, size)

    def _store_states(self, requests: list[Request], state: Tensor | None) -> None:
        if state is None:
            return
        for (_, group, _, value_only), rows in zip(
            requests, state.float().numpy().reshape(len(requests), self._arena.rows, -1), strict=True
        ):
            if not value_only:
                self._states[group] = rows
