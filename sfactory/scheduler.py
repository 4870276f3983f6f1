"""Which finished segments make the next batch: the bound on the policy lag."""

from __future__ import annotations

import numpy as np

from sfactory.arena import FINISHED, FREE, Arena
from sfactory.queues import Queue


def take_back_slots(arena: Arena, free: Queue, finished: list[int]) -> None:
    """Make every slot free that is not among the finished ones, while no process samples: at the start, and after a death."""
    while free.get_many(0):
        pass
    arena.state[:] = FREE
    arena.state[finished] = FINISHED
    free.put_many(np.flatnonzero(arena.state == FREE).tolist())


class SlotScheduler:
    """Decides which finished segments make the next batch, so that no sample is ever trained on at a lag above the bound.

    Segments are taken by age. A younger one may overtake one that is still being filled only if afterwards every slot in use, taken by
    age, would still come in time. Since all slots together are few enough (:func:`sfactory.sizes.least_max_lag`), a new slot never
    breaks that, so the bound holds by construction; the learner waits, if need be, for a slow group, which never waits for the learner
    while it has a slot.

    Args:
        per_batch: Segments per batch.
        updates: Learner updates per batch.
        limit: Highest lag allowed, in updates.

    Attributes:
        finished: The slots that wait for a batch.
    """

    def __init__(self, arena: Arena, per_batch: int, updates: int, limit: int) -> None:
        self._arena, self._per_batch, self._updates, self._limit = arena, per_batch, updates, limit
        self.finished: list[int] = []

    def add(self, slots: list[int]) -> None:
        """Take note of finished slots."""
        self.finished += slots

    def __len__(self) -> int:
        return len(self.finished)

    def take(self, version: int) -> list[int] | None:
        """The slots of the next batch, oldest first, or None if it cannot be trained on yet.

        Args:
            version: The learner's present one.
        """
        if len(self.finished) < self._per_batch:
            return None
        begun = self._arena.begun
        by_age = sorted(self.finished, key=lambda slot: begun[slot])
        batch, rest = by_age[: self._per_batch], by_age[self._per_batch :]
        others = self._arena.state != FREE  # finished ones that are still on their way here count too
        others[batch] = False
        in_use = np.sort(begun[others])
        last_update = version + self._updates * (np.arange(len(in_use)) // self._per_batch + 2) - 1
        if (last_update - in_use > self._limit).any():
            return None
        self.finished = rest
        return batch
