"""The drain: takes the learner's place where only sampling is looked at."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
from torch import nn

from sfactory.data.arena import FREE, Arena
from sfactory.data.queues import Queue
from sfactory.data.scheduler import take_back_slots
from sfactory.data.weights import FlatWeights, WeightBoard
from sfactory.telemetry.control_block import PROGRESS_EVERY_S, Progress
from sfactory.telemetry.stopwatch import Stopwatch


class Drain:
    """Counts the samples of finished segments and gives their slots straight back.

    Args:
        model: The actor-critic, whose weights are published once.
        arena: Where the segments lie.
        weights: Where the weights are published.
        finished: Slots that are full.
        free: Slots given back.
        emit: Takes a :class:`Progress` now and then.
        steps: Env steps to take.
        watch: This worker's stopwatch.
    """

    def __init__(
        self,
        model: nn.Module,
        arena: Arena,
        weights: WeightBoard,
        finished: Queue,
        free: Queue,
        emit: Callable[[Progress], None],
        steps: int,
        watch: Stopwatch,
    ) -> None:
        self._arena, self._finished, self._free, self._emit, self._steps, self._watch = (
            arena,
            finished,
            free,
            emit,
            steps,
            watch,
        )
        weights.publish(FlatWeights(model).vector, 0)
        self.env_steps = 0
        self._reported = time.monotonic()

    def start(self) -> None:
        """Hand out all slots."""
        self.take_back_slots()
        self._watch.lap("starting")

    def take_back_slots(self) -> None:
        """Free all slots. All sampling processes must be dead or have yet to begin."""
        self._finished.get_many(0)
        take_back_slots(self._arena, self._free, [])

    @property
    def done(self) -> bool:
        """Whether the number of env steps is reached."""
        return self.env_steps >= self._steps

    def poll(self, timeout: float) -> None:
        """Give back the segments that are finished, waiting for the first up to `timeout` seconds."""
        slots = self._finished.get_many(timeout)
        self._watch.lap("waiting")
        if slots:
            samples = int(np.count_nonzero(self._arena.active[slots, :-1]))
            self._arena.state[slots] = FREE
            self._watch.lap("copying")
            self._free.put_many(slots)
            self.env_steps += samples
            self._watch.lap("queue")
            self._watch.count(samples)
        if time.monotonic() - self._reported > PROGRESS_EVERY_S:
            self.report()
            self._watch.lap("reporting")

    def report(self) -> None:
        """Send the number of env steps."""
        self._reported = time.monotonic()
        self._emit(Progress(self.env_steps, 0, 0.0, 0.0, {}, 0.0))
