"""The objective: what it is at lag 0 and beyond, and the compiled one against the one of tensor operations."""

from __future__ import annotations

import dataclasses
import math
import typing

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn

from sfactory.config import Config, LossConfig
from sfactory.config.declaring import types_of
from sfactory.data.batch import Batch, Samples, Targets
from sfactory.data.chunks import Columns, select_columns
from sfactory.distributions import ActionDistribution
from sfactory.kernels.objective import CompiledObjective, _Outcome
from sfactory.model.critic_units import CriticUnits
from sfactory.model.networks import Outputs
from sfactory.model.normalizer import ValueUnit
from sfactory.objective import ALGOS, OWN_POLICY, Objective, valid_samples
from sfactory.spaces import ActionSpec
from sfactory.vtrace import vtrace

STEPS, COLUMNS = 7, 6
SPACES = {
    "discrete": spaces.Discrete(2),
    "multidiscrete": spaces.MultiDiscrete([3, 5, 2]),
    "box": spaces.Box(-1, 1, (3,)),
    "mixed": spaces.Tuple((spaces.Discrete(4), spaces.Box(-1, 1, (2,)), spaces.Discrete(3))),
}
LOSSES = {
    "default": ("appo", LossConfig()),
    "kl": ("appo", LossConfig(exploration="kl", entropy_coef=0.3, normalize_advantage=False)),
    "impala": ("impala", LossConfig(reward_scale=0.5, reward_clip=0.4, entropy_coef=0.1, lam=0.8)),
    "ppo": ("ppo", LossConfig(value_clip=0.1, entropy_coef=0.1)),
    "normalised": ("appo", LossConfig(normalize_returns=True, rho_bar=1.3, c_bar=0.7, rho_bar_pg=0.9)),
}


def make_batch(action: ActionSpec, masked: bool, width: int = COLUMNS) -> Batch:
    generator = torch.Generator().manual_seed(0)
    k, d = len(action.sizes), action.continuous

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    def chance(p: float, *shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=generator) < p

    categorical = (
        torch.stack([torch.randint(0, size, (STEPS, width), generator=generator) for size in action.sizes], -1)
        if k
        else None
    )
    mask = None
    if masked:
        mask = chance(0.6, STEPS + 1, width, action.logits)
        mask[:, 1] = False  # which counts as allowing everything
        begin = 0
        for i, size in enumerate(action.sizes):  # what was done was allowed
            mask[:-1].scatter_(2, begin + categorical[..., i : i + 1], True)
            begin += size
    ends = chance(0.15, 2, STEPS, width)
    return Batch(
        obs=(normal(STEPS + 1, width, 2),),
        mask=mask,
        first=chance(0.1, STEPS + 1, width),
        active=chance(0.85, STEPS + 1, width),
        reward=normal(STEPS, width),
        terminated=ends[0],
        truncated=ends[1],
        final_change=torch.where(chance(0.5, STEPS, width), normal(STEPS, width), math.nan),
        log_prob=0.3 * normal(STEPS, width) - 2,
        categorical=torch.zeros(STEPS, width, 0, dtype=torch.int32) if categorical is None else categorical.int(),
        continuous=normal(STEPS, width, d),
        rnn_state=torch.zeros(width, 0),
        owner=torch.zeros(width, dtype=torch.int32),
    )


def outputs_of(action: ActionSpec, width: int = COLUMNS) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    params = torch.randn(STEPS + 1, width, action.logits + 2 * action.continuous, generator=generator)
    return params, torch.randn(STEPS + 1, width, generator=generator)


class Critic(nn.Module):
    """As much of a model as the critic's units need."""

    def __init__(self) -> None:
        super().__init__()
        self.unit = ValueUnit()


def both(algo: str, loss: LossConfig, action: ActionSpec) -> list[Objective]:
    found = []
    for kind in (CompiledObjective, Objective):
        units = CriticUnits(Critic(), loss.normalize_returns)
        units.update(torch.linspace(-3, 8, 50), torch.ones(50, dtype=torch.bool))
        found.append(kind(Config(env="x", algo=algo, loss=loss), ActionDistribution(action), units))
    return found


