"""Environments that misbehave: what becomes of them, of their samples, and of the run."""

from __future__ import annotations

import asyncio
import csv
import dataclasses
import gc
import json
import weakref
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from counting import Counting
from faults import Flaky, FlakyVector, Panic
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from sampling_run import SamplingRun

from perf.learner_numbers import backward
from sfactory import Config, train
from sfactory.config import LogConfig, RuntimeConfig
from sfactory.data.arena import FREE, Arena, segment_fields
from sfactory.data.plane import DataPlane
from sfactory.data.queues import LocalQueue, unpack_request
from sfactory.data.shared_memory import SharedArray
from sfactory.data.weights import PublishedWeights
from sfactory.envs import EnvRequest, Outcome, env_seed, fault_recovery, general
from sfactory.envs.interface import EnvSpec, Finals, Group, StepBuffers, SurvivedFault
from sfactory.envs.observations import new_step_buffers
from sfactory.errors import EnvironmentFault
from sfactory.rollout import RolloutWorker
from sfactory.runs.checkpoint import CheckpointStore
from sfactory.runtime.budgets import ALWAYS_SURVIVED, FULL_MESSAGES, PERIOD_S, FaultBudget
from sfactory.runtime.processes import fork_server
from sfactory.runtime.wires import LocalEvents
from sfactory.spaces import ActionSpec, ObservationSpec
from sfactory.telemetry.control_block import ControlBlock
from sfactory.telemetry.events import SurvivedFaults

pytestmark = pytest.mark.timeout(120)
SMALL = {"workers": 1, "envs_per_worker": 8, "rollout": 16, "batch_size": 128, "preset": "none", "device": "cpu"}


@pytest.fixture(scope="module", autouse=True)
def server():
    """One for all runs in this process."""
    with fork_server():
        yield


@pytest.fixture(autouse=True)
def no_pause(monkeypatch):
    monkeypatch.setattr(fault_recovery, "PAUSE_S", 0.0)


def group_of(
    env: Any, count: int, first_index: int = 0, survive_faults: bool = True, **kwargs: Any
) -> tuple[EnvSpec, Group]:
    spec = general.probe(EnvRequest(env, kwargs))
    return spec, general.make_group(
        EnvRequest(env, kwargs, survive_faults=survive_faults), spec, count, first_index, seed=3
    )


def new_outcome(rows: int) -> Outcome:
    return Outcome(np.full(rows, 9, np.float32), np.ones(rows, bool), np.ones(rows, bool))


def step(group: Group, spec: EnvSpec) -> tuple[StepBuffers, Outcome]:
    after, outcome = new_step_buffers(spec, group.rows), new_outcome(group.rows)
    group.step(
        np.zeros((group.rows, len(spec.action.sizes)), np.int32), np.zeros((group.rows, 0), np.float32), outcome, after
    )
    return after, outcome


def play(group: Group, spec: EnvSpec, steps: int) -> None:
    for _ in range(steps):
        step(group, spec)


# Groups


class Scheduled(Counting):
    """Misbehaves at the steps of its life that its fault names, if it is a first-made one of the seeds in `bad`."""

    made: list[Scheduled]

    def __init__(self, fault: str = "", at: int = 3, bad: tuple[int, ...] = ()):
        super().__init__()
        self.fault, self.at, self.bad, self.steps, self.closed, self.is_bad = fault, at, bad, 0, False, False
        self.seeds: list[int] = []
        Scheduled.made.append(self)

    def reset(self, *, seed=None, options=None):
        if seed is not None:
            self.seeds.append(seed)
            self.is_bad = seed in self.bad
        elif self.fault == "reset" and self.is_bad and self.steps >= self.at:
            raise RuntimeError("no licence")
        observation, info = super().reset(seed=seed, options=options)
        return observation, info | {"action_mask": np.ones(self.action_space.n, np.int8)}

    def step(self, action):
        self.steps += 1
        observation, reward, terminated, truncated, info = super().step(action)
        info["action_mask"] = np.ones(self.action_space.n, np.int8)
        result = (observation, reward, terminated, truncated, info)
        if not (self.is_bad and self.steps == self.at):
            return result
        if self.fault == "raise":
            raise RuntimeError("no licence")
        if self.fault == "exit":
            raise SystemExit(3)
        if self.fault == "cancelled":
            raise asyncio.CancelledError
        if self.fault == "panic":
            raise Panic("index out of bounds")
        return {
            "tuple": result[:4],
            "none": None,
            "shape": (observation[:-1], *result[1:]),
            "dtype": (np.array(["a"] * len(observation)), *result[1:]),
            "nan": (observation * np.nan, *result[1:]),
            "inf reward": (observation, np.inf, *result[2:]),
            "reward": (observation, "much", *result[2:]),
            "big reward": (observation, 10**400, *result[2:]),
            "mask": (*result[:4], {}),
            "empty mask": (*result[:4], {"action_mask": np.zeros(self.action_space.n)}),
            "info": (*result[:2], True, False, None),
        }.get(self.fault, result)

    def close(self):
        self.closed = True
        raise RuntimeError("it does not even close")


