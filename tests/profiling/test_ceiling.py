"""The ceiling: what is counted, what adds up, and that measuring leaves nothing behind."""

import dataclasses
import multiprocessing

import numpy as np
import pytest
from environments import MODES, Busy, Counting, vector_of
from gymnasium.vector import AutoresetMode
from small_plans import small_config, small_plan

from sfactory.config import ModelConfig, OptimConfig
from sfactory.errors import RunFailed
from sfactory.profiling import ceiling as ceiling_module
from sfactory.profiling.ceiling import Ceiling, measure, measure_ceiling
from sfactory.profiling.workloads import SIMULATION, TRAINING, Workload, inference_workloads, prepare, rows_of

CEILING = Ceiling(3e-6, 1e-6, 4e-6, 4, 1024, "float32", "cpu", "cpu")


@pytest.mark.parametrize(
    ("inference", "learner", "expected"),
    [("cpu", "cpu", 500_000), ("cpu", "cuda", 1_000_000), ("cuda", "cuda", 4 / 3e-6)],
)
def test_cores_pay_for_what_no_gpu_does(inference, learner, expected):
    ceiling = dataclasses.replace(CEILING, inference_device=inference, learner_device=learner)
    assert ceiling.env_steps_per_s == pytest.approx(expected)


class Walled(Counting):
    """Counts the steps and the resets of all its kind."""

    steps = resets = 0

    def reset(self, **kwargs):
        Walled.resets += 1
        return super().reset(**kwargs)

    def step(self, action):
        assert self.count < self.length, "stepped beyond the end of an episode"
        Walled.steps += 1
        return super().step(action)


@pytest.mark.parametrize(
    "env", [Walled, *(vector_of(Walled, mode) for mode in MODES)], ids=["single", *(mode.name for mode in MODES)]
)
def test_simulation_counts_steps_and_begins_new_episodes(env):
    with prepare(small_plan(env), SIMULATION) as repeat:
        Walled.steps = Walled.resets = 0
        counted = sum(repeat() for _ in range(50))
    assert Walled.resets > 0
    assert counted == Walled.steps


@pytest.mark.parametrize("episode_length", [2.5, 3.0])
def test_single_environments_are_reset_as_often_as_in_the_run(episode_length):
    """A policy that ends episodes sooner than random actions do makes the environment's resets count for more."""
    plan = small_plan(Walled, env_kwargs={"longest": 10**9})
    with prepare(plan, Workload("simulation", episode_length=episode_length)) as repeat:
        Walled.steps = Walled.resets = 0
        for _ in range(100):
            repeat()
    assert Walled.steps > 1000
    assert Walled.steps / Walled.resets == pytest.approx(episode_length, rel=0.02)


@pytest.mark.parametrize(
    "env", [Busy, vector_of(Busy, AutoresetMode.SAME_STEP), "sfactory/CartPole", "sfactory/Pendulum"]
)
def test_simulation_acts_as_the_environment_allows(env):
    with prepare(small_plan(env), SIMULATION) as repeat:
        assert sum(repeat() for _ in range(30)) > 0


@pytest.mark.parametrize(
    ("env", "core", "settings"),
    [
        ("sfactory/CartPole", "none", {}),
        ("sfactory/Pendulum", "gru", {"epochs": 2, "optim": OptimConfig(minibatches=2, schedule="linear")}),
        (Busy, "lstm", {"algo": "ppo"}),
    ],
    ids=["plain", "epochs", "everything"],
)
def test_inference_and_training_count_all_their_samples(env, core, settings):
    plan = small_plan(
        env, model=ModelConfig(core=core, hidden=(16,), features=16, core_size=8, normalize_obs=True), **settings
    )
    for workload in inference_workloads(plan):
        with prepare(plan, workload) as repeat:
            assert [repeat() for _ in range(10)] == [rows_of(plan, workload)] * 10
    with prepare(plan, TRAINING) as repeat:
        assert [repeat() for _ in range(3)] == [plan.config.batch_size] * 3


def test_the_learner_trains_on_plausible_samples(monkeypatch):
    """Importance weights far from 1 would be cut by V-trace, and the numbers of a run that has gone wrong cost other
    times."""
    from sfactory.profiling import workloads

    learners, weights = [], []

    class Kept(workloads.Learner):
        def __init__(self, *args):
            super().__init__(*args)
            learners.append(self)

        def _begin(self, batch, gradients):
            chunks, targets, stats = super()._begin(batch, gradients)
            weights.append(targets.log_weights.exp())
            return chunks, targets, stats

    monkeypatch.setattr(workloads, "Learner", Kept)
    with prepare(small_plan("sfactory/CartPole"), TRAINING) as repeat:
        losses = []
        learners[0]._emit = lambda progress: losses.append(progress.losses)
        for _ in range(20):
            repeat()
        learners[0].report()
    losses = [values for values in losses if values]  # the last is empty where a report has just been due
    assert (weights[-1] - 1).abs().max() < 1e-3
    assert np.isfinite(list(losses[-1].values())).all()


def test_a_ceiling_is_measured_and_all_processes_end():
    ceiling = measure_ceiling(small_config("sfactory/CartPole"), 0.3)
    costs = ceiling.simulation_s, ceiling.inference_s, ceiling.training_s
    assert all(0 < cost < 1 for cost in costs)
    assert ceiling.env_steps_per_s == pytest.approx(ceiling.cores / sum(costs))
    assert (ceiling.batch_size, ceiling.precision, ceiling.learner_device) == (64, "float32", "cpu")
    assert not multiprocessing.active_children()


@pytest.mark.parametrize(
    ("changes", "simulating", "cores"), [({"workers": 5}, 5, 2), ({"workers": 1}, 2, 2), ({"serial": True}, 1, 1)]
)
def test_simulation_has_as_many_processes_as_the_run_or_as_there_are_cores(changes, simulating, cores, monkeypatch):
    """Each has a hundred env steps per second, as an environment that waits, and all else a thousand."""
    monkeypatch.setattr("sfactory.config.devices.cores", lambda: 2)

    def measured(plan, seconds, processes):
        return [(100.0 if workload.kind == "simulation" else 1000.0) * processes for workload in seconds]

    monkeypatch.setattr(ceiling_module, "measure", measured)
    ceiling = measure_ceiling(small_config("sfactory/CartPole", **changes), 0.3)
    assert ceiling.cores == cores
    assert cores / ceiling.simulation_s == pytest.approx(100 * simulating)
    assert ceiling.inference_s == ceiling.training_s == pytest.approx(1e-3)


class Falling(Counting):
    """Fails in a few steps."""

    def step(self, action):
        if self.episode > 2:
            raise RuntimeError("fell over")
        return super().step(action)


def test_an_environment_that_raises_ends_the_measurement_with_its_words():
    with pytest.raises(RunFailed, match="fell over"):
        measure(small_plan(Falling), {SIMULATION: 0.2}, 2)
    assert not multiprocessing.active_children()