def targets_of(objective: Objective, params: torch.Tensor, value: torch.Tensor, batch: Batch) -> Targets:
    """By two chunks."""
    chunks = []
    for columns in (slice(0, 2), slice(2, params.shape[1])):
        densities = objective.evaluate_actions(Outputs(params[:, columns], value[:, columns]), batch, columns)
        chunks.append(objective.estimate(densities, batch, columns))
    return objective.targets(chunks)[0]


def gradients_of(
    objective: Objective, params, value, samples: Batch | Samples, targets: Targets, columns: Columns
) -> tuple:
    """Gradients and sums of some columns."""
    densities = objective.evaluate_actions(Outputs(params, value), samples, columns)
    totals = objective.totals(densities, targets, columns)
    return objective.gradients(densities, samples, targets, columns, totals)[:3]


def at_once(objective: Objective, params, value, batch: Batch) -> tuple:
    """Targets and gradients of the same policy on the whole batch."""
    return gradients_of(objective, params, value, batch, targets_of(objective, params, value, batch), batch.all_columns)


def test_every_algorithm_has_its_meaning() -> None:
    assert tuple(ALGOS) == typing.get_args(types_of(Config)["algo"])


@pytest.mark.parametrize("columns", [slice(2, 2 + COLUMNS), torch.tensor([7, 0, 4, 5, 8, 1])], ids=["slice", "indices"])
@pytest.mark.parametrize(
    ("space", "masked"),
    [(space, masked) for space in SPACES for masked in (False, True) if space != "box" or not masked],
)
@pytest.mark.parametrize(("algo", "loss"), LOSSES.values(), ids=LOSSES)
def test_compiled_targets_and_gradients_are_those_of_tensor_operations(
    algo: str, loss: LossConfig, space: str, masked: bool, columns
) -> None:
    action = ActionSpec.from_space(SPACES[space])
    batch = make_batch(action, masked, COLUMNS + 3)
    old, noise = outputs_of(action, COLUMNS + 3), torch.Generator().manual_seed(6)
    params, value = (select_columns(x, columns, 1) for x in old)
    params, value = (x + 0.1 * torch.randn(x.shape, generator=noise) for x in (params, value))  # of the new policy
    found = []
    for objective in both(algo, loss, action):
        targets = targets_of(objective, *old, batch)
        of_batch = gradients_of(objective, params, value, batch, targets, columns)
        samples = batch.samples(targets, single=False)
        of_samples = gradients_of(objective, params[:-1], value[:-1], samples, targets, columns)
        found.append((*vars(targets).values(), *of_batch, *of_samples))
        assert not of_batch[0][-1].any() and not of_batch[1][-1].any(), "row T has no sample"
    assert found[0][5].any() and found[0][6].any()
    for ours, plain in zip(*found, strict=True):
        torch.testing.assert_close(torch.as_tensor(ours).double(), plain.double(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", [0, 1], ids=["compiled", "plain"])
@pytest.mark.parametrize("space", SPACES)
def test_at_lag_zero_it_is_ppo_with_the_targets_of_vtrace(space: str, kind: int) -> None:
    """By hand in float64: with weights 1 the targets are V-trace's, and the loss is PPO's with normalised
    advantages."""
    action = ActionSpec.from_space(SPACES[space])
    loss = LossConfig(entropy_coef=0.02, value_coef=0.7, tv_limit=0.0)
    batch = make_batch(action, masked=False)
    old_params, old_value = outputs_of(action)
    old_params *= 0.3  # log-probabilities of a size that float32 resolves
    distribution = ActionDistribution(action)
    taken = batch.categorical, batch.continuous
    objective = both("appo", loss, action)[kind]
    sampled = objective.evaluate_actions(Outputs(old_params, old_value), batch, batch.all_columns).log_prob
    batch = dataclasses.replace(batch, log_prob=torch.as_tensor(sampled).detach())
    params = old_params + 0.1 * torch.randn(old_params.shape, generator=torch.Generator().manual_seed(2))
    value = old_value + 0.3
    targets = targets_of(objective, old_params, old_value, batch)
    of_params, of_value, _ = gradients_of(objective, params, value, batch, targets, batch.all_columns)

    valid = valid_samples(batch)
    finals = torch.where(batch.final_change.isnan(), old_value[1:], old_value[:-1] + batch.final_change)
    arrays = [x.double().numpy() for x in (torch.zeros(STEPS, COLUMNS), batch.reward, old_value[:-1], old_value[-1])]
    vs, advantages = vtrace(
        *arrays, batch.terminated.numpy(), batch.truncated.numpy(), finals.double().numpy(), loss.gamma, loss.lam
    )
    vs, advantages = torch.from_numpy(vs), torch.from_numpy(advantages)[valid]
    advantages = (advantages - advantages.mean()) / advantages.std(correction=0)
    new, old = params.double().requires_grad_(), old_params.double()
    v = value.double().requires_grad_()
    log_prob, entropy = distribution.log_prob_and_entropy(new[:-1], taken[0], taken[1].double())
    ratio = (log_prob - distribution.log_prob(old[:-1], taken[0], taken[1].double()))[valid].exp()
    surrogate = torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean()
    (-surrogate + 0.7 * 0.5 * (v[:-1] - vs)[valid].square().mean() - 0.02 * entropy[valid].mean()).backward()
    torch.testing.assert_close(targets.returns[valid].double(), vs[valid], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(targets.advantages[valid].double(), advantages, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(of_params.double(), new.grad, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(of_value.double(), v.grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", [0, 1], ids=["compiled", "plain"])
@pytest.mark.parametrize("algo", ["appo", "impala"])
@pytest.mark.parametrize(
    ("space", "masked"), [("discrete", True), ("multidiscrete", True), ("box", False), ("mixed", True)]
)
def test_a_sample_that_the_proximal_policy_would_never_take_has_no_gradient(
    space: str, masked: bool, algo: str, kind: int
) -> None:
    """Its weight underflows to 0; no shift of the advantages may give it one of its own."""
    action = ActionSpec.from_space(SPACES[space])
    batch = make_batch(action, masked)
    params, value = outputs_of(action)
    batch.log_prob[2:4] = 200.0  # mu took them almost surely, whatever pi says
    batch.reward[2:4] = torch.tensor([[1e6], [-1e6]])
    objective = both(algo, LossConfig(tv_limit=0.0), action)[kind]
    targets = targets_of(objective, params, value, batch)
    of_params, of_value, _ = gradients_of(objective, params, value, batch, targets, batch.all_columns)
    assert not of_params[2:4].any()
    assert not of_value[2:4].any()
    assert of_params[:2].any() and of_params[4:].any()


def test_neither_the_order_of_columns_nor_their_chunks_matter() -> None:
    action = ActionSpec.from_space(SPACES["mixed"])
    batch, (params, value) = make_batch(action, masked=True), outputs_of(action)
    order = torch.tensor([3, 5, 0, 1, 4, 2])
    for objective in both("appo", LossConfig(), action):
        targets = targets_of(objective, params, value, batch)
        permuted = targets_of(objective, params[:, order], value[:, order], batch.select(order))
        for name, expected in vars(targets.select(order)).items():
            torch.testing.assert_close(getattr(permuted, name), expected, rtol=1e-6, atol=1e-6)
        single = batch.samples(targets, single=True)
        flat = [x[:-1].flatten(0, 1)[None] for x in (params, value)]
        of_single = gradients_of(objective, *flat, single, single.targets, slice(0, STEPS * COLUMNS))
        of_params, of_value, sums = gradients_of(objective, params, value, batch, targets, batch.all_columns)
        torch.testing.assert_close(of_single[0].reshape(STEPS, COLUMNS, -1), of_params[:-1], rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(of_single[1].reshape(STEPS, COLUMNS), of_value[:-1], rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(torch.as_tensor(of_single[2]), torch.as_tensor(sums), rtol=1e-6, atol=1e-6)


def test_numbers_that_are_not_finite_do_not_vanish() -> None:
    """The learner skips an update whose gradient is not finite; so it has to see it."""
    action = ActionSpec.from_space(SPACES["mixed"])
    batch = make_batch(action, masked=True)
    t, b = valid_samples(batch).nonzero()[0].tolist()
    for place in range(action.logits + 2 * action.continuous):
        params, value = outputs_of(action)
        params[t, b, place] = math.nan
        for objective in both("appo", LossConfig(), action):
            if place < action.logits and not batch.mask[t, b, place]:
                continue
            assert not at_once(objective, params, value, batch)[0].isfinite().all()


def test_what_happened_in_invalid_samples_does_not_matter() -> None:
    action = ActionSpec.from_space(SPACES["mixed"])
    batch = make_batch(action, masked=False)
    batch.owner[3] = 1
    batch.active[:, 2] = False
    found = []
    for garbage in (0.0, math.nan, math.inf):
        params, value = outputs_of(action)
        for column in (2, 3):
            params[:, column], value[:, column] = garbage, garbage
            batch.reward[:, column] = batch.log_prob[:, column] = garbage
        for objective in both("appo", LossConfig(entropy_coef=0.1), action):
            of_params, of_value, sums = at_once(objective, params, value, batch)
            found.append((torch.as_tensor(sums).float(), of_value, of_params[:, [0, 1, 4, 5]]))
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", [0, 1], ids=["compiled", "plain"])
@pytest.mark.parametrize("space", SPACES)
def test_a_policy_that_is_far_from_the_one_that_sampled_goes_no_further(space: str, kind: int) -> None:
    """Samples whose gradient would take it there have none; others keep theirs, as all do of a policy that is near."""
    action = ActionSpec.from_space(SPACES[space])
    batch, (params, value) = make_batch(action, masked=False), outputs_of(action)
    found = {}
    for limit in (0.0, 1e-3, 1e3):
        objective = both("appo", LossConfig(tv_limit=limit), action)[kind]
        targets = targets_of(objective, params, value, batch)
        densities = objective.evaluate_actions(Outputs(params, value), batch, batch.all_columns)
        totals = objective.totals(densities, targets, batch.all_columns)
        found[limit] = objective.gradients(densities, batch, targets, batch.all_columns, totals)
    for of_open, of_near in zip(found[0.0][:3], found[1e3][:3], strict=True):
        torch.testing.assert_close(of_open, of_near, rtol=0, atol=0)
    departs = (targets.log_weights * targets.advantages > 0) & targets.valid
    assert 0 < departs.float().mean() < 1
    assert not found[1e-3].params[:-1][departs].any()
    stays = targets.valid & ~departs
    torch.testing.assert_close(found[1e-3].params[:-1][stays], found[0.0].params[:-1][stays], rtol=0, atol=0)
    torch.testing.assert_close(found[1e-3].value, found[0.0].value, rtol=0, atol=0)


@pytest.mark.parametrize("kind", [0, 1], ids=["compiled", "plain"])
def test_the_shift_is_counted_over_all_valid_samples_of_a_minibatch(kind: int) -> None:
    action = ActionSpec.from_space(SPACES["mixed"])
    batch, (params, value) = make_batch(action, masked=True), outputs_of(action)
    objective = both("appo", LossConfig(), action)[kind]
    targets = targets_of(objective, params, value, batch)
    moved = params + 0.1

    def totals(columns: slice) -> torch.Tensor:
        return objective.totals(
            objective.evaluate_actions(Outputs(moved[:, columns], value[:, columns]), batch, columns), targets, columns
        )

    log_prob = torch.as_tensor(
        objective.evaluate_actions(Outputs(moved, value), batch, batch.all_columns).log_prob
    ).detach()
    expected = (log_prob - batch.log_prob).double().expm1().abs()[targets.valid].sum()
    torch.testing.assert_close(totals(batch.all_columns)[1], expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(totals(slice(0, 2)) + totals(slice(2, COLUMNS)), totals(batch.all_columns))


@pytest.mark.parametrize(
    ("change", "begins"),
    [
        ({}, True),
        ({"terminated": "one"}, False),
        ({"truncated": "none"}, False),
        ({"reward": "alike"}, False),
        ({"normalize_returns": False}, False),
        ({"gamma": 1.0}, False),
    ],
)
def test_a_critic_begins_at_the_mean_reward_of_a_task_that_time_alone_cuts_off(change: dict, begins: bool) -> None:
    action = ActionSpec.from_space(SPACES["discrete"])
    batch = make_batch(action, masked=False)
    batch.terminated[:] = False
    batch.truncated[3] = batch.active[:] = True
    batch.reward[0, 0], batch.active[0, 0] = math.nan, False  # a sample that is not valid tells nothing
    if change.get("terminated"):
        batch.terminated[2, 2] = True
    if change.get("truncated"):
        batch.truncated[:] = False
    if change.get("reward"):
        batch.reward[1:] = -1.0
    loss = LossConfig(normalize_returns=change.get("normalize_returns", True), gamma=change.get("gamma", 0.9))
    units = CriticUnits(Critic(), loss.normalize_returns)
    Objective(Config(env="x", loss=loss), ActionDistribution(action), units).begin_critic(batch)
    mean = batch.reward[valid_samples(batch)].double().mean()
    assert units.to_returns(torch.zeros(1)).item() == pytest.approx(10 * mean.item() if begins else 0.0)
    if loss.normalize_returns:
        units.update(torch.tensor([3.0, 5.0]), torch.ones(2, dtype=torch.bool))
        assert units.moments.mean.item() == 4.0, "what it then learns of counts alone"


@pytest.mark.parametrize("kind", [CompiledObjective, Objective])
def test_a_truncation_is_bootstrapped_by_the_present_critic(kind: type[Objective]) -> None:
    """The critic that sampled was at 0; the one that learns begins at the mean reward over 1 - gamma."""
    action, gamma = ActionSpec.from_space(SPACES["discrete"]), 0.9
    batch = make_batch(action, masked=False)
    batch.terminated[:] = False
    batch.truncated[3] = batch.active[:] = True
    batch.reward.sub_(20)
    batch.final_change[:] = 0.25
    units = CriticUnits(Critic(), True)
    objective = kind(Config(env="x", loss=LossConfig(gamma=gamma)), ActionDistribution(action), units)
    objective.begin_critic(batch)
    params, value = outputs_of(action)
    densities = objective.evaluate_actions(Outputs(params, torch.zeros_like(value)), batch, batch.all_columns)
    estimates = objective.estimate(densities, batch, batch.all_columns)
    begun = 10 * batch.reward.double().mean().item()
    expected = batch.reward[3] + gamma * (begun + 0.25) - begun
    assert begun < -150
    torch.testing.assert_close(estimates.advantages[3], expected, rtol=0, atol=1e-3)


def test_what_has_no_time_dimension_is_not_cut_to_the_steps() -> None:
    """A segment may have fewer steps than columns."""
    action = ActionSpec.from_space(SPACES["discrete"])
    batch = make_batch(action, masked=False, width=2 * STEPS)
    batch.owner[STEPS:] = OWN_POLICY + 1
    for objective in both("appo", LossConfig(), action):
        outputs = Outputs(*outputs_of(action, 2 * STEPS))
        densities = objective.evaluate_actions(outputs, batch, batch.all_columns)
        valid = objective.estimate(densities, batch, batch.all_columns).valid
        assert torch.equal(valid, valid_samples(batch)) and not valid[:, STEPS:].any()
        if isinstance(objective, CompiledObjective):
            (owner,) = [x for x in objective.arrays(_Outcome, batch) if x.dtype == np.int32]
            assert owner.shape == (2 * STEPS,)
