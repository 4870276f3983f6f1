"""A compiled update is the plain one over many updates, whatever the network, the actions and the objective."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from gymnasium import spaces
from torch import Tensor

from sfactory.config import Config, LossConfig, ModelConfig, OptimConfig
from sfactory.data.batch import Samples
from sfactory.data.examples import example_batch
from sfactory.data.weights import FlatWeights
from sfactory.kernels.comparisons import Use, plain_network, update_parts
from sfactory.kernels.dense_network import DenseNetwork
from sfactory.kernels.objective import CompiledObjective
from sfactory.kernels.update import CompiledUpdate
from sfactory.losses import COUNT, ERROR, ERROR_SQUARES
from sfactory.model import build_model
from sfactory.objective import Objective
from sfactory.spaces import ActionSpec, ObservationSpec
from sfactory.update import Update

VECTOR = spaces.Box(-1, 1, (5,))
MIXED = spaces.Tuple((spaces.Discrete(4), spaces.Box(-1, 1, (2,)), spaces.Discrete(3)))
CASES: dict[str, tuple[spaces.Space, spaces.Space, dict[str, Any], dict[str, Any]]] = {
    "numbers": (VECTOR, MIXED, {"normalize_obs": True}, {}),
    "one trunk": (VECTOR, MIXED, {"shared_critic": True}, {"entropy_coef": 0.02}),
    "categories": (spaces.MultiDiscrete([3, 40]), spaces.Discrete(4), {"activation": "relu"}, {"entropy_coef": 0.02}),
    "both": (spaces.Dict({"a": VECTOR, "b": spaces.Discrete(7)}), MIXED, {"hidden": (33,)}, {"value_clip": 0.1}),
    "spread of its own": (VECTOR, spaces.Box(-1, 1, (3,)), {"adaptive_std": True, "initial_log_std": 1.9}, {}),
    "near the bound": (VECTOR, spaces.Box(-1, 1, (3,)), {"initial_log_std": 2.0}, {}),
    "far from mu": (VECTOR, MIXED, {}, {"tv_limit": 1e-3}),
    "no limit": (VECTOR, MIXED, {}, {"tv_limit": 0.0, "exploration": "kl", "entropy_coef": 0.1}),
}


def make(case: str, compiled: bool, **optim: Any) -> tuple[Update, FlatWeights, Samples]:
    observation, action, model_config, loss = CASES[case]
    config = Config(env="x", loss=LossConfig(normalize_returns=True, **loss), optim=OptimConfig(lr=3e-3, **optim))
    torch.manual_seed(3)
    specs = ObservationSpec.from_space(observation), ActionSpec.from_space(action)
    model = build_model(*specs, ModelConfig(**model_config))
    if model.normalizer is not None:
        batch = example_batch(model.observation, model.action, 0)
        model.normalizer.update(tuple(leaf[:-1] for leaf in batch.obs), batch.active[:-1])
    use = Use(model, config, None, training=True)
    if compiled:
        return update_parts(CompiledUpdate, DenseNetwork, CompiledObjective, use)
    return update_parts(Update, plain_network, Objective, use)


def trained(update: Update, weights: FlatWeights, samples: Samples, updates: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(4)
    rows = []
    for turn in range(updates):
        chosen = torch.randperm(12, generator=generator)[: 6 + turn % 3]
        update.optimizer.lr = 3e-3 / (1 + turn)
        rows.append(update(samples, [chosen]).clone())
    return torch.stack(rows), weights.parameters.detach().clone()


@pytest.mark.parametrize("limit", [0.5, 0.0])
@pytest.mark.parametrize("case", CASES)
def test_many_updates_are_the_plain_ones(case: str, limit: float) -> None:
    plain, fast = (trained(*make(case, compiled, max_grad_norm=limit), 20) for compiled in (False, True))
    size = plain[0].abs()
    size[:, ERROR] = (plain[0][:, COUNT] * plain[0][:, ERROR_SQUARES]).sqrt()  # its terms cancel
    assert ((fast[0] - plain[0]).abs() <= 1e-4 + 1e-3 * size).all()
    torch.testing.assert_close(fast[1], plain[1], rtol=1e-3, atol=2e-4)
    assert not torch.equal(plain[0][0], plain[0][-1])


def test_it_goes_on_from_the_optimizer_s_state() -> None:
    plain, fast = make("numbers", compiled=False), make("numbers", compiled=True)
    trained(*plain, 5)
    fast[1].parameters.detach().copy_(plain[1].parameters.detach())
    fast[0].optimizer.load_state_dict(copy.deepcopy(plain[0].optimizer.state_dict()))
    expected, found = trained(*plain, 5), trained(*fast, 5)
    torch.testing.assert_close(found[1], expected[1], rtol=1e-3, atol=2e-4)
    states = [update.optimizer.state_dict() for update in (plain[0], fast[0])]
    assert states[0]["steps"] == states[1]["steps"] == 10
    torch.testing.assert_close(states[1]["second"], states[0]["second"], rtol=1e-3, atol=1e-6)


def test_what_is_not_finite_is_skipped_and_counted() -> None:
    update, weights, samples = make("numbers", compiled=True)
    before, advantages = weights.parameters.detach().clone(), samples.targets.advantages.clone()
    samples.targets.advantages[:] = math.inf
    for _ in range(2):
        assert not math.isfinite(update(samples, [torch.arange(12)])[-1])
    assert torch.equal(weights.parameters, before)
    assert int(update.skipped) == int(update.skipped_in_a_row) == 2
    assert float(update.optimizer.state_dict()["steps"]) == 0
    samples.targets.advantages[:] = advantages
    update(samples, [torch.arange(12)])
    assert int(update.skipped) == 2 and int(update.skipped_in_a_row) == 0
    assert not torch.equal(weights.parameters, before)


@pytest.mark.parametrize("compiled", [False, True], ids=["plain", "compiled"])
def test_without_a_valid_sample_nothing_moves(compiled: bool) -> None:
    """Adam's momentum would."""
    update, weights, samples = make("numbers", compiled)
    columns = [torch.arange(12)]
    update(samples, columns)
    before, state = weights.parameters.detach().clone(), copy.deepcopy(update.optimizer.state_dict())
    valid = samples.targets.valid.clone()
    samples.targets.valid[:] = False
    row = update(samples, columns)
    assert row[COUNT] == row[-1] == 0
    assert torch.equal(weights.parameters, before)
    assert all(torch.equal(kept, state[name]) for name, kept in update.optimizer.state_dict().items())
    assert int(update.skipped) == int(update.skipped_in_a_row) == 0, "nothing was wrong"
    samples.targets.valid[:] = valid
    update(samples, columns)
    assert not torch.equal(weights.parameters, before)


def test_several_chunks_and_whole_rows_go_the_plain_way() -> None:
    halves = [torch.arange(0, 6), torch.arange(6, 12)]
    (update, weights, samples), (other, others, same) = (make("both", compiled=True) for _ in range(2))
    row, whole = update(samples, halves), other(same, [slice(0, 12)])
    torch.testing.assert_close(row, whole, rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(weights.parameters, others.parameters, rtol=1e-3, atol=1e-4)


def test_it_reads_the_moments_of_the_batch_at_hand() -> None:
    update, _, samples = make("numbers", compiled=True)
    columns, normalizer = [torch.arange(12)], update._network.matrices._normalizer
    update(samples, columns)
    normalizer.update((torch.full((4, 4, 5), 9.0),), torch.ones(4, 4, dtype=torch.bool))
    next_batch = Samples(**vars(samples))
    sums = update.gradient(update.forward(next_batch, columns), next_batch, next_batch.targets)
    torch.testing.assert_close(update(next_batch, columns)[:-1], sums, rtol=1e-5, atol=1e-6)