FAULTS = [
    "raise",
    "exit",
    "cancelled",
    "panic",
    "tuple",
    "none",
    "shape",
    "dtype",
    "nan",
    "inf reward",
    "reward",
    "big reward",
    "mask",
    "empty mask",
    "info",
]
FAULTS += ["reset"]


@pytest.mark.parametrize("fault", FAULTS)
def test_only_the_faulty_environment_is_made_anew_and_nothing_else_changes(fault: str):
    Scheduled.made = []
    bad = env_seed(3, 8)
    spec, healthy = group_of(Scheduled, 3, first_index=7)
    _, group = group_of(Scheduled, 3, first_index=7, fault=fault, bad=(bad,))
    frames = new_step_buffers(spec, 3), new_step_buffers(spec, 3)
    healthy.reset(frames[0])
    group.reset(frames[1])
    before = len(Scheduled.made)
    broke = False
    for _ in range(60):
        (wanted, wanted_outcome), (got, outcome) = step(healthy, spec), step(group, spec)
        for a, b in zip((*wanted.obs, *wanted[1:], *wanted_outcome), (*got.obs, *got[1:], *outcome), strict=True):
            assert (a[[0, 2]] == b[[0, 2]]).all()
        if group.faults:
            (fault,) = group.faults
            group.faults.clear()
            assert not broke
            broke = True
            assert list(fault.rows) == [1]
            assert fault.environment == "environment 8 (Scheduled)"
            assert fault.message.startswith("environment 8 (Scheduled)")
            assert fault.count == 1
            assert [float(array[1]) for array in outcome] == [0, True, False]
            assert got.first[1] and got.active[1] and got.mask[1].all()
            assert got.obs[0][1, 2] == 0, "the first observation of an episode"
        assert np.isfinite(got.obs[0]).all() and np.isfinite(outcome.reward).all()
    assert broke
    (new,) = Scheduled.made[before:]
    assert new is group.envs[1]
    assert new.seeds == [env_seed(3, 8, 1)]
    assert [env.closed for env in Scheduled.made if bad in env.seeds and env.fault] == [True]
    group.close()


@pytest.mark.parametrize("fault", FAULTS)
def test_without_replacing_the_fault_is_raised(fault: str):
    Scheduled.made = []
    spec, group = group_of(Scheduled, 3, first_index=7, survive_faults=False, fault=fault, bad=(env_seed(3, 8),))
    group.reset(new_step_buffers(spec, 3))
    with pytest.raises(EnvironmentFault, match=r"environment 8 \(Scheduled\)"):
        play(group, spec, 60)


@pytest.mark.parametrize("fault", ["raise", "nan", "tuple", "reset"])
def test_nothing_keeps_a_faulty_environment_alive(fault: str):
    Scheduled.made = []
    spec, group = group_of(Scheduled, 3, first_index=7, fault=fault, bad=(env_seed(3, 8),))
    group.reset(new_step_buffers(spec, 3))
    Scheduled.made = []
    old = weakref.ref(group.envs[1])
    gc.disable()
    try:
        play(group, spec, 30)
        assert group.faults
        assert old() is None
    finally:
        gc.enable()


def test_an_environment_whose_final_observation_is_bad_neither_rests_nor_wakes():
    class Cut(gymnasium.Env):
        observation_space, action_space = spaces.Box(-9, 9, (2,)), spaces.Discrete(2)
        resets = 0

        def reset(self, *, seed=None, options=None):
            Cut.resets += 1
            return np.zeros(2, np.float32), {}

        def step(self, action):
            return np.full(2, np.nan, np.float32), 1.0, False, True, {}

    spec, group = group_of(Cut, 1)
    group.reset(new_step_buffers(spec, 1))
    Cut.resets = 0
    for number in range(3):
        after, outcome = step(group, spec)
        assert after.first[0] and after.active[0] and outcome.terminated[0] and not outcome.truncated[0]
        assert Cut.resets == number + 1


