"""The null learner: takes the learner's place where only sampling is measured."""

from __future__ import annotations

import time

import numpy as np
from torch import nn

from sfactory.data.arena import FREE
from sfactory.data.plane import DataPlane
from sfactory.data.scheduler import reclaim_slots
from sfactory.data.weights import FlatWeights
from sfactory.telemetry.events import PROGRESS_EVERY_S, Progress
from sfactory.telemetry.stopwatch import Stopwatch


class NullLearner:
    """Counts the samples of finished segments and frees their slots at once.

    Args:
        model: The actor-critic. Its weights are published once.
        plane: Data plane of the run.
        steps: Env steps after which the run is done.
        watch: Stopwatch of this worker.

    Attributes:
        env_steps: Samples counted so far.
    """

    def __init__(self, model: nn.Module, plane: DataPlane, steps: int, watch: Stopwatch) -> None:
        self._arena, self._finished, self._free = plane.arena, plane.finished, plane.free
        self._emit, self._steps, self._watch = plane.events.put, steps, watch
        plane.weights.publish(FlatWeights(model).vector, 0)
        self.env_steps = 0
        self._reported = time.monotonic()

    def start(self) -> None:
        """Free all slots."""
        self.reclaim_slots()
        self._watch.lap("starting")

    def reclaim_slots(self) -> None:
        """Free all slots. No sampling process may be alive."""
        while self._finished.get_many(0):  # one call may take less than all
            pass
        reclaim_slots(self._arena, self._free, [])

    @property
    def done(self) -> bool:
        """Whether the number of env steps is reached."""
        return self.env_steps >= self._steps

    def poll(self, timeout: float) -> None:
        """Free the slots of finished segments; wait up to `timeout` seconds for the first."""
        slots = self._finished.get_many(timeout)
        self._watch.lap("waiting")
        if slots:
            samples = int(np.count_nonzero(self._arena.active[slots, :-1]))
            self._arena.state[slots] = FREE
            self._watch.lap("copying")
            self._free.put_many(slots)
            self._watch.full_waits = self._free.full_waits
            self.env_steps += samples
            self._watch.lap("queue")
            self._watch.count(samples)
        if time.monotonic() - self._reported > PROGRESS_EVERY_S:
            self.report()
            self._watch.lap("reporting")

    def report(self) -> None:
        """Report the number of env steps."""
        self._reported = time.monotonic()
        self._emit(Progress(self.env_steps, 0, 0.0, 0.0, {}, 0.0))
