"""Sampling on the learner's device: environments that are tensors there, and the learner's own policy.

Where environments are thousands of rows of one simulation on the device, nothing is won by sending observations and
actions through the host. So there are no rollout workers, policy workers or slots: the learner's process samples a
batch with the present weights, straight into the tensors that it then learns from, and the lag is always 0.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from sfactory.config import Config, devices
from sfactory.config.lag import segments_per_batch
from sfactory.data.arena import segment_fields
from sfactory.data.batch import Batch
from sfactory.data.feed import Fresh
from sfactory.data.plane import EventSink
from sfactory.envs.interface import EnvSpec, SurvivedFault, whole_ends
from sfactory.envs.tensors.group import TensorGroup, TensorOutcome, TensorStep
from sfactory.model.interface import Model
from sfactory.model.precision import mixed_precision
from sfactory.spaces.tensors import torch_dtype
from sfactory.telemetry.events import Episodes, SurvivedFaults
from sfactory.telemetry.stopwatch import Stopwatch


class DeviceRollout:
    """A :class:`~sfactory.data.feed.Feed` that samples by itself, a batch when one is wanted.

    It waits for the device after each segment, to know how many samples and which episodes there were. A row with bad
    values has no part in training from the beginning of the segment on, nor its episode in the reports.

    Args:
        config: Configuration of the run.
        group: The environments.
        model: The learner's actor-critic, on the device of everything.
        seed: Of environments and of sampled actions.
        events: Destination of events for the runner.
        watch: Stopwatch of the learner.
    """

    def __init__(
        self,
        config: Config,
        group: TensorGroup,
        model: Model,
        seed: int,
        events: EventSink,
        watch: Stopwatch,
    ) -> None:
        self._group, self._model, self._seed = group, model, seed
        self._device = device = next(model.parameters()).device
        self._autocast = devices.autocast_dtype(config, group.spec.observation.has_images, device)
        self._emit, self._watch = events.put, watch
        self._sample = model.distribution.sample
        self._generator = torch.Generator(device).manual_seed(seed + 1)
        segments = segments_per_batch(config, group.rows)
        self._batch = empty_batch(group.spec, model.state_size, config.rollout, segments * group.rows, device)
        rows = group.rows
        self._segments = [self._batch.select(slice(i * rows, (i + 1) * rows)) for i in range(segments)]
        leaves = () if group.rests else tuple(leaf[:-1] for leaf in self._segments[0].obs)
        self._finals = tuple(map(torch.zeros_like, leaves))
        self._state = torch.zeros(rows, model.state_size, device=device)
        self._states = torch.zeros(config.rollout, rows, 0 if group.rests else model.state_size, device=device)
        self._values = torch.zeros(config.rollout, 0 if group.rests else rows, device=device)
        self._episodes = EpisodeTensors(config.rollout, rows, device)

    @torch.no_grad()
    def start(self, weights: Tensor, updates: int) -> None:
        """Begin the first episodes."""
        self._group.reset(self._seed, _step_of(self._segments[-1], -1))
        self._watch.lap("environment")

    def reclaim(self) -> None:
        """Do nothing: no other process samples."""

    @torch.no_grad()
    def next(self, updates: int, timeout: float) -> Fresh | None:
        """Sample a batch; None if there is nothing in it to be learned from. `timeout` has no meaning here."""
        self._model.eval()
        before = self._segments[-1]
        for segment in self._segments:
            self._carry(before, segment)
            segment.rnn_state.copy_(self._state)
            for t in range(len(segment.reward)):
                self._step(segment, t)
            self._bootstrap(segment)
            self._survive_faults(segment)
            self._emit_episodes()
            before = segment
        self._model.train()
        samples = int(self._batch.active[:-1].sum())
        self._watch.lap("sampling")
        return Fresh(self._batch, samples) if samples else None

    def between_updates(self) -> None:
        """Do nothing."""

    def epoch_done(self, updates: int) -> None:
        """Do nothing."""

    def batch_done(self, updates: int) -> None:
        """Do nothing: the learner's weights are the policy's."""

    def close(self) -> None:
        """Close the environments."""
        self._group.close()

    def _carry(self, before: Batch, segment: Batch) -> None:
        """Begin a segment with what the last one ended with."""
        (obs, mask, first, active), new = _step_of(before, -1), _step_of(segment, 0)
        for old, leaf in zip(obs, new.obs, strict=True):
            leaf.copy_(old)
        if mask is not None and new.mask is not None:
            new.mask.copy_(mask)
        new.first.copy_(first)
        new.active.copy_(active)

    def _step(self, segment: Batch, t: int) -> None:
        """Choose the actions of a step, and take them."""
        here, after = _step_of(segment, t), _step_of(segment, t + 1)
        params, value, state = self._answer(here.obs, here.first)
        self._watch.lap("forward")
        drawn = self._sample(params, here.mask, self._generator)
        for out, taken in zip((segment.categorical, segment.continuous, segment.log_prob), drawn, strict=True):
            out[t].copy_(taken)
        self._watch.lap("sampling")
        outcome = TensorOutcome(
            segment.reward[t], segment.terminated[t], segment.truncated[t], tuple(leaf[t] for leaf in self._finals)
        )
        self._group.step(segment.categorical[t], segment.continuous[t], outcome, after)
        if not self._group.rests:  # for the bootstraps of truncated rows
            self._values[t].copy_(value)
            if state is not None:
                self._states[t].copy_(state)
        if state is not None:
            self._state = state
        self._episodes.record(t, here.active, outcome, self._group.goes_on, self._group.extras)
        self._watch.lap("environment")

    def _answer(self, obs: tuple[Tensor, ...], first: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Policy parameters, values and next states of all rows."""
        state = self._state.masked_fill(first[:, None], 0.0) if self._model.state_size else None
        with mixed_precision(self._device.type, self._autocast):
            params, value, state = self._model(obs, state)
        return params.float(), value.float(), None if state is None else state.float()

    def _bootstrap(self, segment: Batch) -> None:
        """How far the last observations of truncated episodes, whose rows have been reset since, change the value."""
        segment.final_change.fill_(math.nan)
        if self._group.rests:
            return
        steps, rows = segment.truncated.nonzero(as_tuple=True)
        if not len(steps):
            return
        most = self._group.rows
        for t, row in zip(steps.split(most), rows.split(most), strict=True):
            state = self._states[t, row] if self._model.state_size else None
            with mixed_precision(self._device.type, self._autocast):
                _, value, _ = self._model(tuple(leaf[t, row] for leaf in self._finals), state)
            segment.final_change[t, row] = (value.float() - self._values[t, row]) * self._model.unit.std
        self._watch.lap("forward")

    def _emit_episodes(self) -> None:
        ended = self._episodes.take()
        if len(ended.returns):
            self._emit(ended)

    def _survive_faults(self, segment: Batch) -> None:
        """Leave the rows whose values are not fit to be learned from out of a segment, and report them."""
        faulty = self._group.faulty
        rows = faulty.nonzero()[:, 0].tolist()
        if not rows:
            return
        segment.active[:-1].logical_and_(~faulty)
        self._episodes.exclude(faulty)
        faulty.zero_()
        self._watch.env_faults += len(rows)
        self._watch.flush()  # the runner compares its totals with the budget when this event arrives
        name = self._group.name
        message = (
            f"{name}: observations or rewards of {len(rows)} rows, of which {rows[0]} is the first, are not finite or "
            "outside their space, or action masks allow nothing; these rows are left out of this segment"
        )
        self._emit(SurvivedFaults({name: len(rows)}, SurvivedFault(rows, name, message, len(rows))))


