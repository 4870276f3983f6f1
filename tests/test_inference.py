"""The policy worker answers the right rows of the right slots, with the newest weights, and tells the right workers."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from arenas import env_spec, make_plane

from sfactory.config import Config, ModelConfig
from sfactory.data.arena import Arena, segment_fields
from sfactory.data.queues import pack_request
from sfactory.data.weights import FlatWeights
from sfactory.distributions import ActionDistribution
from sfactory.inference import PolicyWorker
from sfactory.kernels import Kernels
from sfactory.model import build_model
from sfactory.telemetry.stopwatch import COLUMNS, Stopwatch

CPU = torch.device("cpu")
ROWS, ROLLOUT, SLOTS = 4, 3, 6
POLICY_OF, ROLLOUT_OF = (0, 1, 0, 1, 0), (0, 0, 1, 1, 1)
"""Five groups: 0 and 1 are stepped by rollout worker 0; 0, 2 and 4 are served by policy worker 0."""


class Bench:
    """Policy worker 0 of a run with two of them, a random arena and a copy of its model."""

    def __init__(self, core: str = "none", seed: int = 0) -> None:
        spec = env_spec()
        torch.manual_seed(0)
        model = build_model(spec.observation, spec.action, ModelConfig(hidden=(8,), features=8, core_size=5, core=core))
        self.arena, rng = Arena(segment_fields(spec, model.state_size), SLOTS, ROLLOUT, ROWS), np.random.default_rng(1)
        self.arena.obs[0][:] = rng.integers(0, 255, self.arena.obs[0].shape)
        self.arena.obs[1][:] = rng.standard_normal(self.arena.obs[1].shape)
        self.arena.mask[:] = rng.random(self.arena.mask.shape) < 0.7
        self.arena.mask[..., 0] = True
        self.model = copy.deepcopy(model).eval()
        flat = FlatWeights(copy.deepcopy(model))
        self.plane = make_plane(self.arena, POLICY_OF, ROLLOUT_OF, flat.vector.numel())
        self.publish(0, 1.0)
        kernels = Kernels(Config(env="x"), model.eval(), CPU, None)
        self.worker = PolicyWorker(0, model, kernels, seed, self.plane, Stopwatch(np.zeros(len(COLUMNS))))

    def publish(self, version: int, factor: float) -> None:
        """Multiply all weights and publish them."""
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.mul_(factor)
        self.plane.weights.publish(FlatWeights(copy.deepcopy(self.model)).vector, version)

    def expected(self, slot: int, t: int, state: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
        """Parameters, values and next states of one request's rows."""
        with torch.no_grad():
            return self.model(tuple(torch.from_numpy(leaf[slot, t]) for leaf in self.arena.obs), state)

    def ask(self, *requests: tuple[int, int, int, bool]) -> None:
        self.plane.requests[0].put_many([pack_request(*request) for request in requests])
        self.worker.poll(0)


def test_each_group_is_answered_in_its_slot_and_its_rollout_worker_is_told():
    bench = Bench()
    arena = bench.arena
    untouched = arena.value[[0, 2, 4]].copy()
    requests = [(5, 4, 1, False), (1, 0, 0, False), (3, 2, 2, False)]
    bench.ask(*requests)
    for slot, _, t, _ in requests:
        params, value, _ = bench.expected(slot, t)
        np.testing.assert_allclose(arena.value[slot, t], value, rtol=1e-4, atol=1e-5)
        actions = torch.from_numpy(arena.categorical[slot, t]), torch.from_numpy(arena.continuous[slot, t])
        log_prob = ActionDistribution(bench.model.action).log_prob(
            params, *actions, torch.from_numpy(arena.mask[slot, t])
        )
        np.testing.assert_allclose(arena.log_prob[slot, t], log_prob, rtol=1e-3, atol=1e-4)
        assert arena.version[slot, t] == 0
        assert np.take_along_axis(arena.mask[slot, t], arena.categorical[slot, t], 1).all(), "no masked action"
    assert (arena.value[[0, 2, 4]] == untouched).all()
    assert bench.plane.ready[0].get_many(0) == [0]
    assert sorted(bench.plane.ready[1].get_many(0)) == [2, 4]
    assert len(bench.plane.requests[0]) == 0


