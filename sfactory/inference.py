"""The policy worker: answers the requests of many groups at once."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import torch
from torch import nn

from sfactory.data.arena import Arena
from sfactory.data.queues import Queue, unpack_request
from sfactory.data.weights import WeightBoard
from sfactory.engines.cpu import CompiledEngine, Engine, Request, TorchEngine
from sfactory.engines.graphed import GraphedEngine
from sfactory.kernels.dense_network import DenseNetwork
from sfactory.kernels.sampling import sample_rows
from sfactory.telemetry.stopwatch import Stopwatch


class PolicyWorker:
    """Batched inference for the groups that are assigned to it.

    The RNN state of a group stays here, on the device; only what a segment begins with goes into the slot. So every
    request of a group must come to the same policy worker.

    Args:
        model: The actor-critic, on `device`.
        arena: Where observations are read and actions written.
        weights: The learner's newest weights.
        requests: Packed requests.
        ready: For each group of the run, the queue of its rollout worker.
        seed: Of the sampling.
        autocast: torch dtype to compute in, or None for float32.
        watch: This worker's stopwatch.
        graphs: Record forward passes as CUDA graphs.
    """

    def __init__(
        self,
        model: nn.Module,
        arena: Arena,
        weights: WeightBoard,
        requests: Queue,
        ready: list[Queue],
        device: torch.device,
        seed: int,
        autocast: torch.dtype | None,
        watch: Stopwatch,
        graphs: bool = True,
    ) -> None:
        self._arena, self._weights, self._requests, self._ready, self._watch = arena, weights, requests, ready, watch
        self._engine = _engine_for(model.eval(), arena, len(ready), device, autocast, watch, graphs)
        self._unit, self._scale_and_shift = model.unit, (1.0, 0.0)
        self._version = -1
        self._rng = np.random.default_rng(seed)
        self._sizes = np.array(model.action.sizes, np.int32)
        self._no_mask = np.zeros((0, 0), bool)
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
        uniforms = self._rng.random((arena.rows, len(self._sizes)), np.float32)
        normals = self._rng.standard_normal((arena.rows, arena.continuous.shape[-1]), np.float32)
        mask = self._no_mask if arena.mask is None else arena.mask[slot, t]
        sample_rows(
            params, mask, self._sizes, uniforms, normals,
            arena.categorical[slot, t], arena.continuous[slot, t], arena.log_prob[slot, t],
        )  # fmt: skip


def _engine_for(
    model: nn.Module,
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
    if DenseNetwork.fits(model, autocast):
        return CompiledEngine(model, arena)
    return TorchEngine(model, arena, groups, autocast, watch)
