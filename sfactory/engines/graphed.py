"""The engine of policy workers on CUDA: padded batches, and for each size a forward pass that is recorded once.

A batch costs the host one copy of all observations, flags and indices to the device, one launch, one copy of all
answers back, and one wait. Requests are padded to the next of a few numbers of groups, because a recording is for one
size. Weights are written in place, and cast to autocast's dtype then instead of in each pass; RNN states stay on the
device, gathered and scattered by the groups' indices inside the recording. On the CPU the same code runs without
streams and recordings, which is how the tests hold it to :class:`sfactory.engines.cpu.TorchEngine`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.func import functional_call

from sfactory.data.arena import Arena
from sfactory.data.cuda_graphs import Recorder, Work
from sfactory.data.staging import StagingBuffer
from sfactory.data.weights import FlatWeights, PublishedWeights
from sfactory.engines.casts import CastWeights
from sfactory.engines.cpu import Request
from sfactory.model.interface import Model
from sfactory.model.precision import mixed_precision
from sfactory.telemetry.stopwatch import Stopwatch

TOLERANCE = {None: 1e-3, torch.bfloat16: 5e-2}
"""By how much a recording's results may differ, by autocast's dtype."""


class _Pass(NamedTuple):
    """The forward pass for G groups.

    Attributes:
        inputs: Observation leaves ``[G rows, *shape]``, bool ``first [G rows]``, and int64 ``[G]`` the places of the
            states that are read and of those that are written.
        outputs: Policy parameters ``[G rows, P]``, values ``[G rows]``, and the states that were read ``[G rows, S]``.
        run: Computes the outputs on the device.
    """

    inputs: StagingBuffer
    outputs: StagingBuffer
    run: Work


def padded_sizes(groups: int) -> list[int]:
    """Numbers of groups that are computed at once: the powers of two, and all."""
    return [*(2**i for i in range((groups - 1).bit_length())), groups] if groups else []


class GraphedEngine:
    """Answers all requests with one recorded forward pass.

    Args:
        model: The actor-critic, in evaluation mode, on the device where it computes.
        groups: That ask this engine, by their numbers in the run.
        autocast: torch dtype to compute in, or None for float32.
        graphs: Off: nothing is recorded, all else stays the same.

    Attributes:
        recorder: Of the forward passes.
    """

    def __init__(
        self,
        model: Model,
        arena: Arena,
        groups: Sequence[int],
        autocast: torch.dtype | None,
        watch: Stopwatch,
        graphs: bool = True,
    ) -> None:
        device = next(model.parameters()).device
        self._model, self._arena, self._device, self._autocast, self._watch = model, arena, device, autocast, watch
        self._module = torch.get_device_module(device)
        self._stream, self._answered = self._module.Stream(device), self._module.Event()
        self._flat = FlatWeights(model)
        self._weights = torch.empty(self._flat.vector.shape, pin_memory=device.type == "cuda")
        # Padding reads and writes the states of nobody, and requests that shall leave none write them.
        self._places, self._nobody = {group: place for place, group in enumerate(groups)}, len(groups)
        self._states = torch.zeros(len(groups) + 1, arena.rows, model.state_size, device=device)
        self._sizes, self._passes = padded_sizes(len(groups)), dict[int, _Pass]()
        self._casts: CastWeights | None = None
        self._tolerance = TOLERANCE[autocast]
        self.recorder = Recorder(device, self._tolerance, graphs)
        self._stream.wait_stream(self._module.current_stream(device))
        if graphs and device.type == "cuda":  # at once, so that no request waits for a recording
            with torch.inference_mode(), self._module.stream(self._stream):
                for size in self._sizes:
                    self._make_pass(size)

    def refresh(self, weights: PublishedWeights) -> int:
        # The copy of the last ones was done before the last answers, which the host has waited for.
        version = weights.read(self._weights)
        with torch.inference_mode(), self._module.stream(self._stream):
            self._flat.vector.copy_(self._weights, non_blocking=True)
            if self._casts is not None:
                self._casts.refresh()
        return version

    def answers(self, requests: list[Request]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        shape = len(requests), self._arena.rows
        begun = [i for i, (_, _, t, value_only) in enumerate(requests) if t == 0 and not value_only]
        with torch.inference_mode(), self._module.stream(self._stream):
            inputs, outputs, run = self._pass_for(requests)
            self._fill(inputs, requests)
            self._watch.lap("copying")
            inputs.upload()
            run()
            outputs.download(3 if begun and self._states.numel() else 2)
            self._answered.record(self._stream)
        self._answered.synchronize()
        params, value, states = (
            array[: len(requests) * self._arena.rows].reshape(*shape, *array.shape[1:]) for array in outputs.arrays
        )
        for i in begun:
            self._arena.rnn_state[requests[i][0]] = states[i]
        return zip(params, value, strict=True)

    def _pass_for(self, requests: list[Request]) -> _Pass:
        """The smallest pass that holds all requests."""
        size = next(size for size in self._sizes if size >= len(requests))
        return self._passes[size] if size in self._passes else self._make_pass(size)

    def _make_pass(self, size: int) -> _Pass:
        """A pass for a number of groups, tried out on zeros."""
        rows, state_size = size * self._arena.rows, self._states.shape[-1]
        leaves = [((rows, *leaf.shape[3:]), leaf.dtype) for leaf in self._arena.obs]
        real, index = np.dtype(np.float32), np.dtype(np.int64)
        inputs = StagingBuffer([*leaves, ((rows,), np.dtype(bool)), ((size,), index), ((size,), index)], self._device)
        width = self._model.distribution.width
        outputs = StagingBuffer([((rows, width), real), ((rows,), real), ((rows, state_size), real)], self._device)

        def answer(copies: dict[str, Tensor]) -> list[Tensor]:
            self._forward(inputs, outputs, copies)
            return [result.clone() for result in outputs.tensors[:2]]

        self._fill(inputs, [])
        inputs.upload()
        casts = self._casts = self._casts or CastWeights(self._model, self._autocast, answer, self._tolerance)

        def run() -> None:
            self._forward(inputs, outputs, casts.copies)

        self._passes[size] = _Pass(inputs, outputs, self.recorder(run, outputs.tensors[:2]))
        return self._passes[size]

    def _fill(self, inputs: StagingBuffer, requests: list[Request]) -> None:
        """Put requests into host memory. What is left of older ones in the padding is computed too, and read by
        nobody."""
        arena, (*obs, first, read, written) = self._arena, inputs.arrays
        read[:] = written[:] = self._nobody
        first[:] = True
        for i, (slot, group, t, value_only) in enumerate(requests):
            rows = slice(i * arena.rows, (i + 1) * arena.rows)
            for target, leaf in zip(obs, arena.obs, strict=True):
                target[rows] = leaf[slot, t]
            first[rows] = False if value_only else arena.first[slot, t]
            read[i] = self._places[group]
            written[i] = self._nobody if value_only else read[i]

    def _forward(self, inputs: StagingBuffer, outputs: StagingBuffer, copies: dict[str, Tensor]) -> None:
        *obs, first, read, written = inputs.tensors
        params, value, states = outputs.tensors
        before = None
        if self._states.numel():
            torch.index_select(self._states, 0, read, out=states.view(len(read), *self._states.shape[1:]))
            before = states.masked_fill(first.unsqueeze(-1), 0.0)
        with mixed_precision(self._device.type, self._autocast, keep_casts=False):
            new_params, new_value, after = functional_call(self._model, copies, (tuple(obs), before))
        params.copy_(new_params)
        value.copy_(new_value)
        if before is not None:
            self._states.index_copy_(0, written, after.float().view(len(read), *self._states.shape[1:]))
