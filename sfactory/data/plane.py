"""The data plane: the record of arena, published weights and queues through which workers exchange samples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from sfactory.data.arena import Arena
from sfactory.data.queues import Queue
from sfactory.data.weights import PublishedWeights


class EventSink(Protocol):
    """Where a worker sends its events."""

    def put(self, event: Any) -> None:
        """Send an event to the runner."""


class Laps(Protocol):
    """What measures the time of a worker."""

    def lap(self, phase: str) -> None:
        """Attribute the time since the last lap to a phase (:mod:`sfactory.telemetry.stopwatch`)."""


@dataclass(frozen=True)
class DataPlane:
    """Everything that learner, policy workers and rollout workers share.

    Attributes:
        arena: Trajectories of all slots.
        weights: The newest weights, published by the learner.
        requests: Packed requests for actions, one queue per policy worker.
        ready: Indices of groups whose actions have been written, one queue per rollout worker.
        free: Slots that may be filled.
        finished: Slots that are full.
        events: Destination of events for the runner.
        policy_worker_of: For each group of the run, the number of the policy worker that serves it.
        rollout_worker_of: For each group of the run, the number of the rollout worker that steps it.
    """

    arena: Arena
    weights: PublishedWeights
    requests: list[Queue]
    ready: list[Queue]
    free: Queue
    finished: Queue
    events: EventSink
    policy_worker_of: tuple[int, ...]
    rollout_worker_of: tuple[int, ...]

    @property
    def groups(self) -> int:
        """Number of groups of the run."""
        return len(self.policy_worker_of)

    def requests_of(self, group: int) -> Queue:
        """The queue for requests of a group."""
        return self.requests[self.policy_worker_of[group]]

    def ready_of(self, group: int) -> Queue:
        """The queue that tells a group's rollout worker that actions have been written."""
        return self.ready[self.rollout_worker_of[group]]