class Broken(gymnasium.Env):
    """Fails at every call of one kind, but the first `good` of the program."""

    observation_space, action_space = spaces.Box(-9, 9, (2,)), spaces.Discrete(2)
    calls = 0

    def __init__(self, way: str, good: int):
        self.way, self.good = way, good
        self._call("make")

    def reset(self, *, seed=None, options=None):
        self._call("reset")
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self._call("step")
        return np.full(2, np.nan if self.way == "nan" else 0, np.float32), 1.0, self.way == "reset", False, {}

    def _call(self, way: str) -> None:
        if way == self.way:
            Broken.calls += 1
            if Broken.calls > self.good:
                raise RuntimeError("never again")


@pytest.mark.parametrize("way", ["make", "reset", "step", "nan"])
def test_an_environment_that_fails_ten_times_in_a_row_is_given_up(way: str):
    Broken.calls = 0
    spec, group = group_of(Broken, 1, way=way, good={"make": 2, "reset": 5, "step": 3}.get(way, 0))
    if way == "make":
        group.envs[0].way = "step"
    group.reset(new_step_buffers(spec, 1))
    with pytest.raises(EnvironmentFault, match=r"environment 0 \(Broken\)") as caught:
        play(group, spec, 20)
    assert "failed 10 times without a good step in between" in str(caught.value)
    assert len(group.faults) == 10
    assert ("never again" in str(caught.value)) == (way != "nan")


def test_faults_with_good_steps_between_them_are_survived_for_ever():
    class Fickle(Counting):
        steps = 0

        def step(self, action):
            Fickle.steps += 1
            if Fickle.steps % 2:
                raise RuntimeError("every other time")
            return super().step(action)

    spec, group = group_of(Fickle, 1)
    group.reset(new_step_buffers(spec, 1))
    for _ in range(100):
        step(group, spec)
    assert len(group.faults) > 30


def test_seeds_of_environments_made_anew_are_all_different():
    seeds = [env_seed(7, index, remade) for index in range(300) for remade in range(300)]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**31 for seed in seeds)
    assert env_seed(7, 5) == env_seed(7, 5, 0)


class Fragile(VectorEnv):
    """Counts up; episodes end after 5 steps by truncation. `faults` says what goes wrong in which step of its life."""

    def __init__(
        self, num_envs: int = 1, mode: AutoresetMode = AutoresetMode.NEXT_STEP, faults: dict[int, str] | None = None
    ):
        self.num_envs, self.mode, self.faults, self.life, self.closed = num_envs, mode, faults or {}, 0, False
        self.metadata = {"autoreset_mode": mode}
        self.single_observation_space, self.single_action_space = spaces.Box(-1e9, 1e9, (2,)), spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        mask = (options or {}).get("reset_mask")
        if mask is None:
            self.seeds, self.count, self.over = seed, np.zeros(self.num_envs), np.zeros(self.num_envs, bool)
        else:
            self.count[mask] = 0
        return self._see(), {}

    def step(self, actions):
        self.life += 1
        fault = self.faults.get(self.life)
        if fault == "raise":
            raise RuntimeError("no licence")
        if fault == "exit":
            raise SystemExit(1)
        if fault == "panic":
            raise Panic("index out of bounds")
        self.count += 1
        if self.mode is AutoresetMode.NEXT_STEP:
            self.count[self.over] = 0
        self.over = self.count == 5
        seen, info = self._see(), {}
        if fault == "nan":
            seen[1] = np.nan
        if self.mode is AutoresetMode.SAME_STEP and self.over.any():
            info = {"final_obs": seen.copy()}
            seen[self.over] = 0
            self.count[self.over] = 0
        reward = np.ones(self.num_envs)
        if fault == "reward":
            reward[1] = -np.inf
        if fault == "arrays":
            reward = reward[:-1]
        if fault == "info":
            info = None
        return seen, reward, np.zeros(self.num_envs, bool), self.over.copy(), info

    def _see(self):
        return np.stack([self.count, np.ones(self.num_envs)], 1).astype(np.float32)

    def close_extras(self, **kwargs):
        self.closed = True
        raise RuntimeError("it does not even close")


