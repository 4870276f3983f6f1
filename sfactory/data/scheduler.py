"""Which finished segments make the next batch, and when slots are given back: the policy lag, its bound and what keeps
it low."""

from __future__ import annotations

import math
from collections import deque

import numpy as np

from sfactory.data.arena import FINISHED, FREE, Arena
from sfactory.data.queues import Queue


def reclaim_slots(arena: Arena, free: Queue, finished: list[int]) -> None:
    """Make every slot free that is not among the finished ones, while no process samples: at the start, and after a
    death."""
    while free.get_many(0):
        pass
    arena.state[:] = FREE
    arena.state[finished] = FINISHED
    free.put_many(np.flatnonzero(arena.state == FREE).tolist())


class SlotScheduler:
    """Decides which finished segments make the next batch, so that no sample is ever trained on at a lag above the
    bound.

    Segments are taken by age. A younger one may overtake one that is still being filled only if afterwards every slot
    in use, taken by age, would still come in time. Since all slots together are few enough
    (:func:`sfactory.config.lag.least_max_lag`), a new slot never breaks that, so the bound holds by construction; the
    learner waits, if need be, for a slow group, which never waits for the learner while it has a slot.

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


class SlotReleaser:
    """Gives slots back just in time: so late that sampling ends when the learner wants its next batch, and no sample
    waits and ages.

    A slot that goes back as soon as its batch is taken keeps sampling busy; where the learner limits, the samples are
    then finished long before they are wanted. So slots are kept for a delay. It grows by a part of the time that the
    segments of each batch have waited beyond a margin, and shrinks at once by what the learner had to wait for a
    segment; where sampling limits it is 0. A learner that has nothing to train on gives everything back, so the delay
    never stalls a run.

    Args:
        arena: Where the slots are.
        free: Takes slots that are given back.
    """

    GAIN = 0.3
    """Part of the waiting time of a batch's segments by which the delay grows."""
    MARGIN = 0.1
    """Part of the time between two batches that segments may wait, so that the learner seldom has to."""

    def __init__(self, arena: Arena, free: Queue) -> None:
        self._arena, self._free = arena, free
        self._kept: deque[tuple[float, list[int]]] = deque()
        self._delay = 0.0
        self._wanted = self._taken = math.nan

    def want(self, now: float) -> None:
        """The learner wants a batch from now on, in monotonic seconds."""
        self._wanted = now

    def take(self, slots: list[int], now: float) -> None:
        """The learner has copied these slots, whose segments are its next batch; they go back when it is time."""
        period, self._taken = now - self._taken, now
        early = self._wanted - float(self._arena.finished_s[slots].max())
        if period == period:  # else it is the first batch
            grown = self.GAIN * (early - self.MARGIN * period) if early > 0 else early
            most = (self._arena.slots / len(slots)) * period  # with all slots kept for longer nothing would be sampled
            self._delay = min(max(self._delay + grown, 0.0), most)
        self._kept.append((now, slots))
        self.give_back_due(now)

    def give_back_due(self, now: float) -> None:
        """Give back what has been kept for the delay."""
        while self._kept and now - self._kept[0][0] >= self._delay:
            self._give_back(self._kept.popleft()[1])

    def give_back_all(self) -> None:
        """Give back everything."""
        while self._kept:
            self._give_back(self._kept.popleft()[1])

    def forget(self) -> None:
        """All slots have been taken back elsewhere."""
        self._kept.clear()

    def _give_back(self, slots: list[int]) -> None:
        self._free.put_many(slots)
