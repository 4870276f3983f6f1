"""The rollout worker: steps groups of environments and lets them write straight into their slots.

Each group is always in one of three places: waiting for the policy's answer, waiting for a free slot, or being stepped
here. With two groups one steps while the other waits for its actions.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numba import njit

from sfactory.data.arena import FILLING, FINISHED, Arena
from sfactory.data.queues import Queue, pack_request
from sfactory.data.weights import WeightBoard
from sfactory.envs.interface import Finals, Group, Outcome, StepBuffers, SurvivedFault
from sfactory.telemetry.control_block import PROGRESS_EVERY_S, Episodes, SurvivedFaults
from sfactory.telemetry.stopwatch import Stopwatch


@njit(cache=True, nogil=True)
def end_episodes(first, active, reward, terminated, truncated, returns, lengths, ended_returns, ended_lengths):
    """Add one step to every row's running return and length; copy those of ended episodes out.

    Args:
        first, active, reward, terminated, truncated: ``[rows]`` of the step.
        returns, lengths: float64 and int64 ``[rows]``, updated in place. An episode whose return is NaN is left out.
        ended_returns, ended_lengths: float32 and int32 ``[rows]``, filled from the front.

    Returns:
        The number of episodes that ended.
    """
    ended = 0
    for row in range(reward.shape[0]):
        if active[row]:
            if first[row]:
                returns[row] = 0.0
                lengths[row] = 0
            returns[row] += reward[row]
            lengths[row] += 1
            if (terminated[row] or truncated[row]) and not np.isnan(returns[row]):
                ended_returns[ended] = returns[row]
                ended_lengths[ended] = lengths[row]
                ended += 1
    return ended


class EpisodeLog:
    """Returns and lengths of a group's episodes, collected until they are sent."""

    def __init__(self, rows: int) -> None:
        self._returns, self._lengths = np.zeros(rows), np.zeros(rows, np.int64)
        self._ended_returns, self._ended_lengths = np.zeros(rows, np.float32), np.zeros(rows, np.int32)
        self._done: list[tuple[np.ndarray, np.ndarray]] = []

    def record(self, first: np.ndarray, active: np.ndarray, outcome: Outcome) -> None:
        """Account for one step of all rows."""
        ended = end_episodes(
            first, active, *outcome, self._returns, self._lengths, self._ended_returns, self._ended_lengths
        )
        if ended:
            self._done.append((self._ended_returns[:ended].copy(), self._ended_lengths[:ended].copy()))

    def forget(self, rows: Sequence[int]) -> None:
        """Leave the present episodes of some rows out."""
        self._returns[rows] = np.nan

    def take(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """The (returns, lengths) recorded since the last call."""
        done, self._done = self._done, []
        return done


@dataclass
class RunningGroup:
    """A group and its place in the arena.

    Attributes:
        index: Of the group in the run; what requests carry.
        carry: A private copy of the frame with which the next segment begins.
        log: Of its episodes.
        slot, step: Where it writes; no slot: -1.
        finals: Final observations whose value it waits for.
        displaced: The observations that made room for them.
    """

    index: int
    group: Group
    carry: StepBuffers
    log: EpisodeLog
    slot: int = -1
    step: int = 0
    finals: Finals | None = None
    displaced: tuple[np.ndarray, ...] = field(default=())


def private_step_buffers(arena: Arena) -> StepBuffers:
    """A private frame of an arena's shapes."""
    obs, mask, first, active = arena.step_buffers(0, 0)
    return StepBuffers(
        tuple(map(np.zeros_like, obs)),
        None if mask is None else np.zeros_like(mask),
        np.zeros_like(first),
        np.zeros_like(active),
    )


def copy_step_buffers(source: StepBuffers, target: StepBuffers) -> None:
    for a, b in zip(source.obs, target.obs, strict=True):
        np.copyto(b, a)
    if source.mask is not None:
        np.copyto(target.mask, source.mask)
    np.copyto(target.first, source.first)
    np.copyto(target.active, source.active)


class RolloutWorker:
    """Steps groups as their actions arrive.

    Args:
        groups: (index in the run, group) of every group of this worker.
        arena: Where the groups write.
        weights: Read only for the newest version's number.
        requests: The queue to the policy worker of each of the groups, in the same order.
        ready: Indices of groups whose actions have been written.
        free: Slots that may be filled.
        finished: Slots that are full.
        emit: Takes :class:`Episodes` that have ended, and :class:`SurvivedFaults`.
        watch: This worker's stopwatch.
    """

    def __init__(
        self,
        groups: list[tuple[int, Group]],
        arena: Arena,
        weights: WeightBoard,
        requests: list[Queue],
        ready: Queue,
        free: Queue,
        finished: Queue,
        emit: Callable[[Episodes | SurvivedFaults], None],
        watch: Stopwatch,
    ) -> None:
        self._arena, self._weights, self._ready, self._free, self._finished = arena, weights, ready, free, finished
        self._emit, self._watch = emit, watch
        self._running = {
            index: RunningGroup(index, group, private_step_buffers(arena), EpisodeLog(group.rows))
            for index, group in groups
        }
        self._requests = {index: queue for (index, _), queue in zip(groups, requests, strict=True)}
        self._slotless: list[RunningGroup] = []
        self._reported = time.monotonic()
        self._faults: Counter[str] = Counter()
        self._first_fault: SurvivedFault | None = None

    def start(self) -> None:
        """Reset all environments and ask for their first actions."""
        for running in self._running.values():
            running.group.reset(running.carry)
            self._survive(running)
            self._watch.lap("starting")
            self._slotless.append(running)
        self._begin_segments(0)

    def poll(self, timeout: float) -> None:
        """Step every group whose actions are there, waiting for the first up to `timeout` seconds."""
        self._watch.lap("waiting")  # with inline inference, for the policy worker in this process
        if self._slotless:
            all_slotless = len(self._slotless) == len(self._running)
            self._begin_segments(timeout if all_slotless else 0)
        answered = self._ready.get_many(timeout if len(self._slotless) < len(self._running) else 0)
        self._watch.lap("waiting")
        for index in answered:
            running = self._running[index]
            if running.finals is not None:
                self._receive_final_values(running)
            else:
                self._step(running)
        now = time.monotonic()
        if now - self._reported > PROGRESS_EVERY_S:
            self._reported = now
            self._watch.full_waits = self._finished.full_waits + sum(q.full_waits for q in set(self._requests.values()))
            self.report()
            self._watch.lap("reporting")

    def report(self) -> None:
        """Send the episodes that have ended and the faults that were survived since the last time."""
        done = [part for running in self._running.values() for part in running.log.take()]
        extras = [entry for running in self._running.values() for entry in running.group.extras]
        for running in self._running.values():
            running.group.extras.clear()
        if done:
            returns, lengths = zip(*done, strict=True)
            self._emit(Episodes(np.concatenate(returns), np.concatenate(lengths), extras))
        if self._first_fault is not None:
            self._watch.flush()  # the runner compares its totals when it hears of faults
            self._emit(SurvivedFaults(dict(self._faults), self._first_fault))
            self._faults.clear()
            self._first_fault = None

    def close(self) -> None:
        """Close all environments."""
        for running in self._running.values():
            running.group.close()

    def _step(self, running: RunningGroup) -> None:
        arena, slot, t = self._arena, running.slot, running.step
        outcome, after = arena.outcome(slot, t), arena.step_buffers(slot, t + 1)
        running.group.step(arena.categorical[slot, t], arena.continuous[slot, t], outcome, after)
        self._watch.lap("environment")
        self._watch.count(arena.rows)
        if running.group.faults:
            self._survive(running)
        running.log.record(arena.first[slot, t], arena.active[slot, t], outcome)
        arena.final_value[slot, t] = np.nan
        if running.group.finals is not None:
            self._ask_final_values(running, after)
        else:
            self._advance(running)

    def _survive(self, running: RunningGroup) -> None:
        """Leave the fragments of rows whose environments were at fault out of training, and count the faults."""
        for fault in running.group.faults:
            if running.slot >= 0:
                self._arena.active[running.slot, : running.step + 1, fault.rows] = False
            running.log.forget(fault.rows)
            self._first_fault = self._first_fault or fault
            self._faults[fault.environment] += fault.count
            self._watch.env_faults += fault.count
        running.group.faults.clear()

    def _ask_final_values(self, running: RunningGroup, after: StepBuffers) -> None:
        """Rows were truncated and have already been reset: have V(final_obs) computed in the place of the next
        observation."""
        finals = running.finals = running.group.finals
        running.displaced = tuple(leaf[finals.rows].copy() for leaf in after.obs)
        for leaf, final in zip(after.obs, finals.obs, strict=True):
            leaf[finals.rows] = final
        self._request(running, running.step + 1, value_only=True)

    def _receive_final_values(self, running: RunningGroup) -> None:
        arena, slot, t, rows = self._arena, running.slot, running.step, running.finals.rows
        arena.final_value[slot, t, rows] = arena.value[slot, t + 1, rows]
        for leaf, first in zip(arena.step_buffers(slot, t + 1).obs, running.displaced, strict=True):
            leaf[rows] = first
        running.finals = None
        self._advance(running)

    def _advance(self, running: RunningGroup) -> None:
        """Ask for the next actions, or hand the full slot over and begin the next segment."""
        running.step += 1
        if running.step < self._arena.rollout:
            self._request(running, running.step)
            return
        copy_step_buffers(self._arena.step_buffers(running.slot, running.step), running.carry)
        self._arena.finished_s[running.slot] = time.monotonic()
        self._arena.state[running.slot] = FINISHED
        self._watch.lap("copying")
        self._finished.put_many((running.slot,))
        running.slot = -1
        self._slotless.append(running)
        self._begin_segments(0)

    def _begin_segments(self, timeout: float) -> None:
        """Give free slots to the groups that wait for one."""
        slots = self._free.get_many(timeout, len(self._slotless))
        self._watch.lap("blocked" if timeout else "queue")
        for slot in slots:
            running = self._slotless.pop(0)
            running.slot, running.step = slot, 0
            self._arena.state[slot] = FILLING
            # Read after the slot has shown itself as being filled: no update can then go by unnoticed by this lower
            # bound.
            self._arena.begun[slot] = self._weights.version
            self._arena.owner[slot] = 0
            copy_step_buffers(running.carry, self._arena.step_buffers(slot, 0))
            self._request(running, 0)

    def _request(self, running: RunningGroup, step: int, value_only: bool = False) -> None:
        self._watch.lap("copying")
        self._requests[running.index].put_many((pack_request(running.slot, running.index, step, value_only),))
        self._watch.lap("queue")
