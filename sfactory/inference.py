"""The policy worker: answers the requests of many groups at once."""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from sfactory.data.arena import Arena
from sfactory.data.plane import DataPlane
from sfactory.data.queues import unpack_request
from sfactory.engines.cpu import CompiledEngine, Engine, Request, TorchEngine
from sfactory.engines.graphed import GraphedEngine
from sfactory.kernels.dense_network import DenseNetwork
from sfactory.kernels.sampling import sample_rows
from sfactory.telemetry.stopwatch import Stopwatch


class InferenceSettings(NamedTuple):
    """How a policy worker computes.

    Attributes:
        device: Device of the model.
        autocast: torch dtype to compute in, or None for float32.
        seed: Seed for action sampling.
        cuda_graphs: Whether forward passes on CUDA are recorded as graphs.
    """

    device: torch.device
    autocast: torch.dtype | None
    seed: int
    cuda_graphs: bool = True


class PolicyWorker:
    """Batched inference for the groups that are assigned to it.

    The RNN state of a group stays on this worker's device; only the state before a segment is written into the slot.
    So every request of a group must come to the same policy worker.

    Args:
        index: Number of this policy worker.
        model: The actor-critic, on the settings' device.
        settings: Device, precision and seed.
        plane: Data plane of the run.
        watch: Stopwatch of this worker.
    """

    def __init__(
        self, index: int, model: nn.Module, settings: InferenceSettings, plane: DataPlane, watch: Stopwatch
    ) -> None:
        self._arena, self._weights, self._requests = plane.arena, plane.weights, plane.requests[index]
        self._ready, self._watch = [plane.ready_of(group) for group in range(plane.groups)], watch
        self._engine = _engine_for(model.eval(), settings, plane.arena, plane.groups, watch)
        self._unit, self._scale_and_shift = model.unit, (1.0, 0.0)
        self._version = -1
        self._rng = np.random.default_rng(settings.seed)
        self._sizes = np.array(model.action.sizes, np.int32)
        self._no_mask = np.zeros((0, 0), bool)
        watch.lap("starting")

    def poll(self, timeout: float) -> None:
        """Answer all waiting requests; wait up to `timeout` seconds for the first."""
        messages = self._requests.get_many(timeout)
        self._watch.lap("waiting")
        if messages:
            self.serve([unpack_request(message) for message in messages])
            self._watch.count(len(messages) * self._arena.rows)

    def serve(self, requests: list[Request]) -> None:
        """Answer requests ``(slot, group, step, value_only)``, and notify the rollout workers of their groups.

        Actions, log probabilities, values and the policy version are written into the slots.
        """
        if newer := self._weights.version != self._version:
            self._version = self._engine.refresh(self._weights)
        self._watch.lap("weights")
        for request, (params, value) in zip(requests, self._engine.answers(requests), strict=True):
            self._watch.lap("forward")
            if newer:  # only after the first answer is the copy of the weights done, on whatever stream
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
        """Sample a group's actions, and write them with log probabilities, values and version into its slot."""
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


def _engine_for(model: nn.Module, settings: InferenceSettings, arena: Arena, groups: int, watch: Stopwatch) -> Engine:
    """The fastest engine for a model on a device."""
    device, autocast = settings.device, settings.autocast
    if device.type != "cpu":
        return GraphedEngine(model, arena, groups, device, autocast, watch, settings.cuda_graphs)
    if DenseNetwork.fits(model, autocast):
        return CompiledEngine(model, arena)
    return TorchEngine(model, arena, groups, autocast, watch)
