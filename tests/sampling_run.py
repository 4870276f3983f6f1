"""A run in one process up to the learner: what tests use to look at real segments."""

from __future__ import annotations

import dataclasses

import numpy as np
from torch import Tensor

from sfactory.config import Config, resolve
from sfactory.data.arena import FREE
from sfactory.data.batch import Batch
from sfactory.runs.checkpoint import CheckpointStore
from sfactory.runtime import workers
from sfactory.runtime.planning import make_plan
from sfactory.runtime.training import Training
from sfactory.runtime.wires import make_wires


class SamplingRun:
    """The components of a serial run, with segments handed out instead of trained on."""

    def __init__(self, config: Config, tmp_path) -> None:
        self.plan = make_plan(dataclasses.replace(resolve(config), serial=True))
        self.wires = make_wires(self.plan, local=True)
        (tmp_path / "checkpoints").mkdir(parents=True, exist_ok=True)
        self.training = Training(self.plan, self.wires, CheckpointStore(tmp_path / "checkpoints"))
        self.learner = self.training.learner
        self.policies = [
            workers.make_policy_worker(self.plan, self.wires, i, 0) for i in range(len(self.wires.requests))
        ]
        self.rollouts = [
            workers.make_rollout_worker(self.plan, self.wires, i, 0) for i in range(self.plan.config.workers)
        ]
        self.learner.start()
        for rollout in self.rollouts:
            rollout.start()

    def sample(self, segments: int) -> list[int]:
        """Run until so many segments are finished; their slots."""
        slots: list[int] = []
        while len(slots) < segments:
            for worker in (*self.policies, *self.rollouts):
                worker.poll(0)
            slots += self.wires.finished.get_many(0)
        return slots

    def give_back(self, slots: list[int]) -> None:
        self.wires.arena.state[slots] = FREE
        self.wires.free.put_many(slots)

    def importance_weights(self, batch: Batch) -> Tensor:
        """Those of a batch's valid samples, as its targets have them."""
        _, targets, _ = self.learner._begin(batch, gradients=False)
        return targets.log_weights[targets.valid].exp()

    def close(self) -> None:
        for rollout in self.rollouts:
            rollout.close()


def transitions(config: Config, tmp_path, rounds: int) -> list[list[tuple]]:
    """For every row of the run the transitions that count, in order: (observation, reward, terminated, truncated,
    first)."""
    run = SamplingRun(config, tmp_path)
    arena, rows = run.wires.arena, run.plan.rows
    history: list[list[tuple]] = [[] for _ in range(run.plan.groups * rows)]
    groups = {}
    try:
        for _ in range(rounds):
            holding = {r.slot: r.index for rollout in run.rollouts for r in rollout._running.values()}
            groups.update(holding)
            slots = run.sample(len(run.rollouts) * config.runtime.groups)
            for slot in slots:
                for t in range(config.rollout):
                    for row in np.flatnonzero(arena.active[slot, t]):
                        history[groups[slot] * rows + row].append((
                            tuple(arena.obs[0][slot, t, row].tolist()), float(arena.reward[slot, t, row]),
                            bool(arena.terminated[slot, t, row]), bool(arena.truncated[slot, t, row]),
                            bool(arena.first[slot, t, row]),
                        ))  # fmt: skip
            run.give_back(slots)
            for worker in run.rollouts:
                worker.poll(0)
    finally:
        run.close()
    return history
