"""Where the learner's batches come from: :class:`SlotFeed` makes them of slots that other processes fill, and brings
these the weights.

A run whose environments are tensors on the learner's device has :class:`sfactory.device_rollout.DeviceRollout` in its
place.
"""

from __future__ import annotations

import time
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from sfactory.config import Config
from sfactory.config.lag import least_max_lag, max_lag, segments_per_batch
from sfactory.data.arena import FREE, OWN_POLICY
from sfactory.data.batch import Assembler, Batch
from sfactory.data.plane import DataPlane, Laps
from sfactory.data.scheduler import SlotReleaser, SlotScheduler
from sfactory.data.weights import WeightPublisher


class Fresh(NamedTuple):
    """Samples that the learner has not had yet.

    Attributes:
        batch: The samples, on the learner's device; valid until the feed's next batch.
        samples: How many of them count as env steps.
        lag_mean, lag_max: Age of the policies that took them, in updates, when the first update begins.
    """

    batch: Batch
    samples: int
    lag_mean: float = 0.0
    lag_max: int = 0


class Feed(Protocol):
    """A learner's source of samples."""

    def start(self, weights: Tensor, updates: int) -> None:
        """Begin to sample.

        Args:
            weights: float32 ``[size]``, the weights, which the learner changes in place.
            updates: Of the learner so far.
        """

    def reclaim(self) -> None:
        """Begin anew after the processes that sample have died."""

    def next(self, updates: int, timeout: float) -> Fresh | None:
        """The next batch, if it is there within `timeout` seconds.

        Args:
            updates: Of the learner so far.
        """

    def between_updates(self) -> None:
        """Note that the learner is between two updates of a batch."""

    def epoch_done(self, updates: int) -> None:
        """Note that the learner has passed over the batch once, and will pass over it again."""

    def batch_done(self, updates: int) -> None:
        """Note that the learner is done with the batch."""

    def close(self) -> None:
        """Let go of what the feed holds, at the end of a run."""


class SlotFeed:
    """Batches of finished segments in the arena. It gives their slots back and publishes the weights.

    Args:
        config: Configuration of the run.
        plane: Data plane of the run.
        device: Device of the batches.
        watch: Stopwatch of the learner.

    Attributes:
        per_batch: Slots of a batch.
        assemble: Makes the batch of as many slots.
    """

    def __init__(self, config: Config, plane: DataPlane, device: torch.device, watch: Laps) -> None:
        self._arena, self._published, self._watch = plane.arena, plane.weights, watch
        self._finished = plane.finished
        arena, updates = plane.arena, config.updates_per_batch
        self.per_batch, limit = segments_per_batch(config, arena.rows), max_lag(config, arena.rows)
        # Slots that are given back before the last weights are out begin one batch older: the bound must leave room for
        # that.
        self._tight = limit < least_max_lag(config, arena.rows) + updates
        self._scheduler = SlotScheduler(arena, self.per_batch, updates, limit)
        self._releaser = SlotReleaser(arena, plane.free)
        self.assemble = Assembler(arena, self.per_batch, device)
        self._lag_free, self._one_update = config.lag_free, updates == 1
        self._kept: list[int] = []

    def start(self, weights: Tensor, updates: int) -> None:
        """Publish the first weights and hand out all slots."""
        self._publisher = WeightPublisher(self._published, weights)
        self._publisher.publish(updates)
        self._publisher.finish()
        self.reclaim()

    def reclaim(self) -> None:
        """Free all slots but the finished ones. All sampling processes must be dead or have yet to begin."""
        while finished := self._finished.get_many(0):  # one call may take less than all
            self._scheduler.add(finished)
        self._releaser.reclaim(self._scheduler.finished)

    def next(self, updates: int, timeout: float) -> Fresh | None:
        """A batch of the oldest segments, whose slots are given back as soon as nothing needs them."""
        slots = self._take(updates, timeout)
        return None if slots is None else self.fresh(slots, updates)

    def fresh(self, slots: list[int], updates: int) -> Fresh | None:
        """The batch of the given slots; None if there is nothing in them to be learned from."""
        arena = self._arena
        samples = int((arena.active[slots, :-1] & (arena.owner[slots] == OWN_POLICY)[:, None]).sum())
        if not samples:  # faults of environments have spoiled all of them
            self._give_back(slots)
            return None
        lags = updates - arena.version[slots]
        batch = self.assemble(slots)
        self._watch.lap("copying")
        self._publisher.finish(wait=self._tight)
        if self._lag_free or self.assemble.is_view:
            self._kept = slots
        elif self._one_update:  # there is no later moment in the batch, nor much lag to be saved
            self._give_back(slots)
        else:
            arena.state[slots] = FREE
            self._releaser.hold(slots, time.monotonic())
        return Fresh(batch, samples, float(lags.mean()), int(lags.max()))

    def _take(self, updates: int, timeout: float) -> list[int] | None:
        """The slots of the next batch."""
        self._scheduler.add(self._finished.get_many(0))
        self._releaser.release_due(time.monotonic())
        slots = self._scheduler.take(updates)
        if slots is None:
            self._releaser.release_all()
            self._publisher.finish()
            self._watch.lap("weights")
            self._scheduler.add(self._finished.get_many(timeout))
            slots = self._scheduler.take(updates)
        self._watch.lap("waiting")
        return slots

    def between_updates(self) -> None:
        """Give back the slots that are due."""
        self._releaser.release_due(time.monotonic())

    def epoch_done(self, updates: int) -> None:
        """Publish the weights, unless sampling waits for those of the whole batch."""
        if not self._lag_free:
            self._publisher.offer(updates)
            self._watch.lap("weights")

    def batch_done(self, updates: int) -> None:
        """Publish the weights, and then give back the slots that had to wait for them."""
        self._publisher.publish(updates)
        if self._kept:
            self._publisher.finish()
        self._watch.lap("weights")
        if self._kept:
            self._give_back(self._kept)
            self._kept = []
        self._releaser.batch_wanted(time.monotonic())

    def close(self) -> None:
        """Do nothing: the arena is not the learner's own."""

    def _give_back(self, slots: list[int]) -> None:
        self._arena.state[slots] = FREE
        self._releaser.release(slots)
        self._watch.lap("queue")
