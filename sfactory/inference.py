"""The policy worker: answers the requests of many groups at once."""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from sfactory.data.plane import DataPlane
from sfactory.data.queues import unpack_request
from sfactory.data.weights import FlatWeights
from sfactory.engines.cpu import DirectEngine, Engine, Request, TorchEngine
from sfactory.engines.graphed import GraphedEngine
from sfactory.kernels import Kernels
from sfactory.model.interface import Model
from sfactory.telemetry.stopwatch import Stopwatch


class PolicyWorker:
    """Batched inference for the groups that are assigned to it.

    The RNN state of a group stays on this worker's device; only the state before a segment is written into the slot.
    So every request of a group must come to the same policy worker.

    Args:
        index: Number of this policy worker.
        model: The actor-critic, on the device where it computes.
        kernels: Chooses the kernels of the model.
        seed: Seed for action sampling.
        plane: Data plane of the run.
        watch: Stopwatch of this worker.

    Attributes:
        choice: The kernels that it runs with, and those that were refused.
    """

    def __init__(
        self,
        index: int,
        model: Model,
        kernels: Kernels,
        seed: int,
        plane: DataPlane,
        watch: Stopwatch,
    ) -> None:
        self._arena, self._weights, self._requests = plane.arena, plane.weights, plane.requests[index]
        self._ready, self._watch = [plane.ready_of(group) for group in range(plane.groups)], watch
        watch.queues = set(self._ready)
        self._engine = _engine_for(index, model.eval(), kernels, plane, watch)
        self._sample = kernels.sampler(seed)
        self.choice = kernels.choice
        self._unit, self._scale_and_shift = model.unit, (1.0, 0.0)
        self._remembers = model.state_size > 0
        self._version = -1
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
        self._answer(requests, newer)
        if outdated := self._outdated(requests):
            self._answer(outdated, False)
        answers = defaultdict(list)
        for _, group, _, _ in requests:
            answers[self._ready[group]].append(group)
        for queue, groups in answers.items():
            queue.put_many(groups)
        self._watch.lap("queue")

    def _answer(self, requests: list[Request], newer: bool) -> None:
        """Run the policy, and write what it answers.

        Args:
            newer: Its weights have just been refreshed.
        """
        for request, (params, value) in zip(requests, self._engine.answers(requests), strict=True):
            self._watch.lap("forward")
            if newer:  # only after the first answer is the copy of the weights done, on whatever stream
                self._scale_and_shift, newer = (self._unit.std.item(), self._unit.mean.item()), False
            self._write_answer(request, params, value)
            self._watch.lap("sampling")

    def _outdated(self, requests: list[Request]) -> list[Request]:
        """Requests for the values before final observations that older weights have given: a rollout worker takes the
        difference of the two. With a memory there are none, since the state before the step is gone."""
        version = self._arena.version
        return [
            (slot, group, t - 1, True)
            for slot, group, t, value_only in requests
            if value_only and not self._remembers and version[slot, t - 1] != self._version
        ]

    def _write_answer(self, request: Request, params: np.ndarray, value: np.ndarray) -> None:
        """Sample a group's actions, and write them with log probabilities, values and version into its slot."""
        arena, (slot, _, t, value_only) = self._arena, request
        scale, shift = self._scale_and_shift
        arena.value[slot, t] = value if (scale, shift) == (1.0, 0.0) else value * scale + shift
        if value_only:
            return
        arena.version[slot, t] = self._version
        mask = None if arena.mask is None else arena.mask[slot, t]
        self._sample(params, mask, arena.categorical[slot, t], arena.continuous[slot, t], arena.log_prob[slot, t])


def _engine_for(index: int, model: Model, kernels: Kernels, plane: DataPlane, watch: Stopwatch) -> Engine:
    """The fastest engine for a policy worker's model on its device."""
    autocast, arena, groups = kernels.autocast, plane.arena, plane.groups
    if kernels.device.type != "cpu":
        own = [group for group in range(groups) if plane.policy_worker_of[group] == index]
        return GraphedEngine(model, arena, own, autocast, watch, kernels.config.runtime.cuda_graphs)
    flat = FlatWeights(model)  # before a network takes note of where the weights lie
    if (network := kernels.dense_network()) is not None:
        return DirectEngine(network, flat, arena)
    kernels.optimize()
    return TorchEngine(model, flat, arena, groups, autocast, watch)
