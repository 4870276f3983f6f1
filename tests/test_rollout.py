"""The rollout worker, without a run around it: what environments do is written where the learner reads it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from arenas import make_arena, make_plane

from sfactory.data.arena import FILLING, FINISHED, FREE, OWN_POLICY
from sfactory.data.plane import DataPlane
from sfactory.data.queues import unpack_request
from sfactory.data.shared_memory import SharedArray
from sfactory.envs.interface import Finals, Outcome, StepBuffers, SurvivedFault
from sfactory.rollout import EpisodeLog, RolloutWorker
from sfactory.telemetry.control_block import ControlBlock
from sfactory.telemetry.events import Episodes

ROWS, ROLLOUT, SLOTS = 5, 4, 3


class ScriptedGroup:
    """Observes and pays the number of its step plus a hundredth of the row; the last row ends every three steps.

    Args:
        rests: Whether a truncated row rests, or hands over its final observation.
    """

    def __init__(self, start: int = 0, rests: bool = True, terminates: bool = False) -> None:
        self.rows, self.count, self.rests, self.terminates = ROWS, start, rests, terminates
        self.finals: Finals | None = None
        self.goes_on: np.ndarray | None = None
        self.extras: list[dict[str, float]] = []
        self.faults: list[SurvivedFault] = []
        self.actions: list[tuple[np.ndarray, np.ndarray]] = []
        self.resting = self.closed = False

    def reset(self, buffers: StepBuffers) -> None:
        buffers.first[:] = True
        self._write(buffers)

    def step(self, categorical: np.ndarray, continuous: np.ndarray, outcome: Outcome, after: StepBuffers) -> None:
        self.actions.append((categorical.copy(), continuous.copy()))
        self.count += 1
        outcome.reward[:] = self.count + 0.01 * np.arange(ROWS)
        outcome.terminated[:] = outcome.truncated[:] = after.first[:] = False
        ends = self.count % 3 == 0 and not self.resting
        (outcome.terminated if self.terminates else outcome.truncated)[-1] = ends
        if self.resting:
            outcome.reward[-1] = 0
        after.first[-1] = self.resting or (ends and (self.terminates or not self.rests))
        self.resting = ends and self.rests and not self.terminates
        self.finals = None
        self._write(after)
        if ends and not (self.rests or self.terminates):
            finals = tuple(np.full((1, *leaf.shape[1:]), 77, leaf.dtype) for leaf in after.obs)
            self.finals = Finals(np.array([ROWS - 1]), finals)

    def _write(self, buffers: StepBuffers) -> None:
        for leaf in buffers.obs:
            leaf[...] = self.count
        buffers.mask[:] = True
        buffers.mask[:, self.count % 3] = False
        buffers.active[:] = True
        buffers.active[-1] = not self.resting

    def close(self) -> None:
        self.closed = True


class Driver:
    """A rollout worker whose requests are answered by hand."""

    def __init__(self, *groups: ScriptedGroup, slots: int = SLOTS) -> None:
        self.arena = make_arena(slots, ROLLOUT, ROWS)
        self.plane: DataPlane = make_plane(self.arena, (0,) * len(groups), (0,) * len(groups))
        self.plane.free.put_many(list(range(slots)))
        self.control = ControlBlock(["rollout-0"], SharedArray)
        watch = self.control.stopwatch("rollout-0")
        self.worker = RolloutWorker(0, dict(enumerate(groups)), self.plane, watch)
        self.requests: list[tuple[int, int, int, bool]] = []

    def waiting(self) -> tuple[int, int, int, bool]:
        """The only waiting request."""
        (message,) = self.plane.requests[0].get_many(0)
        self.plane.requests[0].put_many([message])
        return unpack_request(message)

    def answer(self, value: float = 0.0) -> list[tuple[int, int, int, bool]]:
        """Answer all waiting requests, with actions and values that tell slot and step, and let the worker step."""
        requests = [unpack_request(message) for message in self.plane.requests[0].get_many(0)]
        for slot, group, t, value_only in requests:
            self.arena.value[slot, t] = value
            if not value_only:
                self.arena.categorical[slot, t] = 10 * slot + t
                self.arena.continuous[slot, t] = -(10 * slot + t)
            self.plane.ready[0].put_many([group])
        self.worker.poll(0)
        self.requests += requests
        return requests

    def run(self, finished: int) -> list[int]:
        """Answer until so many segments are finished; their slots."""
        slots: list[int] = []
        while len(slots) < finished:
            assert self.answer(), "the worker waits for nothing"
            slots += self.plane.finished.get_many(0)
        return slots

    def events(self, kind: type) -> list[Any]:
        self.worker.report()
        return [event for event in self.plane.events.take() if isinstance(event, kind)]


def test_observations_rewards_and_ends_are_where_the_learner_reads_them():
    group = ScriptedGroup()
    driver = Driver(group)
    driver.worker.start()
    arena = driver.arena
    for number, slot in enumerate(driver.run(2)):
        begin = number * ROLLOUT
        for t in range(ROLLOUT + 1):
            for leaf in arena.obs:
                assert (leaf[slot, t] == begin + t).all(), "row T holds what the next segment begins with"
            assert (arena.mask[slot, t].all(0) == (np.arange(3) != (begin + t) % 3)).all()
        for t in range(ROLLOUT):
            count = begin + t + 1
            np.testing.assert_allclose(arena.reward[slot, t, :-1], count + 0.01 * np.arange(ROWS - 1))
            assert (arena.categorical[slot, t] == group.actions[count - 1][0]).all()
            assert (group.actions[count - 1][0] == 10 * slot + t).all(), "it was stepped with the actions of its slot"
            assert (group.actions[count - 1][1] == -(10 * slot + t)).all()
    assert arena.truncated[:2].any() and not arena.truncated[..., :-1].any() and not arena.terminated.any()
    assert np.isnan(arena.final_change[:2]).all(), "a row that rests has its final value at t+1"


def test_a_resting_row_is_not_active_and_its_next_observation_is_the_first():
    driver = Driver(ScriptedGroup())
    driver.worker.start()
    slots = driver.run(2)
    arena = driver.arena
    truncated = np.concatenate([arena.truncated[slot, :, -1] for slot in slots])
    active = np.concatenate([arena.active[slot, :-1, -1] for slot in slots])
    first = np.concatenate([arena.first[slot, :-1, -1] for slot in slots])
    ends = np.flatnonzero(truncated)
    assert ends.tolist() == [2, 5]
    assert not active[ends + 1].any() and active.sum() == len(active) - len(ends)
    assert np.flatnonzero(first).tolist() == [0, *(ends + 2)]


def test_slots_carry_their_state_owner_and_version():
    driver = Driver(ScriptedGroup())
    arena, weights = driver.arena, driver.plane.weights
    weights.publish(torch.zeros(1), 4)
    driver.worker.start()
    assert sorted(arena.state.tolist()) == [FREE, FREE, FILLING]
    weights.publish(torch.zeros(1), 9)
    (slot,) = driver.run(1)
    assert arena.state[slot] == FINISHED
    assert arena.begun[slot] == 4, "no sample is older than the version at its beginning"
    assert (arena.owner[slot] == OWN_POLICY).all()
    (other,) = np.flatnonzero(arena.state == FILLING)
    assert arena.begun[other] == 9


def test_without_a_free_slot_the_worker_waits_and_goes_on_where_it_was():
    driver = Driver(ScriptedGroup(), slots=1)
    driver.worker.start()
    (slot,) = driver.run(1)
    assert not driver.answer() and not driver.plane.finished.get_many(0)
    driver.arena.state[slot] = FREE
    driver.plane.free.put_many([slot])
    driver.worker.poll(0)
    assert driver.run(1) == [slot]
    assert (driver.arena.obs[0][slot, 0] == ROLLOUT).all(), "nothing was stepped or lost while it waited"


def test_groups_keep_their_rows_slots_and_requests_apart():
    groups = ScriptedGroup(0), ScriptedGroup(100)
    driver = Driver(*groups, slots=4)
    driver.worker.start()
    slots = driver.run(4)
    begins = {slot: group for slot, group, t, _ in driver.requests if t == 0}
    for slot in slots:
        assert (driver.arena.obs[1][slot] // 100 == begins[slot]).all()
    assert len(set(slots)) == 4


@pytest.mark.parametrize("step", range(3))
def test_final_values_at_a_truncation_are_asked_for_and_what_they_change_is_stored(step: int):
    """The group is truncated in step 3 of its life: at the middle of a segment, or in its last step."""
    group = ScriptedGroup(start=(3 - 1) - step, rests=False)
    driver = Driver(group)
    driver.worker.start()
    arena = driver.arena
    while not (request := driver.waiting())[3]:
        driver.answer(value=0.125)
    slot, _, t, _ = request
    assert all((leaf[slot, t, -1] == 77).all() for leaf in arena.obs), "the policy sees the final observation"
    assert all((leaf[slot, t, :-1] == 3).all() for leaf in arena.obs)
    driver.answer(value=0.5)
    assert t == step + 1
    assert arena.final_change[slot, t - 1, -1] == 0.5 - 0.125
    assert np.isnan(arena.final_change[slot, t - 1, :-1]).all()
    assert all((leaf[slot, t] == 3).all() for leaf in arena.obs), "the next episode's first observations are back"
    assert arena.truncated[slot, t - 1, -1] and arena.first[slot, t, -1]


def test_episodes_that_ended_are_reported_with_return_and_length():
    driver = Driver(ScriptedGroup(terminates=True))
    driver.worker.start()
    driver.run(2)
    (event,) = driver.events(Episodes)
    assert event.lengths.tolist() == [3, 3]
    np.testing.assert_allclose(event.returns, [1 + 2 + 3 + 3 * 0.04, 4 + 5 + 6 + 3 * 0.04], rtol=1e-6)
    assert not driver.events(Episodes), "each is reported once"


def test_closing_a_worker_closes_its_groups():
    groups = ScriptedGroup(), ScriptedGroup()
    Driver(*groups).worker.close()
    assert all(group.closed for group in groups)


@pytest.mark.parametrize("seed", range(5))
def test_episodes_are_counted_as_row_by_row(seed: int):
    """Against the plain definition, over random flags; excluded rows are out until their next episode, and a
    termination after which the game goes on ends none."""
    rng, rows = np.random.default_rng(seed), 7
    log = EpisodeLog(rows)
    returns, lengths, excluded = np.zeros(rows), np.zeros(rows, int), np.zeros(rows, bool)
    expected: list[tuple[float, int]] = []
    for _ in range(300):
        active, kind = rng.random(rows) < 0.8, rng.integers(0, 8, rows)
        goes_on = (kind == 0) & (rng.random(rows) < 0.5) if rng.random() < 0.5 else None
        outcome = Outcome(rng.normal(size=rows).astype(np.float32), kind == 0, kind == 1)
        if rng.random() < 0.1:
            log.exclude([3])
            excluded[3] = True
        log.record(active, outcome, goes_on)
        for row in range(rows):
            returns[row] += outcome.reward[row] * active[row]
            lengths[row] += active[row]
            if kind[row] < 2 and (goes_on is None or not goes_on[row]):
                if active[row] and not excluded[row]:
                    expected.append((returns[row], lengths[row]))
                returns[row], lengths[row], excluded[row] = 0.0, 0, False
    parts = log.take()
    np.testing.assert_allclose(np.concatenate([part[0] for part in parts]), [value for value, _ in expected], rtol=1e-6)
    assert np.concatenate([part[1] for part in parts]).tolist() == [length for _, length in expected]
    assert {(part[0].dtype.name, part[1].dtype.name) for part in parts} == {("float32", "int32")}
    assert log.take() == []