class EpisodeTensors:
    """Returns, lengths and extras of episodes, kept on the device for the steps of a segment. Where an end is one for
    the learner alone, those of whole games.

    Args:
        steps, rows: Size of a segment.
        device: Of the tensors.
    """

    def __init__(self, steps: int, rows: int, device: torch.device) -> None:
        self._extras: dict[str, Tensor] = {}
        self._return = torch.zeros(rows, dtype=torch.float64, device=device)
        self._length = torch.zeros(rows, dtype=torch.int32, device=device)
        self._returns, self._lengths, self._ended = (
            torch.zeros(steps, rows, dtype=kind, device=device) for kind in (torch.float32, torch.int32, torch.bool)
        )

    def record(
        self, t: int, active: Tensor, outcome: TensorOutcome, goes_on: Tensor | None, extras: Mapping[str, Tensor]
    ) -> None:
        """Account for step t of a segment.

        Args:
            active: bool ``[rows]``, before the step.
            outcome: Of its actions.
            goes_on: bool ``[rows]``, terminations that do not end the row's game; None if there are none.
            extras: Numeric entries ``[rows]`` of the step's info.
        """
        self._return += outcome.reward
        self._length += active
        ended = whole_ends(outcome, goes_on)
        for name, values in extras.items():
            if name not in self._extras:
                self._extras[name] = torch.full_like(self._returns, math.nan)
            self._extras[name][t].copy_(values)
        self._returns[t].copy_(self._return)
        self._lengths[t].copy_(self._length)
        self._ended[t].copy_(ended)
        self._return.masked_fill_(ended, 0.0)
        self._length.masked_fill_(ended, 0)

    def exclude(self, rows: Tensor) -> None:
        """Exclude the episodes of some rows, bool ``[rows]``, that are or were under way in the segment."""
        self._return.masked_fill_(rows, math.nan)
        self._returns.masked_fill_(rows, math.nan)

    def take(self) -> Episodes:
        """The episodes that ended in the segment."""
        counted = (self._ended & ~self._returns.isnan()).nonzero(as_tuple=True)  # the one wait for their number
        returns, lengths, *extras = (
            each[counted].cpu().numpy() for each in (self._returns, self._lengths, *self._extras.values())
        )
        taken = Episodes(returns, lengths, dict(zip(self._extras, extras, strict=True)))
        for values in self._extras.values():
            values.fill_(math.nan)
        return taken


def empty_batch(env: EnvSpec, state_size: int, steps: int, columns: int, device: torch.device) -> Batch:
    """A batch of zeros ``[steps(+1), columns]`` on a device."""
    leading = {"T+1": (steps + 1, columns), "T": (steps, columns), "1": (columns,)}
    tensors = {
        field.name: torch.zeros(*leading[field.steps], *field.shape, dtype=torch_dtype(field.dtype), device=device)
        for field in segment_fields(env, state_size)
        if field.per_row
    }
    obs = tuple(tensors[leaf.name] for leaf in env.observation.leaves)
    others: dict[str, Any] = {f.name: tensors.get(f.name) for f in dataclasses.fields(Batch) if f.name != "obs"}
    return Batch(obs, **others)


def _step_of(batch: Batch, t: int) -> TensorStep:
    """Views of what the policy sees at step t."""
    mask = None if batch.mask is None else batch.mask[t]
    return TensorStep(tuple(leaf[t] for leaf in batch.obs), mask, batch.first[t], batch.active[t])
