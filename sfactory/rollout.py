"""The rollout worker: steps groups of environments, which write straight into their slots.

Each group is always in one of three states: it waits for the policy's answer, it waits for a free slot, or it is being
stepped. With two groups one steps while the other waits for its actions.
"""

from __future__ import annotations

import copy
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from sfactory.data.arena import FILLING, FINISHED, OWN_POLICY
from sfactory.data.memory_order import fence
from sfactory.data.plane import DataPlane
from sfactory.data.queues import pack_request
from sfactory.envs.interface import Finals, Group, Outcome, StepBuffers, SurvivedFault, whole_ends
from sfactory.telemetry.events import PROGRESS_EVERY_S, Episodes, SurvivedFaults, by_name
from sfactory.telemetry.stopwatch import Stopwatch


class EpisodeLog:
    """Returns and lengths of a group's episodes, collected until they are reported. Where a lost life ends an episode
    for the learner alone, those of whole games.

    Args:
        rows: Rows of the group.
    """

    def __init__(self, rows: int) -> None:
        self._returns, self._lengths = np.zeros(rows), np.zeros(rows, np.int64)
        self._ended: list[tuple[np.ndarray, np.ndarray]] = []

    def record(self, active: np.ndarray, outcome: Outcome, goes_on: np.ndarray | None) -> None:
        """Account for one step of all rows.

        Args:
            active: bool ``[rows]`` of the observations before the step.
            outcome: Results of the step.
            goes_on: bool ``[rows]``, terminations that do not end the row's game; None if there are none.
        """
        reward, terminated, truncated = outcome
        with np.errstate(over="ignore", invalid="ignore"):  # of rewards without a limit
            np.add(self._returns, reward, out=self._returns, where=active)
            self._lengths += active
            if np.count_nonzero(terminated) or np.count_nonzero(truncated):  # several times as fast as any()
                over = whole_ends(outcome, goes_on)
                counted = over & active & ~np.isnan(self._returns)
                if counted.any():
                    self._ended.append(
                        (self._returns[counted].astype(np.float32), self._lengths[counted].astype(np.int32))
                    )
                self._returns[over] = 0.0
                self._lengths[over] = 0

    def exclude(self, rows: Sequence[int]) -> None:
        """Exclude the current episodes of some rows."""
        self._returns[rows] = np.nan

    def take(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """Returns float32 ``[n]`` and lengths int32 ``[n]`` of the episodes that ended since the last call, a pair for
        each step in which any ended."""
        ended, self._ended = self._ended, []
        return ended


@dataclass
class RunningGroup:
    """A group and its position in the arena.

    Attributes:
        index: Number of the group in the run; requests carry it.
        group: The environments.
        carry: A private copy of the step buffers with which the next segment begins.
        log: Episodes of the group.
        slot: Slot that the group fills; -1 without one.
        step: Step of the segment at which the group is.
        finals: Final observations whose values are requested, else None.
        displaced: Observation leaves ``[n, *shape]`` of the next episodes, which make room for `finals` until these
            values are there.
    """

    index: int
    group: Group
    carry: StepBuffers
    log: EpisodeLog
    slot: int = -1
    step: int = 0
    finals: Finals | None = None
    displaced: tuple[np.ndarray, ...] = field(default=())


def copy_step_buffers(source: StepBuffers, target: StepBuffers) -> None:
    """Copy all arrays of `source` into those of `target`."""
    for a, b in zip(source.obs, target.obs, strict=True):
        np.copyto(b, a)
    if source.mask is not None and target.mask is not None:
        np.copyto(target.mask, source.mask)
    np.copyto(target.first, source.first)
    np.copyto(target.active, source.active)


class RolloutWorker:
    """Steps groups as their actions arrive.

    Args:
        index: Number of this rollout worker.
        groups: The groups of this worker, by their number in the run.
        plane: Data plane of the run.
        watch: Stopwatch of this worker.
    """

    def __init__(self, index: int, groups: Mapping[int, Group], plane: DataPlane, watch: Stopwatch) -> None:
        self._arena, self._weights, self._free, self._finished = plane.arena, plane.weights, plane.free, plane.finished
        self._ready = plane.ready[index]
        self._requests = {i: plane.requests_of(i) for i in groups}
        self._emit, self._watch = plane.events.put, watch
        watch.queues = {self._finished, *self._requests.values()}
        self._running = {
            i: RunningGroup(i, group, copy.deepcopy(plane.arena.step_buffers(0, 0)), EpisodeLog(group.rows))
            for i, group in groups.items()
        }
        self._slotless: list[RunningGroup] = []
        self._reported = time.monotonic()
        self._fault_counts: Counter[str] = Counter()
        self._first_fault: SurvivedFault | None = None

    def start(self) -> None:
        """Reset all environments and request their first actions."""
        for running in self._running.values():
            running.group.reset(running.carry)
            self._survive_faults(running)
            self._watch.lap("starting")
            self._slotless.append(running)
        self._begin_segments(0)

    def poll(self, timeout: float) -> None:
        """Step every group whose actions have been written; wait up to `timeout` seconds for the first."""
        self._watch.lap("waiting")  # with inline inference, for the policy worker in this process
        if self._slotless:
            all_slotless = len(self._slotless) == len(self._running)
            self._begin_segments(timeout if all_slotless else 0)
        answered = self._ready.get_many(timeout if len(self._slotless) < len(self._running) else 0)
        self._watch.lap("waiting")
        for index in answered:
            running = self._running[index]
            if running.finals is not None:
                self._receive_final_values(running, running.finals)
            else:
                self._step(running)
        now = time.monotonic()
        if now - self._reported > PROGRESS_EVERY_S:
            self._reported = now
            self.report()
            self._watch.lap("reporting")

    def report(self) -> None:
        """Report the episodes that have ended and the faults that were survived since the last report."""
        done = [part for running in self._running.values() for part in running.log.take()]
        extras = [entry for running in self._running.values() for entry in running.group.extras]
        for running in self._running.values():
            running.group.extras.clear()
        if done:
            returns, lengths = zip(*done, strict=True)
            self._emit(Episodes(np.concatenate(returns), np.concatenate(lengths), by_name(extras)))
        if self._first_fault is not None:
            self._watch.flush()  # the runner compares its totals with the budget when this event arrives
            self._emit(SurvivedFaults(dict(self._fault_counts), self._first_fault))
            self._fault_counts.clear()
            self._first_fault = None

    def close(self) -> None:
        """Close all environments."""
        for running in self._running.values():
            running.group.close()

    def _step(self, running: RunningGroup) -> None:
        """Step a group with the actions in its slot."""
        arena, slot, t = self._arena, running.slot, running.step
        outcome, after = arena.outcome(slot, t), arena.step_buffers(slot, t + 1)
        running.group.step(arena.categorical[slot, t], arena.continuous[slot, t], outcome, after)
        self._watch.lap("environment")
        self._watch.count(arena.rows)
        if running.group.faults:
            self._survive_faults(running)
        running.log.record(arena.active[slot, t], outcome, running.group.goes_on)
        arena.final_change[slot, t] = np.nan
        if (finals := running.group.finals) is not None:
            self._request_final_values(running, finals, after)
        else:
            self._advance(running)

    def _survive_faults(self, running: RunningGroup) -> None:
        """Exclude the fragments of rows whose environments were at fault from training, and count the faults."""
        for fault in running.group.faults:
            if running.slot >= 0:  # else the first episodes have not begun
                self._arena.active[running.slot, : running.step + 1, fault.rows] = False
                running.log.exclude(fault.rows)
            self._first_fault = self._first_fault or fault
            self._fault_counts[fault.environment] += fault.count
            self._watch.env_faults += fault.count
        running.group.faults.clear()

    def _request_final_values(self, running: RunningGroup, finals: Finals, after: StepBuffers) -> None:
        """Request V(final_obs) of rows that were truncated and have already been reset. Their final observations take
        the place of the next ones until the answer."""
        running.finals = finals
        running.displaced = tuple(leaf[finals.rows].copy() for leaf in after.obs)
        for leaf, final in zip(after.obs, finals.obs, strict=True):
            leaf[finals.rows] = final
        self._request(running, running.step + 1, value_only=True)

    def _receive_final_values(self, running: RunningGroup, finals: Finals) -> None:
        """Store how far final observations change the value, and put the displaced observations back."""
        arena, slot, t, rows = self._arena, running.slot, running.step, finals.rows
        arena.final_change[slot, t, rows] = arena.value[slot, t + 1, rows] - arena.value[slot, t, rows]
        for leaf, first in zip(arena.step_buffers(slot, t + 1).obs, running.displaced, strict=True):
            leaf[rows] = first
        running.finals = None
        self._advance(running)

    def _advance(self, running: RunningGroup) -> None:
        """Request the next actions, or pass the full slot on to the learner and begin the next segment."""
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
        """Assign free slots to the groups that wait for one; wait up to `timeout` seconds for the first slot."""
        slots = self._free.get_many(timeout, len(self._slotless))
        self._watch.lap("blocked" if timeout else "queue")
        for slot in slots:
            running = self._slotless.pop(0)
            running.slot, running.step = slot, 0
            self._arena.state[slot] = FILLING
            fence()
            # Read after the state has been set: from then on the learner counts this slot at its next update, so the
            # version is a lower bound for all samples of the segment.
            self._arena.begun[slot] = self._weights.version
            self._arena.owner[slot] = OWN_POLICY
            copy_step_buffers(running.carry, self._arena.step_buffers(slot, 0))
            self._request(running, 0)

    def _request(self, running: RunningGroup, step: int, value_only: bool = False) -> None:
        self._watch.lap("copying")
        self._requests[running.index].put_many((pack_request(running.slot, running.index, step, value_only),))
        self._watch.lap("queue")
