"""The policy worker: answers the requests of many groups, with one forward pass or, for small networks, by compiled loops."""

from __future__ import annotations

from collections import defaultdict
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch
from torch import Tensor, nn

from sfactory.arena import Arena
from sfactory.fused_policy import FusedPolicy
from sfactory.model import lower_weights
from sfactory.queues import Queue, unpack_request
from sfactory.sampling import sample_rows
from sfactory.timing import Stopwatch
from sfactory.weights import FlatWeights, WeightBoard


class PolicyWorker:
    """Batched inference for the groups that are assigned to it.

    The RNN state of a group stays here, on the device; only what a segment begins with goes into the slot. So every request of a group
    must come to the same policy worker.

    Args:
        model: The actor-critic, on `device`.
        arena: Where observations are read and actions written.
        weights: The learner's newest weights.
        requests: Packed requests.
        ready: For each group of the run, the queue of its rollout worker.
        seed: Of the sampling.
        autocast: torch dtype to compute in, or None for float32.
        watch: This worker's stopwatch.
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
    ) -> None:
        self._model, self._arena, self._weights, self._requests, self._ready = model.eval(), arena, weights, requests, ready
        self._device, self._autocast, self._watch = device, autocast, watch
        self._flat = FlatWeights(model)
        self._fused = FusedPolicy(model) if FusedPolicy.fits(model, autocast) else None
        self._version = -1
        self._rng = np.random.default_rng(seed)
        self._states = torch.zeros(len(ready), arena.rows, model.state_size, device=device) if model.state_size else None
        self._sizes = np.array(model.action.sizes, np.int32)
        self._no_mask = np.zeros((0, 0), bool)
        staged = arena.obs if self._fused is None else ()
        self._staging = [_Staging(leaf.shape[3:], leaf.dtype, arena.rows * len(ready), device) for leaf in staged]
        watch.lap("starting")

    def poll(self, timeout: float) -> None:
        """Answer all requests that are waiting, waiting for the first up to `timeout` seconds."""
        messages = self._requests.get_many(timeout)
        self._watch.lap("waiting")
        if messages:
            self.serve([unpack_request(message) for message in messages])
            self._watch.count(len(messages) * self._arena.rows)

    def serve(self, requests: list[tuple[int, int, int, bool]]) -> None:
        """Answer requests ``(slot, group, step, value_only)``, and tell their groups."""
        self._refresh_weights()
        self._watch.lap("weights")
        if self._fused is None:
            params, value = self._forward(requests)
            self._watch.lap("forward")
            rows = self._arena.rows
            for i, request in enumerate(requests):
                self._write_answer(request, params[i * rows : (i + 1) * rows], value[i * rows : (i + 1) * rows])
            self._watch.lap("sampling")
        else:
            for request in requests:
                slot, _, t, _ = request
                params, value = self._fused(self._arena.obs[0][slot, t])
                self._watch.lap("forward")
                self._write_answer(request, params, value)
                self._watch.lap("sampling")
        answers = defaultdict(list)
        for _, group, _, _ in requests:
            answers[self._ready[group]].append(group)
        for queue, groups in answers.items():
            queue.put_many(groups)
        self._watch.lap("queue")

    def _forward(self, requests: list[tuple[int, int, int, bool]]) -> tuple[np.ndarray, np.ndarray]:
        """Policy parameters and values of all requested rows, from one batch."""
        with torch.inference_mode(), self._autocast_context():
            obs = tuple(
                s.gather([leaf[slot, t] for slot, _, t, _ in requests]) for s, leaf in zip(self._staging, self._arena.obs, strict=True)
            )
            states = self._load_states(requests)
            self._watch.lap("copying")
            params, value, state = self._model(obs, states)
            self._store_states(requests, state)
            if self._device.type != "cpu":
                packed = torch.cat((params, value.unsqueeze(-1)), -1).cpu()
                params, value = packed[:, :-1], packed[:, -1]
        return params.numpy(), value.numpy()

    def _refresh_weights(self) -> None:
        if self._weights.version != self._version:
            self._version = self._weights.read(self._flat.vector)
            if self._fused is not None:
                self._fused.refresh()
            elif self._device.type == "cpu":
                lower_weights(self._model, self._autocast)

    def _load_states(self, requests: list[tuple[int, int, int, bool]]) -> Tensor | None:
        """The RNN states of all requested rows, zeroed where an episode begins; kept in the slot where a segment begins."""
        if self._states is None:
            return None
        for slot, group, t, value_only in requests:
            if t == 0 and not value_only:
                self._arena.rnn_state[slot] = self._states[group].cpu().numpy()
        states = torch.cat([self._states[group] for _, group, _, _ in requests])
        first = np.concatenate(
            [self._arena.first[slot, t] if not value_only else np.zeros(self._arena.rows, bool) for slot, _, t, value_only in requests]
        )
        return states * torch.from_numpy(~first).to(self._device).unsqueeze(-1)

    def _store_states(self, requests: list[tuple[int, int, int, bool]], state: Tensor | None) -> None:
        if state is None:
            return
        for (_, group, _, value_only), rows in zip(requests, state.split(self._arena.rows), strict=True):
            if not value_only:
                self._states[group] = rows

    def _autocast_context(self) -> AbstractContextManager:
        return nullcontext() if self._autocast is None else torch.autocast(self._device.type, self._autocast)

    def _write_answer(self, request: tuple[int, int, int, bool], params: np.ndarray, value: np.ndarray) -> None:
        """Sample a group's actions and write them, their probabilities, values and the version into its slot."""
        arena, (slot, _, t, value_only) = self._arena, request
        arena.value[slot, t] = value
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


class _Staging:
    """Puts blocks of rows together on the device: no copy for one block on the CPU, else one into a kept buffer (pinned for CUDA)."""

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype, rows: int, device: torch.device) -> None:
        self._device = device
        probe = torch.from_numpy(np.empty(0, dtype))
        self._host = torch.empty((rows, *shape), dtype=probe.dtype, pin_memory=device.type == "cuda")
        self._array = self._host.numpy()
        self._on_device = torch.empty_like(self._host, device=device) if device.type == "cuda" else self._host

    def gather(self, blocks: list[np.ndarray]) -> Tensor:
        """One tensor ``[sum of rows, *shape]``; valid until the next call."""
        if len(blocks) == 1 and self._device.type == "cpu":
            return torch.from_numpy(blocks[0])
        rows = 0
        for block in blocks:
            np.copyto(self._array[rows : rows + len(block)], block)
            rows += len(block)
        if self._device.type == "cpu":
            return self._host[:rows]
        self._on_device[:rows].copy_(self._host[:rows], non_blocking=True)
        return self._on_device[:rows]
