"""The policy worker: answers the requests of many groups at once."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import torch
from torch import nn

from sfactory.config import Config
from sfactory.data.arena import Arena
from sfactory.data.queues import Queue, unpack_request
from sfactory.data.weights import FlatWeights, WeightBoard
from sfactory.engines.cpu import DirectEngine, Engine, Request, TorchEngine
from sfactory.engines.graphed import GraphedEngine
from sfactory.kernels import Kernels
from sfactory.telemetry.stopwatch import Stopwatch


class PolicyWorker:
    """Batched inference for the groups that are assigned to it.

    The RNN state of a group stays here, on the device; only what a segment begins with goes into the slot. So every
    request of a group must come to the same policy worker.

    Args:
        config: Configuration of the run.
        model: The actor-critic, on `device`.
        arena: Where observations are read and actions written.
        weights: The learner's newest weights.
        requests: Packed requests.
        ready: For each group of the run, the queue of its rollout worker.
        seed: Of the sampling.
        autocast: torch dtype to compute in, or None for float32.
        watch: This worker's stopwatch.

    Attributes:
        kernels: The kernels that it runs with.
    """

    def __init__(
        self,
        config: Config,
        model: nn.Module,
        arena: Arena,
        weights: WeightBoard,
        requests: Queue,
        ready: list[Queue],
        device: torch.device,
        seed: int,
        autocast: torch.dtype | None,
        watch: Stopwatch,
    ) -> None:
        self._arena, self._weights, self._requests, self._ready, self._watch = arena, weights, requests, ready, watch
        kernels = Kernels(config, model.eval(), device, autocast)
        self._engine = _engine_for(
            model, kernels, arena, len(ready), device, autocast, watch, config.runtime.cuda_graphs
        )
        self._sample = kernels.sampler(seed)
        self.kernels = kernels.choice
        self._unit, self._scale_and_shift = model.unit, (1.0, 0.0)
        self._version = -1
        watch.lap("starting")

    def poll(self, timeout: float) -> None:
        """Answer all requests that are waiting, waiting for the first up to `timeout` seconds."""
        messages = self._requests.get_many(timeout)
        self._watch.lap("waiting")
        if messages:
            self.serve([unpack_request(message) for message in messages])
            self._watch.count(len(messages) * self._arena.rows)

    def serve(self, requests: list[Request]) -> None:
        """Answer requests ``(slot, group, step, value_only)``, and tell their groups."""
        if newer := self._weights.version != self._version:
            self._version = self._engine.refresh(self._weights)
        self._watch.lap("weights")
        for request, (params, value) in zip(requests, self._engine.answers(requests), strict=True):
            self._watch.lap("forward")
            if newer:  # read only now: with the first answer the copy of the weights, in whatever stream, is done
                self._scale_and_shift, newer = (float(self._unit.std), float(self._unit.mean)), False
            self._write_answer(request, params, value)
            self._watch.lap("sampling")
        answers = defaultdict(list)
        for _, group, _, _ in requests:
            answers[self._ready[group]].append(group)
        for queue, groups in answers.items():
            queue.put_many(groups)
        self._watch.lap("queue")

    def _write_answer(self, request: Request, params: np.ndarray, value: np.ndarray) -> None:
        """Sample a group's actions and write them, their probabilities, values and the version into its slot."""
        arena, (slot, _, t, value_only) = self._arena, request
        scale, shift = self._scale_and_shift
        arena.value[slot, t] = value if (scale, shift) == (1.0, 0.0) else value * scale + shift
        if value_only:
            return
        arena.version[slot, t] = self._version
        mask = None if arena.mask is None else arena.mask[slot, t]
        self._sample(params, mask, arena.categorical[slot, t], arena.continuous[slot, t], arena.log_prob[slot, t])


def _engine_for(
    model: nn.Module,
    kernels: Kernels,
    arena: Arena,
    groups: int,
    device: torch.device,
    autocast: torch.dtype | None,
    watch: Stopwatch,
    graphs: bool,
) -> Engine:
    """The fastest engine for a model on a device."""
    if device.type != "cpu":
        return GraphedEngine(model, arena, groups, device, autocast, watch, graphs)
    flat = FlatWeights(model)  # before a network takes note of where the weights lie
    if (network := kernels.dense_network()) is not None:
        return DirectEngine(network, flat, arena)
    kernels.optimize()
    return TorchEngine(model, arena, groups, autocast, watch)