def test_an_answer_does_not_depend_on_who_else_asks():
    alone, together = Bench(), Bench()
    for group, slot in ((0, 1), (2, 3), (4, 5)):
        alone.ask((slot, group, 0, False))
    together.ask((1, 0, 0, False), (3, 2, 0, False), (5, 4, 0, False))
    np.testing.assert_allclose(
        alone.arena.value[[1, 3, 5], 0], together.arena.value[[1, 3, 5], 0], rtol=1e-4, atol=1e-6
    )


def test_a_request_for_values_leaves_actions_and_version_alone():
    bench = Bench()
    arena = bench.arena
    arena.categorical[2, 1], arena.continuous[2, 1], arena.log_prob[2, 1], arena.version[2, 1] = 7, 7, 7, 7
    bench.ask((2, 0, 1, True))
    np.testing.assert_allclose(arena.value[2, 1], bench.expected(2, 1)[1], rtol=1e-4, atol=1e-5)
    for array in (arena.categorical, arena.continuous, arena.log_prob, arena.version):
        assert (array[2, 1] == 7).all()
    assert bench.plane.ready[0].get_many(0) == [0]


@pytest.mark.parametrize("core", ["none", "gru"])
def test_a_final_observation_and_the_one_before_are_valued_by_the_same_weights(core: str):
    bench = Bench(core)
    arena = bench.arena
    bench.ask((2, 0, 0, False))
    before, actions, log_prob = (array[2, 0].copy() for array in (arena.value, arena.categorical, arena.log_prob))
    bench.plane.ready[0].get_many(0)
    bench.publish(11, 1.5)
    bench.ask((3, 2, 0, False))
    bench.ask((2, 0, 1, True))
    if core == "none":
        assert not np.allclose(before, bench.expected(2, 0)[1])
        for t in (0, 1):
            np.testing.assert_allclose(arena.value[2, t], bench.expected(2, t)[1], rtol=1e-4, atol=1e-5)
    else:
        assert (arena.value[2, 0] == before).all(), "the state before the step is gone"
    assert (arena.categorical[2, 0] == actions).all() and (arena.log_prob[2, 0] == log_prob).all()
    assert arena.version[2, 0] == 0, "which chose the action"
    assert bench.plane.ready[0].get_many(0) == [0], "the group is answered once"


def test_the_newest_weights_are_used_and_their_version_is_written():
    bench = Bench()
    bench.ask((0, 0, 0, False))
    before = bench.arena.value[0, 0].copy()
    bench.publish(11, 1.5)
    bench.ask((0, 0, 1, False))
    assert bench.arena.version[0].tolist()[:2] == [0, 11]
    np.testing.assert_allclose(bench.arena.value[0, 1], bench.expected(0, 1)[1], rtol=1e-4, atol=1e-5)
    assert not np.allclose(before, bench.expected(0, 0)[1])


def test_equal_seeds_sample_equal_actions_and_others_differ():
    benches = Bench(seed=1), Bench(seed=1), Bench(seed=2)
    for bench in benches:
        bench.ask((0, 0, 0, False))
    actions = [bench.arena.continuous[0, 0] for bench in benches]
    assert np.array_equal(actions[0], actions[1]) and not np.array_equal(actions[0], actions[2])


@pytest.mark.parametrize("core", ["gru", "lstm"])
def test_states_stay_with_their_group_and_begin_anew_with_an_episode(core: str):
    bench = Bench(core)
    arena = bench.arena
    slots = {0: 1, 2: 3}
    arena.first[:] = False
    arena.first[1, 2, 0] = True
    states = {group: torch.zeros(ROWS, bench.model.state_size) for group in slots}
    for t in range(ROLLOUT):
        bench.ask(*((slot, group, t, False) for group, slot in slots.items()))
        for group, slot in slots.items():
            first = torch.from_numpy(arena.first[slot, t])
            states[group] = states[group].masked_fill(first[:, None], 0.0)
            _, value, states[group] = bench.expected(slot, t, states[group])
            np.testing.assert_allclose(arena.value[slot, t], value, rtol=1e-4, atol=1e-5)
        bench.ask((1, 0, t, True))  # a question for values moves no state
    bench.ask((5, 2, 0, False))
    np.testing.assert_allclose(arena.rnn_state[5], states[2], rtol=1e-4, atol=1e-5)
