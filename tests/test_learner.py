"""The learner on real segments, against the same written out by hand."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from sampling_run import SamplingRun

from perf.learner_numbers import outputs_of
from sfactory.config import Config, LossConfig, ModelConfig, OptimConfig
from sfactory.data.batch import Batch
from sfactory.data.feed import Fresh
from sfactory.distributions import ActionDistribution
from sfactory.learner import Learner
from sfactory.losses import COUNT, EXPLORATION, KL, SUMS
from sfactory.model.critic_units import CriticUnits
from sfactory.objective import Objective
from sfactory.telemetry.events import Progress
from sfactory.vtrace import vtrace

LR, EPS = 1e-3, 1e-5


@pytest.fixture(params=["CartPole-v1", "Pendulum-v1"])
def run(request: pytest.FixtureRequest, tmp_path):
    config = Config(
        env=request.param, preset="none", envs_per_worker=8, rollout=16, batch_size=128, epochs=2,
        optim=OptimConfig(lr=LR),
        loss=LossConfig(entropy_coef=0.01), model=ModelConfig(hidden=(16,)),
    )  # fmt: skip
    made = SamplingRun(config, tmp_path)
    yield made
    made.close()


@pytest.mark.parametrize("plain", [False, True], ids=["compiled", "plain"])
def test_two_epochs_with_fixed_targets_are_those_written_out_by_hand(run: SamplingRun, plain: bool) -> None:
    """In float64: V-trace once with pi_prox / mu, then twice PPO's clipped loss around pi_prox, without the samples
    that lead further from mu, and Adam."""
    learner, model = run.learner, copy.deepcopy(run.training._model).double()
    if plain:
        learner._objective = Objective(learner._config, learner._model.distribution, learner._units)
    batch = learner._feed.assemble(run.sample(learner._feed.per_batch))
    # Another policy sampled.
    batch.log_prob.add_(0.3 * torch.randn(batch.log_prob.shape, generator=torch.Generator().manual_seed(1)))
    distribution, obs = ActionDistribution(model.action), batch.obs[0].flatten(0, 1).double()
    optimizer = torch.optim.Adam(model.parameters(), LR, eps=EPS)

    def forward() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        params, values = (
            head(trunk.encoders[0](obs)) for head, trunk in ((model.policy, model.actor), (model.value, model.critic))
        )
        params, values = (x.unflatten(0, batch.first.shape) for x in (params, values))
        log_prob, entropy = distribution.log_prob_and_entropy(params[:-1], batch.categorical, batch.continuous.double())
        return log_prob, entropy, values

    with torch.no_grad():
        old_log_prob, _, old_values = forward()
    log_weights = old_log_prob - batch.log_prob.double()
    finals = torch.where(batch.final_change.isnan(), old_values[1:], old_values[:-1] + batch.final_change.double())
    arrays = (x.numpy() for x in (log_weights, batch.reward.double(), old_values[:-1], old_values[-1]))
    ends = batch.terminated.numpy(), batch.truncated.numpy()
    vs, advantages = vtrace(*arrays, *ends, finals.numpy(), 0.99, 0.95, rho_bar_pg=np.inf)
    vs, advantages, valid = torch.from_numpy(vs), torch.from_numpy(advantages) / log_weights.exp(), batch.active[:-1]
    kept = advantages[valid]
    advantages = (kept - kept.mean()) / kept.std(correction=0) * log_weights[valid].exp().clamp(max=1.0)
    for _ in range(2):
        log_prob, entropy, values = forward()
        ratio = (log_prob - old_log_prob)[valid].exp()
        shift = (log_prob.detach() - batch.log_prob)[valid].expm1()
        assert shift.abs().mean() / 2 > 0.1  # beyond loss.tv_limit, so that no sample may take it further
        held = torch.where(shift * advantages > 0, 0.0, advantages)
        surrogate = torch.min(ratio * held, ratio.clamp(0.8, 1.2) * held).mean()
        loss = -surrogate + 0.5 * 0.5 * (values[:-1] - vs)[valid].square().mean() - 0.01 * entropy[valid].mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()

    learner._learn(batch)
    assert learner.updates == 2
    for ours, wanted in zip(run.training._model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ours.double(), wanted, rtol=1e-5, atol=2e-6)


class Doubled:
    """The fresh columns twice, the second time with other rewards."""

    def __init__(self, fresh: int, config: Config) -> None:
        self.columns, self.seen = 2 * fresh, 0

    def __call__(self, fresh: Batch) -> Batch:
        self.seen += 1
        return fresh.beside(dataclasses.replace(fresh, reward=fresh.reward + 1.0))


def test_a_batch_source_feeds_the_updates_and_only_fresh_samples_count(tmp_path: Path) -> None:
    config = Config(
        env="CartPole-v1", preset="none", envs_per_worker=8, rollout=16, batch_size=128, batch_source=Doubled,
        model=ModelConfig(normalize_obs=True), optim=OptimConfig(minibatches=4),
    )  # fmt: skip
    run = SamplingRun(config, tmp_path)
    try:
        learner, trained = run.learner, []
        update = learner._update
        learner._update = lambda samples, columns: (trained.append(sum(map(len, columns))), update(samples, columns))[1]
        slots = run.sample(learner._feed.per_batch)
        fresh = int(run.wires.arena.active[slots, :-1].sum())
        learner._train(learner._feed.fresh(slots, learner.updates))
        assert learner._source.seen == 1
        assert trained == [64] * 4, "256 samples in four minibatches"
        assert learner.env_steps == fresh
        assert float(learner._model.normalizer.count) == fresh
    finally:
        run.close()


def test_the_first_batch_is_trained_on_as_normalised_as_all_others(tmp_path) -> None:
    model = ModelConfig(normalize_obs=True)
    config = Config(env="Pendulum-v1", preset="none", envs_per_worker=8, rollout=16, batch_size=128, model=model)
    run, seen = SamplingRun(config, tmp_path), []
    try:
        learner, normalizer = run.learner, run.training._model.normalizer
        learn = learner._learn
        learner._learn = lambda batch: (seen.append(normalizer((batch.obs[0],))[0].std()), learn(batch))
        for _ in range(2):
            learner._train(learner._feed.fresh(run.sample(learner._feed.per_batch), learner.updates))
        assert float(seen[0]) == pytest.approx(1, abs=0.1), "of unlike scales, an angle's and a velocity's"
        assert float(normalizer.count) == pytest.approx(2 * 128, abs=8), "each batch counts once"
    finally:
        run.close()


def test_a_standard_deviation_stays_where_it_has_a_gradient(tmp_path: Path) -> None:
    config = Config(
        env="Pendulum-v1", preset="none", envs_per_worker=8, rollout=16, batch_size=128, optim=OptimConfig(lr=0.1),
        model=ModelConfig(initial_log_std=1.95), loss=LossConfig(entropy_coef=10.0),
    )  # fmt: skip
    run = SamplingRun(config, tmp_path)
    try:
        learner, log_std = run.learner, run.training._model.policy.log_std
        for _ in range(3):
            learner._train(learner._feed.fresh(run.sample(learner._feed.per_batch), learner.updates))
        assert log_std.tolist() == [2.0], "the entropy bonus would raise it for ever"
        assert learner._flat.parameters.eq(2.0).any(), "where the policy workers read it, too"
    finally:
        run.close()


@pytest.fixture
def adapting(tmp_path: Path):
    """A learner whose rate follows a divergence of 0.01."""
    config = Config(
        env="CartPole-v1", preset="none", envs_per_worker=8, rollout=16, batch_size=128,
        optim=OptimConfig(minibatches=2, schedule="adaptive_kl", lr=LR),
    )  # fmt: skip
    run = SamplingRun(config, tmp_path)
    yield run.learner
    run.close()


def sums_of(count: int, kl: float, entropy: float) -> torch.Tensor:
    """Of an update on so many valid samples, and the norm of its gradient."""
    row = torch.zeros(SUMS + 1, dtype=torch.float64)
    row[COUNT], row[KL], row[EXPLORATION] = count, count * kl, count * entropy
    return row


def test_minibatches_count_by_their_valid_samples(adapting: Learner) -> None:
    """One of dead agents alone tells nothing; it would halve the divergence."""

    def learn(batch: Batch) -> None:
        adapting._statistics += [sums_of(60, 0.008, 0.5), sums_of(0, 0.0, 0.0)]
        adapting._batch_statistics.append(torch.zeros(3, dtype=torch.float64))

    events: list[Progress] = []
    adapting._learn, adapting._emit = learn, events.append
    batch = adapting._feed.assemble([0])
    adapting._train(Fresh(batch, 60))
    assert float(adapting._optimizer.lr) == pytest.approx(LR), "0.008 is near enough to 0.01, and 0.004 is not"
    adapting.report()
    assert events[-1].losses["entropy"] == pytest.approx(0.5)
    assert events[-1].losses["kl"] == pytest.approx(0.008)


@pytest.mark.parametrize(
    ("rate", "kl", "next_rate"),
    [
        (1e-3, 0.0, 1.5e-3), (1e-3, 0.01, 1e-3), (1e-3, 0.1, 1e-3 / 1.5), (8e-3, 0.0, 1e-2), (1.2e-6, 0.1, 1e-6),
        (2e-2, 0.0, 2e-2), (2e-2, 0.1, 2e-2 / 1.5), (5e-7, 0.0, 7.5e-7), (5e-7, 0.1, 5e-7),
    ],
)  # fmt: skip
def test_a_rate_moves_towards_its_target_wherever_it_begins(
    adapting: Learner, rate: float, kl: float, next_rate: float
) -> None:
    adapting._optimizer.lr = rate
    adapting._adapt_learning_rate(torch.tensor(kl))
    assert float(adapting._optimizer.lr) == pytest.approx(next_rate)


def normalised_run(folder: Path) -> SamplingRun:
    """Of a task whose returns are far from 0."""
    loss = LossConfig(normalize_returns=True)
    return SamplingRun(
        Config(env="Pendulum-v1", preset="none", envs_per_worker=8, rollout=16, batch_size=128, loss=loss), folder
    )


def test_the_critic_predicts_the_same_returns_when_its_unit_moves(tmp_path) -> None:
    run = normalised_run(tmp_path)
    try:
        learner, units = run.learner, run.learner._units
        batch = learner._feed.assemble(run.sample(learner._feed.per_batch))
        before = units.to_returns(outputs_of(learner, batch).value)
        learner._begin(batch, gradients=False)
        assert float(units.moments.mean) < -10, "Pendulum costs"
        torch.testing.assert_close(units.to_returns(outputs_of(learner, batch).value), before, rtol=1e-4, atol=1e-4)
        unit = run.training._model.unit
        torch.testing.assert_close(unit.mean.double(), units.moments.mean, rtol=1e-6, atol=0)
        again = CriticUnits(copy.deepcopy(run.training._model), normalize=True)
        again.load_state_dict(units.state_dict())
        assert torch.equal(again.to_returns(before), units.to_returns(before))
    finally:
        run.close()


def test_the_values_that_policies_write_are_in_units_of_return(tmp_path) -> None:
    run = normalised_run(tmp_path)
    try:
        learner = run.learner
        learner._train(learner._feed.fresh(run.sample(learner._feed.per_batch), learner.updates))
        for rollout in run.rollouts:
            rollout.poll(0)
        slots = run.sample(learner._feed.per_batch)
        batch = learner._feed.assemble(slots)
        values = learner._units.to_returns(outputs_of(learner, batch).value)[:-1]
        stored = torch.from_numpy(np.concatenate(run.wires.arena.value[slots], 1))[:-1]
        fresh = torch.from_numpy(
            np.concatenate([run.wires.arena.version[slot, :, None] == learner.updates for slot in slots], 1)
        )
        fresh = fresh.repeat_interleave(run.wires.arena.rows, 1)
        assert fresh.any()
        torch.testing.assert_close(values[fresh].float(), stored[fresh], rtol=1e-4, atol=1e-3)
    finally:
        run.close()
