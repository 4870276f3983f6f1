"""The time of an env step, and the workers that a run has by it."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial

import gymnasium
import numpy as np
import pytest

from sfactory import Config
from sfactory.config import LossConfig, RuntimeConfig, resolve
from sfactory.config.lag import least_max_lag
from sfactory.runtime import step_time
from sfactory.runtime.planning import make_plan, note_on_slow_steps, notes_on
from sfactory.runtime.processes import WorkerProcesses
from sfactory.runtime.step_time import StepTime, measure_step_time

BUSY = "import time; end = time.process_time() + 0.02\nwhile time.process_time() < end: pass"


class Stepped(gymnasium.Env):
    """Calls a function in each step."""

    observation_space = gymnasium.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, function: Callable[[], object]) -> None:
        self.function = function

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.function()
        return np.zeros(2, np.float32), 0.0, False, False, {}


def compute(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def start_program() -> None:
    subprocess.run([sys.executable, "-S", "-c", BUSY], check=True)


def waiting(**settings) -> Config:
    return resolve(Config(env=partial(Stepped, partial(time.sleep, 0.005)), steps=100_000, **settings))


def measured(function: Callable[[], object]) -> StepTime | None:
    plan = make_plan(resolve(Config(env=partial(Stepped, function), steps=100_000, workers=1)))
    return measure_step_time(plan)


def test_steps_that_sleep_wait():
    time_ = measured(partial(time.sleep, 0.05))  # long beside what a busy machine lets it wait for a core
    assert time_.waits and 0.05 <= time_.seconds < 1


@pytest.mark.parametrize("function", [partial(compute, 0.005), start_program], ids=["itself", "a program"])
def test_steps_that_compute_do_not_wait(function):
    assert not measured(function).waits


def test_quick_steps_are_not_said_to_wait():
    assert not StepTime(seconds=1e-4, computing=0.0).waits
    assert not measured(partial(compute, 0.0)).waits


def raises() -> None:
    raise ValueError("no")


@pytest.mark.parametrize("function", [raises, sys.exit, partial(os._exit, 3)], ids=["raises", "exits", "dies"])
def test_an_environment_that_fails_is_left_to_the_run(function):
    assert measured(function) is None


def test_a_step_that_does_not_end_is_not_awaited(monkeypatch):
    monkeypatch.setattr(step_time, "PATIENCE_S", 0.5)
    begin = time.monotonic()
    assert measured(partial(time.sleep, 60)) is None
    assert time.monotonic() - begin < 30


@pytest.mark.parametrize(
    "config",
    [
        Config(env="CartPole-v1"),
        Config(env=partial(Stepped, raises), workers=2),
        Config(env=partial(Stepped, raises), envs_per_worker=4),
        Config(env=partial(Stepped, raises), serial=True),
        Config(env=partial(Stepped, raises), preset="none"),
        Config(env="sfactory/CartPole"),
    ],
    ids=["known", "workers", "environments", "serial", "no preset", "native"],
)
def test_nothing_is_measured_where_nothing_is_open(config, monkeypatch):
    monkeypatch.setattr(WorkerProcesses, "start", lambda *_: pytest.fail("a process was started"))
    make_plan(resolve(dataclasses.replace(config, steps=100_000)))


@pytest.mark.parametrize(("cores", "workers"), [(2, 32), (8, 24)])
def test_an_environment_that_waits_has_many_workers_of_one_environment(cores, workers, monkeypatch):
    monkeypatch.setattr("sfactory.config.devices.cores", lambda: cores)
    monkeypatch.setattr("sfactory.runtime.planning.measure_step_time", lambda plan: StepTime(0.005, 0.0))
    plan = make_plan(waiting())
    config = plan.config
    few = make_plan(waiting(workers=2))
    assert (config.workers, config.envs_per_worker, config.runtime.groups) == (workers, 1, 1)
    assert least_max_lag(config, plan.rows) <= least_max_lag(few.config, few.rows)
    (note,) = [note for note in notes_on(plan) if "workers" in note]
    assert note.startswith(f"takes {config.workers} workers, since steps compute for 0% of their 5 ms")


def test_steps_that_compute_in_part_have_as_many_workers_as_keep_the_cores_busy(monkeypatch):
    monkeypatch.setattr("sfactory.config.devices.cores", lambda: 2)
    monkeypatch.setattr("sfactory.runtime.planning.measure_step_time", lambda plan: StepTime(0.005, 0.15))
    assert make_plan(waiting()).config.workers == 14


def test_groups_that_were_asked_for_are_kept(monkeypatch):
    monkeypatch.setattr("sfactory.config.devices.cores", lambda: 2)
    monkeypatch.setattr("sfactory.runtime.planning.measure_step_time", lambda plan: StepTime(0.005, 0.0))
    config = make_plan(waiting(runtime=RuntimeConfig(groups=2))).config
    assert (config.workers, config.envs_per_worker, config.runtime.groups) == (16, 2, 2)


def test_a_bound_on_the_lag_that_many_workers_would_break_is_kept(monkeypatch):
    monkeypatch.setattr("sfactory.config.devices.cores", lambda: 1)
    monkeypatch.setattr("sfactory.runtime.planning.measure_step_time", lambda plan: StepTime(0.005, 0.0))
    plan = make_plan(waiting(rollout=128, loss=LossConfig(max_lag=127)))
    assert least_max_lag(plan.config, plan.rows) == 127
    assert plan.config.workers == 1 and not plan.workers_reason


def test_a_run_with_workers_of_its_own_choice_is_not_told_to_have_more(monkeypatch):
    monkeypatch.setattr("sfactory.runtime.planning.measure_step_time", lambda plan: StepTime(0.005, 0.0))
    assert note_on_slow_steps(make_plan(waiting()), 0.005, 0.01) is None
    assert "--workers" in note_on_slow_steps(make_plan(waiting(workers=2)), 0.005, 0.01)
