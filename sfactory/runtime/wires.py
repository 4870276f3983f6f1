"""The wires between the processes of a run: arena, weights, queues, events and control block."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from sfactory.data.arena import Arena, segment_fields
from sfactory.data.evaluation import EvaluationBoard
from sfactory.data.plane import DataPlane
from sfactory.data.queues import IndexQueue, LocalQueue, PipeQueue, Queue
from sfactory.data.shared_memory import SharedArray
from sfactory.data.weights import FlatWeights, PublishedWeights
from sfactory.model import build_uninitialized
from sfactory.runtime.plan import Plan
from sfactory.telemetry.control_block import ControlBlock
from sfactory.telemetry.events import Event


@dataclass(frozen=True)
class Wires(DataPlane):
    """The data plane of a run, its control block, and what learner and evaluator share (None without evaluation).

    With inline inference the run shares no queues of requests and of ready groups: every rollout process makes its own
    with :func:`inline_wires`.
    """

    control: ControlBlock
    evaluation: EvaluationBoard | None = None


class LocalEvents:
    """Events of a run in one process, collected until they are taken."""

    def __init__(self) -> None:
        self._events: list[Event] = []

    def put(self, event: Event) -> None:
        """Add an event."""
        self._events.append(event)

    def take(self) -> list[Event]:
        """The events since the last call."""
        events, self._events = self._events, []
        return events


def make_wires(plan: Plan, local: bool, wall_s: float = 0.0) -> Wires:
    """Allocate arena, weights, control block and all queues.

    Args:
        plan: Plan of the run.
        local: Whether all workers live in this process. Otherwise every process brings an `events` of its own.
        wall_s: Seconds that the run has taken before.
    """
    config = plan.config
    model = build_uninitialized(plan.env.observation, plan.env.action, config.model)
    slots = plan.slots
    requests, ready = _sampling_queues(plan, local)
    size = FlatWeights(model).vector.numel()
    return Wires(
        arena=Arena(segment_fields(plan.env, model.state_size), slots, config.rollout, plan.rows),
        weights=PublishedWeights(size),
        requests=requests,
        ready=ready,
        free=LocalQueue() if local else PipeQueue(max(1, slots)),
        finished=LocalQueue() if local else PipeQueue(max(1, slots)),
        events=LocalEvents(),
        policy_worker_of=tuple(map(plan.policy_worker_of, range(plan.groups))),
        rollout_worker_of=tuple(map(plan.rollout_worker_of, range(plan.groups))),
        control=ControlBlock(plan.worker_names, SharedArray, plan.trace, wall_s),
        evaluation=EvaluationBoard(size) if plan.evaluates else None,
    )


def _sampling_queues(plan: Plan, local: bool) -> tuple[list[Queue], list[Queue]]:
    """Queues of requests and of ready groups; none between processes where inference is inline."""
    if plan.inline_inference and not local:
        return [], []

    def queue(capacity: int) -> Queue:
        return LocalQueue() if local else IndexQueue(capacity)

    requests = [queue(plan.groups) for _ in range(plan.policy_workers)]
    return requests, [queue(plan.config.runtime.groups) for _ in range(plan.rollout_workers)]


def inline_wires(plan: Plan, wires: Wires) -> Wires:
    """Wires of a rollout process with inline inference, with queues that only this process sees."""
    requests, ready = _sampling_queues(plan, local=True)
    return dataclasses.replace(wires, requests=requests, ready=ready)


def renew_sampling(plan: Plan, wires: Wires) -> Wires:
    """Wires for new sampling processes after all the old ones are dead.

    A killed process may leave a queue locked, so the queues between sampling processes are replaced. The learner's
    queues stay.
    """
    wires.control.restart_sampling()
    requests, ready = _sampling_queues(plan, local=False)
    return dataclasses.replace(wires, requests=requests, ready=ready)