@pytest.mark.parametrize("mode", list(AutoresetMode))
@pytest.mark.parametrize("fault", ["raise", "exit", "panic", "arrays", "info"])
def test_a_vector_environment_that_fails_is_made_anew_as_a_whole(fault: str, mode: AutoresetMode):
    if fault == "info" and mode is AutoresetMode.NEXT_STEP:
        pytest.skip("nobody reads it")
    at = 5 if fault == "info" else 3
    spec, group = group_of(Fragile, 3, first_index=4, mode=mode, faults={at: fault})
    group.reset(new_step_buffers(spec, 3))
    old = group.env
    for number in range(1, 20):
        after, outcome = step(group, spec)
        if number % at:
            assert not group.faults
            continue
        (fault,) = group.faults
        assert list(fault.rows) == [0, 1, 2]
        assert fault.count == 3
        assert fault.environment == "vector environment 4 to 6 (Fragile)"
        assert "vector environment 4 to 6 (Fragile)" in fault.message
        group.faults.clear()
        assert after.first.all() and after.active.all() and group.finals is None
        assert after.obs[0][:, 0].tolist() == [0, 0, 0]
        assert [array.tolist() for array in outcome] == [[0] * 3, [True] * 3, [False] * 3]
        assert group.env.seeds == [env_seed(3, 4 + row, number // at) for row in range(3)]
    assert old.closed


@pytest.mark.parametrize("mode", list(AutoresetMode))
@pytest.mark.parametrize(("fault", "at"), [("nan", 3), ("nan", 5), ("reward", 3), ("reward", 5)])
def test_a_row_of_a_vector_environment_with_impossible_values_is_told_and_made_harmless(
    fault: str, at: int, mode: AutoresetMode
):
    spec, healthy = group_of(Fragile, 3, mode=mode)
    _, group = group_of(Fragile, 3, first_index=4, mode=mode, faults={at: fault, at + 1: fault})
    healthy.reset(new_step_buffers(spec, 3))
    group.reset(new_step_buffers(spec, 3))
    old = group.env
    for number in range(1, 12):
        (wanted, wanted_outcome), (got, outcome) = step(healthy, spec), step(group, spec)
        for a, b in zip((*wanted.obs, *wanted[2:], *wanted_outcome), (*got.obs, *got[2:], *outcome), strict=True):
            assert (a[[0, 2]] == b[[0, 2]]).all()
        assert (healthy.finals is None) == (group.finals is None)
        values = (*got.obs, outcome.reward, *(group.finals.obs if group.finals else ()))
        assert all(np.isfinite(value).all() for value in values)
        is_bad = number == at or number == at + 1
        # what an environment gives as the reward of a step in which it was reset does not count
        if fault == "reward" and mode is AutoresetMode.NEXT_STEP and number == at + 1 == 6:
            is_bad = False
        assert [(list(b.rows), b.environment, b.count) for b in group.faults] == (
            [([1], "environment 5 (Fragile)", 1)] if is_bad else []
        )
        if is_bad and fault == "nan":
            is_final = number == 5 and mode is not AutoresetMode.NEXT_STEP
            assert got.active[1] == is_final, "an observation that was made up is not acted upon"
            assert (got.obs[0][1] == (0 if not is_final else wanted.obs[0][1])).all()
        elif is_bad:
            assert outcome.reward[1] == 0
            assert got.active[1] == wanted.active[1]
        else:
            assert got.active[1] == wanted.active[1]
        group.faults.clear()
    assert group.env is old


def test_an_environment_may_fail_in_its_very_first_reset():
    class Reluctant(Counting):
        tries = 0

        def reset(self, *, seed=None, options=None):
            Reluctant.tries += 1
            if Reluctant.tries in (4, 5):
                raise RuntimeError("not yet")
            return super().reset(seed=seed, options=options)

    spec, group = group_of(Reluctant, 3, first_index=2)
    frame = new_step_buffers(spec, 3)
    group.reset(frame)
    assert frame.first.all() and frame.active.all()
    assert [b.environment[:14] for b in group.faults] == ["environment 3 "] * 2
    assert (frame.obs[0][:, 2] == 0).all()


def test_a_multi_agent_environment_is_made_anew_for_all_its_agents():
    pettingzoo = pytest.importorskip("pettingzoo")

    class Team(pettingzoo.ParallelEnv):
        metadata: dict[str, Any] = {"name": "team"}  # noqa: RUF012
        possible_agents = ["a", "b"]  # noqa: RUF012
        made = 0

        def __init__(self, fault: str = "") -> None:
            Team.made += 1
            self.fault, self.life, self.number = fault, 0, Team.made

        def observation_space(self, agent):
            return spaces.Box(-1e9, 1e9, (2,))

        def action_space(self, agent):
            return spaces.Discrete(2)

        def reset(self, seed=None, options=None):
            if self.fault == "reset" and seed is None:
                raise RuntimeError("no licence")
            self.agents, self.count, self.bad = ["a", "b"], 0, seed == env_seed(3, 5) if seed is not None else self.bad
            return self._see(), {"a": {}, "b": {}}

        def step(self, actions):
            self.count += 1
            self.life += 1
            seen, reward = self._see(), 1.0
            if self.bad and self.life == 3:
                if self.fault == "raise":
                    raise RuntimeError("no licence")
                if self.fault == "dicts":
                    return seen, 1.0, False, False, {}
                if self.fault == "flags":
                    return seen, {}, {"a": np.zeros(2)}, {}, {}
                if self.fault == "nan":
                    seen["b"][0] = np.nan
                if self.fault == "shape":
                    seen["b"] = np.zeros(3, np.float32)
                if self.fault == "reward":
                    reward = np.nan
            if self.count == 4:
                self.agents = []
            over = self.count == 4
            return seen, {"a": 1.0, "b": reward}, {"a": over, "b": over}, {"a": False, "b": False}, {"a": {}, "b": {}}

        def _see(self):
            return {agent: np.array([self.life, self.count], np.float32) for agent in self.agents}

    for fault in ("raise", "dicts", "flags", "nan", "shape", "reward", "reset"):
        spec, group = group_of(Team, 2, first_index=4, fault=fault)
        group.reset(new_step_buffers(spec, 4))
        at, named = (4, ("4", "5")) if fault == "reset" else (3, ("5",))
        for number in range(1, 10):
            before = Team.made
            after, outcome = step(group, spec)
            broken = {b.environment: list(b.rows) for b in group.faults}
            group.faults.clear()
            if number != at and not (fault == "reset" and number == 2 * at):
                assert not broken, (fault, number)
                continue
            assert broken == {f"environment {name} (Team)".replace("Team", Team.__qualname__.replace("<",
            "").replace(">", "")):
                              [0, 1] if name == "4" else [2, 3] for name in named}  # fmt: skip
            assert Team.made == before + len(named)
            assert after.first[2:].all() and after.active[2:].all()
            assert (after.obs[0][2:] == 0).all()
            assert [array[2:].tolist() for array in outcome] == [[0, 0], [True, True], [False, False]]
            if fault != "reset":
                assert outcome.reward[:2].tolist() == [1, 1] and not outcome.terminated[:2].any()


# The rollout worker


class Script:
    """A group whose rows follow a random script: ends, rests, finals, and breakages of random rows. Keeps what it has
    done."""

    def __init__(self, rows: int, seed: int) -> None:
        self.rows, self.finals, self.goes_on = rows, None, None
        self.extras: list[dict[str, float]] = []
        self.faults: list[SurvivedFault] = []
        self.random = np.random.default_rng(seed)
        self.active = np.ones(rows, bool)
        self.steps: list[tuple[np.ndarray, np.ndarray, list[int]]] = []
        self.length, self.episodes = np.zeros(rows), []

    def reset(self, buffers: StepBuffers) -> None:
        buffers.obs[0][:] = 0
        buffers.first[:] = buffers.active[:] = True
        self.faults.append(SurvivedFault([1], "environment 1", "in the first reset"))

    def step(self, categorical: np.ndarray, continuous: np.ndarray, outcome: Outcome, after: StepBuffers) -> None:
        random, rows = self.random, self.rows
        ended = random.random(rows) < 0.15
        ends_well = random.random(rows) < 0.5
        broken = np.flatnonzero(random.random(rows) < 0.04).tolist()
        was_active = self.active.copy()
        outcome.reward[:] = was_active
        outcome.terminated[:] = was_active & ended & ends_well
        outcome.truncated[:] = was_active & ended & ~ends_well
        rests = outcome.truncated & (random.random(rows) < 0.5)
        after.obs[0][:] = random.random(after.obs[0].shape)
        after.active[:] = ~rests
        after.first[:] = ~was_active | outcome.terminated | (outcome.truncated & ~rests)
        finals = np.flatnonzero(outcome.truncated & ~rests)
        self.finals = Finals(finals, (np.full((len(finals), 3), 7, np.float32),)) if len(finals) else None
        self.length += was_active
        for row in broken:
            outcome.reward[row], outcome.terminated[row], outcome.truncated[row] = 0, True, False
            after.first[row] = after.active[row] = True
            self.faults.append(SurvivedFault([row], f"environment {row}", f"in step {len(self.steps)}"))
            self.length[row] = 0
        for row in np.flatnonzero(outcome.terminated | outcome.truncated).tolist():
            if row not in broken:
                self.episodes.append(self.length[row])
            self.length[row] = 0
        self.active = after.active.copy()
        self.steps.append((was_active, after.active.copy(), broken))

    def close(self) -> None:
        pass


@pytest.mark.parametrize("seed", range(8))
def test_the_rollout_worker_masks_exactly_the_fragments_of_broken_rows(seed: int):
    rows, rollout, slots = 6, 5, 3
    spec = EnvSpec(ObservationSpec.from_space(spaces.Box(-1, 1, (3,))), ActionSpec.from_space(spaces.Discrete(2)))
    arena = Arena(segment_fields(spec, 0), slots, rollout, rows)
    requests, ready, free, finished = (LocalQueue() for _ in range(4))
    control, local, script = ControlBlock(["rollout-0"], SharedArray), LocalEvents(), Script(rows, seed)
    plane = DataPlane(arena, PublishedWeights(1), [requests], [ready], free, finished, local, (0,), (0,))
    worker = RolloutWorker(0, {0: script}, plane, control.stopwatch("rollout-0"))
    free.put_many(list(range(slots)))
    worker.start()
    segments = []
    while len(segments) < 40:
        for message in requests.get_many(0):
            slot, group, t, _ = unpack_request(message)
            arena.value[slot, t] = 1
            ready.put_many([group])
        worker.poll(0)
        for slot in finished.get_many(0):
            segments.append(arena.active[slot, :-1].copy())
            arena.state[slot] = FREE
            free.put_many([slot])
    worker.report()
    events = local.take()

    for number, got in enumerate(segments):
        steps = script.steps[number * rollout : (number + 1) * rollout]
        wanted = np.array([was_active for was_active, _, _ in steps])
        for t, (_, _, broken) in enumerate(steps):
            wanted[: t + 1, broken] = False
        assert (got == wanted).all()
    assert np.concatenate(segments).mean() < 0.95, "the script breaks something"
    faults = [event for event in events if isinstance(event, SurvivedFaults)]
    counted = sum(sum(event.counts.values()) for event in faults)
    assert counted == 1 + sum(len(broken) for _, _, broken in script.steps) == control.total("rollout-0", "env_faults")
    assert faults[0].first == SurvivedFault([1], "environment 1", "in the first reset")
    lengths = [length for event in events if not isinstance(event, SurvivedFaults) for length in event.lengths.tolist()]
    returns = [value for event in events if not isinstance(event, SurvivedFaults) for value in event.returns.tolist()]
    assert lengths == returns
    # Row 1's first episode, of which the group has told a fault that did not end it, is not reported.
    assert len(script.episodes) - 1 <= len(lengths) <= len(script.episodes)
    assert not set(lengths) - set(script.episodes)


def test_exactly_the_fragments_of_a_failing_environment_are_missing(tmp_path):
    """Environment 2 of 4 raises in the 21st step of its first life, which is step 4 of the second segment."""

    class Once(Flaky):
        def reset(self, *, seed=None, options=None):
            self.is_bad = seed == env_seed(0, 2)
            return super().reset(seed=seed)

        def step(self, action):
            if self.is_bad and self.life == 20:
                raise RuntimeError("once")
            self.count = 0
            return super().step(action)

    run = SamplingRun(Config(env=Once, env_kwargs={"p": 0.0}, **SMALL, serial=True), tmp_path)
    try:
        missing = []
        for number in range(3):
            slots = run.sample(2)
            for slot in slots:
                environments = run.wires.arena.obs[0][slot, 0, :, 0].tolist()
                missing += [
                    (number, t, environments[row])
                    for t, row in np.argwhere(~run.wires.arena.active[slot, :-1]).tolist()
                ]
            run.give_back(slots)
            for worker in run.rollouts:
                worker.poll(0)
    finally:
        run.close()
    assert missing == [(1, t, env_seed(0, 2) % 1000) for t in range(5)]


def test_the_learner_leaves_a_batch_without_a_valid_sample_alone(tmp_path):
    run = SamplingRun(Config(env=Flaky, env_kwargs={"p": 0.0}, **SMALL, serial=True), tmp_path)
    try:
        run.learner._feed._scheduler.add(slots := run.sample(2))
        run.wires.arena.active[slots] = False
        weights = run.learner._flat.vector.clone()
        run.learner.poll(0)
        assert (run.learner.env_steps, run.learner.updates) == (0, 0)
        assert torch.equal(run.learner._flat.vector, weights)
        assert (run.wires.arena.state[slots] == FREE).all()
        run.learner._feed._scheduler.add(run.sample(2))
        run.learner.poll(0)
        assert run.learner.updates == 1
    finally:
        run.close()


# The budget


def faults_of(name: str, number: int, first: int = 1) -> SurvivedFaults:
    return SurvivedFaults({name: number}, SurvivedFault([0], name, f"{name} raised RuntimeError", first))


def test_few_faults_are_told_in_full_and_the_others_counted_once_a_minute():
    said, now = [], [0.0]
    budget = FaultBudget(0.01, said.append, clock=lambda: now[0])
    for second in range(50):
        now[0] = second
        budget.add(faults_of(f"environment {second % 8}", 10))
    assert len(said) == FULL_MESSAGES
    assert all("raised RuntimeError" in text for text in said)
    now[0] = PERIOD_S
    budget.add(faults_of("environment 9", 1))
    assert len(said) == FULL_MESSAGES + 2
    assert f"{500 - FULL_MESSAGES} more faults" in said[FULL_MESSAGES]
    assert "69 of environment 0" in said[FULL_MESSAGES] and "others" in said[FULL_MESSAGES]
    budget.flush()
    assert len(said) == FULL_MESSAGES + 2, "there was nothing left to say"


def test_the_budget_is_a_rate_that_begins_to_count_after_a_hundred():
    budget = FaultBudget(0.01, lambda text: None)
    budget.add(faults_of("environment 3", 1))
    assert budget.excess(ALWAYS_SURVIVED, 200) is None
    assert budget.excess(2000, 200_000) is None
    message = budget.excess(2001, 200_000)
    for part in ("2001 times", "200000 env steps", "--runtime.env-fault-rate", "environment 3 raised RuntimeError"):
        assert part in message
    assert FaultBudget(1, lambda text: None).excess(10**6, 10**6) is None


# Runs


def config_for(
    folder: Path, env: Any = Flaky, steps: int = 20_000, serial: bool = False, rate: float = 0.05, **kwargs: Any
) -> Config:
    return Config(
        env=env, env_kwargs={"log": str(folder / "log"), **kwargs}, run=str(folder / "run"), steps=steps, serial=serial,
        log=LogConfig(report_every_s=0.1, display="plain", tensorboard=False),
        runtime=RuntimeConfig(env_fault_rate=rate), **SMALL,
    )  # fmt: skip


def summary(folder: Path) -> dict:
    return json.loads((folder / "run" / "summary.json").read_text())


def counted(folder: Path) -> int:
    """Faults in the last row of the metrics."""
    with (folder / "run" / "metrics.csv").open() as file:
        return int(list(csv.DictReader(file))[-1]["env_faults"])


def check_run(folder: Path, result: Any) -> int:
    """The run has ended well, and all of its faults, whose number is returned, are in the metrics."""
    assert result.status == summary(folder)["status"] == "completed"
    assert result.env_steps >= 20_000
    snapshot = CheckpointStore(folder / "run" / "checkpoints").load_latest()
    assert snapshot.env_steps == result.env_steps
    assert all(tensor.isfinite().all() for tensor in snapshot.model.values())
    assert counted(folder) == (folder / "log").stat().st_size
    return counted(folder)


@pytest.mark.parametrize("serial", [True, False], ids=["serial", "processes"])
@pytest.mark.parametrize("ways", ["step reset", "nan reward", "inf", "shape", "result exit"])
def test_a_run_goes_on_whatever_its_environments_do_now_and_then(ways: str, serial: bool, tmp_path, capsys):
    result = train(config_for(tmp_path, ways=ways, p=0.002, serial=serial))
    assert check_run(tmp_path, result) > 10
    assert 6.9 < result.episode_return_mean <= 7.0, "half-played episodes are not reported"
    said = capsys.readouterr().out
    assert "the run goes on after a fault: environment " in said
    assert "more faults: " in said
    if "step" in ways:
        assert "lost its licence" in said and "Traceback" in said


@pytest.mark.parametrize("seed", range(3))
def test_a_serial_run_with_faults_is_reproducible(seed: int, tmp_path):
    def play(folder: Path) -> dict:
        config = config_for(folder, ways="step reset nan", p=0.003, serial=True, steps=4000)
        train(dataclasses.replace(config, seed=seed))
        return CheckpointStore(folder / "run" / "checkpoints").load_latest().model

    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    one, two = play(tmp_path / "a"), play(tmp_path / "b")
    assert all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.parametrize("serial", [True, False], ids=["serial", "processes"])
@pytest.mark.parametrize("ways", ["nan reward", "step"])
def test_a_run_goes_on_in_vector_environments(ways: str, serial: bool, tmp_path):
    result = train(config_for(tmp_path, FlakyVector, ways=ways, p=0.002, serial=serial, rate=0.2))
    assert result.status == "completed"
    faults = (tmp_path / "log").stat().st_size
    assert counted(tmp_path) >= (faults if ways == "nan reward" else 4 * faults) * 0.95
    assert 6.9 < result.episode_return_mean <= 7.0
    snapshot = CheckpointStore(tmp_path / "run" / "checkpoints").load_latest()
    assert all(tensor.isfinite().all() for tensor in snapshot.model.values())


@pytest.mark.parametrize("env", [Flaky, FlakyVector])
@pytest.mark.parametrize("ways", ["nan", "reward", "inf"])
def test_no_number_that_is_not_finite_reaches_a_batch(ways: str, env: Any, tmp_path):
    run = SamplingRun(config_for(tmp_path, env, ways=ways, p=0.02, serial=True), tmp_path)
    arena, poisoned = run.wires.arena, 0
    try:
        for _ in range(20):
            slots = run.sample(2)
            valid = arena.active[slots, :-1]
            poisoned += int((~valid).sum())
            assert np.isfinite(arena.obs[0][slots]).all(), "the network sees masked samples too"
            assert np.isfinite(arena.reward[slots]).all()
            batch = run.learner._feed.assemble(slots)
            assert backward(run.learner, batch)[0].loss.isfinite()
            run.give_back(slots)
    finally:
        run.close()
    assert poisoned > 50


@pytest.mark.parametrize(
    ("env", "ways", "serial", "says"),
    [
        (Flaky, "step", False, "10 times without a good step"),
        (Flaky, "step", True, "10 times without a good step"),
        (Flaky, "reset", True, "10 times without a good step"),
        (Flaky, "nan", False, "10 times without a good step"),
        (FlakyVector, "step", False, "10 times without a good step"),
        (FlakyVector, "nan", False, "runtime.env_fault_rate 0.05"),
        (FlakyVector, "nan", True, "runtime.env_fault_rate 0.05"),
        (FlakyVector, "reward", False, "--runtime.env-fault-rate"),
    ],
)
def test_environments_that_fail_always_end_the_run_which_is_saved(
    env: Any, ways: str, serial: bool, says: str, tmp_path
):
    broken = tmp_path / "broken"

    def break_them(report):
        if report.env_steps > 1000:
            broken.touch()

    with pytest.raises(EnvironmentFault, match=r"nvironment \d+ ") as caught:
        train(config_for(tmp_path, env, steps=10**9, serial=serial, ways=ways, p=0.0, broken=str(broken)), [break_them])
    assert says in str(caught.value)
    values = summary(tmp_path)
    assert values["status"] == "failed"
    assert says in values["error"]
    saved = CheckpointStore(tmp_path / "run" / "checkpoints").load_latest()
    assert saved.env_steps == values["env_steps"] > 1000
    assert all(tensor.isfinite().all() for tensor in saved.model.values())


def test_too_many_faults_end_the_run_with_the_figures_and_the_flag(tmp_path):
    with pytest.raises(
        EnvironmentFault, match=r"failed \d+ times in \d+ env steps.*runtime\.env_fault_rate 0\.01"
    ) as caught:
        train(config_for(tmp_path, steps=10**9, ways="step", p=0.05, rate=0.01))
    assert "lost its licence" in str(caught.value)
    assert summary(tmp_path)["status"] == "failed"
    assert counted(tmp_path) > ALWAYS_SURVIVED


class Refusing(gymnasium.Env):
    """Cannot be made once there are so many of it."""

    observation_space, action_space = spaces.Box(-1.0, 1.0, (2,)), spaces.Discrete(2)
    made, closed, most = 0, 0, 0

    def __init__(self) -> None:
        if Refusing.made == Refusing.most:
            raise ValueError("no licence is left")
        Refusing.made += 1

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        return np.zeros(2, np.float32), {}

    def close(self) -> None:
        Refusing.closed += 1


@pytest.mark.parametrize("most", [12, 15], ids=["in the first group", "in the second group"])
def test_a_serial_run_that_cannot_make_all_environments_closes_the_others_and_keeps_torchs_threads(
    most: int, tmp_path: Path
) -> None:
    Refusing.made = Refusing.closed = 0
    Refusing.most = most
    threads = torch.get_num_threads()
    with pytest.raises(Exception, match="no licence is left"):
        train(Config(env=Refusing, run=str(tmp_path / "run"), steps=2048, serial=True, **SMALL | {"workers": 2}))
    assert torch.get_num_threads() == threads
    assert Refusing.closed == most
