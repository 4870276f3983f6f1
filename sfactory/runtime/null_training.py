"""The null training: takes the place of the learner and its checkpoints where only sampling is measured."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import torch

from sfactory.data.arena import FREE
from sfactory.data.scheduler import SlotReleaser
from sfactory.data.weights import FlatWeights
from sfactory.model import build_model
from sfactory.runtime.plan import Plan
from sfactory.runtime.wires import Wires
from sfactory.telemetry.events import PROGRESS_EVERY_S, Progress, TrainingEnded


class NullTraining:
    """Counts the samples of finished segments and frees their slots at once: the policy keeps its initial weights, and
    nothing is evaluated or saved. What its methods are for, :class:`sfactory.runtime.training.Training` says.

    Args:
        plan: Plan of the run.
        wires: Wires of the run.
    """

    def __init__(self, plan: Plan, wires: Wires) -> None:
        self._wires, self._watch, self._steps = wires, wires.control.stopwatch("learner"), plan.config.steps
        self._watch.queues = {wires.free}
        self._releaser = SlotReleaser(wires.arena, wires.free)
        torch.manual_seed(plan.config.seed)
        model = build_model(plan.env.observation, plan.env.action, plan.config.model)
        wires.weights.publish(FlatWeights(model).vector, 0)
        self._env_steps = 0
        self._reported = time.monotonic()

    @property
    def done(self) -> bool:
        return self._env_steps >= self._steps

    def start(self) -> None:
        self._reclaim_slots()
        self._watch.lap("starting")

    def poll(self, timeout: float) -> None:
        wires = self._wires
        wires.control.reclaim_slots_if_requested(self._reclaim_slots)
        slots = wires.finished.get_many(timeout)
        self._watch.lap("waiting")
        self._releaser.release()
        if slots:
            samples = [int(np.count_nonzero(wires.arena.active[slot, :-1])) for slot in slots]
            wires.arena.state[slots] = FREE
            self._watch.lap("copying")
            self._releaser.release(slots)
            self._env_steps += sum(samples)
            self._watch.lap("queue")
            for count in samples:
                self._watch.count(count)
        if time.monotonic() - self._reported > PROGRESS_EVERY_S:
            self._report()
            self._watch.lap("reporting")

    def evaluate_last(self, wait: Callable[[], bool]) -> None:
        """Do nothing: there is nothing to evaluate."""

    def finish(self) -> None:
        self._report()
        self._wires.events.put(TrainingEnded(self._env_steps, self.done))

    def rescue(self) -> None:
        """Do nothing: there is nothing to save."""

    def _reclaim_slots(self) -> None:
        """Free all slots. No sampling process may be alive."""
        while self._wires.finished.get_many(0):  # one call may take less than all
            pass
        self._releaser.reclaim([])

    def _report(self) -> None:
        self._reported = time.monotonic()
        self._wires.events.put(Progress(self._env_steps, 0, 0.0, 0.0, {}, 0.0))
