"""Which finished segments make the next batch, and when their slots are released. Both bound the policy lag and keep it
low.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

import numpy as np

from sfactory.data.arena import FINISHED, FREE, Arena
from sfactory.data.memory_order import fence
from sfactory.data.queues import Queue


def reclaim_slots(arena: Arena, free: Queue, finished: list[int]) -> list[int]:
    """Free every slot but the finished ones. No sampling process may be alive: this is called at the start of a run and
    after the death of one. New ones wait for it, so that it must not wait for them.

    Args:
        arena: Arena of the run.
        free: Queue of free slots; its contents are replaced.
        finished: Slots that wait for the learner.

    Returns:
        Free slots for which the queue has no room.
    """
    while free.get_many(0):
        pass
    arena.state[:] = FREE
    arena.state[finished] = FINISHED
    return free.put_some(np.flatnonzero(arena.state == FREE).tolist())


class SlotScheduler:
    """Selects the finished segments of the next batch such that no sample is ever trained on at a lag above the bound.

    Segments are taken by age. A younger one may overtake one that is still being filled only if afterwards every slot
    in use, taken by age, would still be in time. Since the number of slots is limited accordingly
    (:func:`sfactory.config.lag.least_max_lag`), a new slot never violates that, so the bound holds by construction. If
    necessary the learner waits for a slow group, which never waits for the learner while it has a slot.

    Args:
        arena: Arena of the run.
        per_batch: Segments per batch.
        updates: Learner updates per batch.
        limit: Highest lag allowed, in updates.

    Attributes:
        finished: Finished slots that wait for a batch.
    """

    def __init__(self, arena: Arena, per_batch: int, updates: int, limit: int) -> None:
        self._arena, self._per_batch, self._updates, self._limit = arena, per_batch, updates, limit
        self.finished: list[int] = []

    def add(self, slots: list[int]) -> None:
        """Add finished slots."""
        self.finished += slots

    def take(self, version: int) -> list[int] | None:
        """The slots of the next batch, oldest first, or None if it cannot be trained on yet.

        Args:
            version: The learner's current version, in updates.
        """
        if len(self.finished) < self._per_batch:
            return None
        fence()  # a rollout worker that began a slot before it saw the last published version shows below
        begun = self._arena.begun
        by_age = sorted(self.finished, key=lambda slot: begun[slot])
        batch, rest = by_age[: self._per_batch], by_age[self._per_batch :]
        others = self._arena.state != FREE  # including finished ones that are still in the queue
        others[batch] = False
        in_use = np.sort(begun[others])
        last_update = version + self._updates * (np.arange(len(in_use)) // self._per_batch + 2) - 1
        if (last_update - in_use > self._limit).any():
            return None
        self.finished = rest
        return batch


class SlotReleaser:
    """Releases slots just in time: as late as possible without the learner having to wait, so that samples age little.

    A slot that is released as soon as its batch is taken keeps sampling busy. Where the learner is the bottleneck, its
    samples would be finished long before they are needed. So slots are held for a delay. It grows by a part of the time
    that the segments of a batch have waited beyond a margin, and shrinks at once by the time that the learner had to
    wait for a segment; where sampling is the bottleneck it is 0. A learner without a batch releases all slots, so the
    delay never stalls a run. A full queue does not either: slots that do not fit follow later.

    Args:
        arena: Arena of the run.
        free: Queue of free slots.
    """

    GAIN = 0.3
    """Part of the waiting time of a batch's segments by which the delay grows."""
    MARGIN = 0.1
    """Waiting time of segments that is tolerated, so that the learner seldom has to wait; as a part of the time between
    two batches."""

    def __init__(self, arena: Arena, free: Queue) -> None:
        self._arena, self._free = arena, free
        self._held: deque[tuple[float, list[int]]] = deque()
        self._without_room: list[int] = []
        self._delay = 0.0
        self._wanted = self._taken = math.nan

    def batch_wanted(self, now: float) -> None:
        """Note that the learner wants a batch from now on, in monotonic seconds."""
        self._wanted = now

    def hold(self, slots: list[int], now: float) -> None:
        """Take over the slots of a batch that the learner has copied; they are released when it is time.

        Args:
            slots: The slots, already marked as free.
            now: Monotonic seconds.
        """
        period, self._taken = now - self._taken, now
        early = self._wanted - float(self._arena.finished_s[slots].max())
        if period == period:  # NaN for the first batch
            grown = self.GAIN * (early - self.MARGIN * period) if early > 0 else early
            most = (self._arena.slots / len(slots)) * period  # with a longer delay all slots would be held at once
            self._delay = min(max(self._delay + grown, 0.0), most)
        self._held.append((now, slots))
        self.release_due(now)

    def release(self, slots: Sequence[int] = ()) -> None:
        """Release these slots, already marked as free, after those for which there was no room."""
        self._without_room = self._free.put_some([*self._without_room, *slots])

    def release_due(self, now: float) -> None:
        """Release the slots that have been held for the delay."""
        self.release()
        while self._held and now - self._held[0][0] >= self._delay:
            self.release(self._held.popleft()[1])

    def release_all(self) -> None:
        """Release all slots."""
        self.release()
        while self._held:
            self.release(self._held.popleft()[1])

    def reclaim(self, finished: list[int]) -> None:
        """Begin anew with all slots but the finished ones (:func:`reclaim_slots`)."""
        self._held.clear()
        self._without_room = reclaim_slots(self._arena, self._free, finished)
