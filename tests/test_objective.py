"""The compiled objective against the one of tensor operations."""

from __future__ import annotations

import math

import pytest
import torch
from gymnasium import spaces

from sfactory.batch import Batch
from sfactory.chunks import Columns
from sfactory.config import Config, LossConfig
from sfactory.losses import Targets
from sfactory.model.normalizer import RunningMeanStd
from sfactory.objective import Objective, valid_samples
from sfactory.objective_cpu import CompiledObjective
from sfactory.spaces import ActionSpec

CPU = torch.device("cpu")
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

    categorical = torch.stack([torch.randint(0, size, (STEPS, width), generator=generator) for size in action.sizes], -1) if k else None
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
        final_value=torch.where(chance(0.5, STEPS, width), normal(STEPS, width), math.nan),
        log_prob=0.3 * normal(STEPS, width) - 2,
        value=normal(STEPS + 1, width),
        categorical=torch.zeros(STEPS, width, 0, dtype=torch.int32) if categorical is None else categorical.int(),
        continuous=normal(STEPS, width, d),
        rnn_state=torch.zeros(width, 0),
        owner=torch.zeros(width, dtype=torch.int32),
    )


def outputs_of(action: ActionSpec, width: int = COLUMNS) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    params = torch.randn(STEPS + 1, width, action.logits + 2 * action.continuous, generator=generator)
    return params, torch.randn(STEPS + 1, width, generator=generator)


def both(algo: str, loss: LossConfig, action: ActionSpec) -> list[Objective]:
    found = []
    for kind in (CompiledObjective, Objective):
        returns = RunningMeanStd() if loss.normalize_returns else None
        if returns is not None:
            returns.update(torch.linspace(-3, 8, 50), torch.ones(50, dtype=torch.bool))
        found.append(kind(Config(env="x", algo=algo, loss=loss), action, returns, CPU))
    return found


def gradients_of(objective: Objective, params, value, batch: Batch, columns: Columns | None = None, fixed: Targets | None = None) -> tuple:
    """Those of all columns or of some, with moments of the advantages."""
    evaluation = objective.evaluate(params, value, batch, batch.all_columns if columns is None else columns, fixed)
    moments = objective.joint([evaluation], fixed is not None)
    return *objective.gradients(evaluation, moments), moments


@pytest.mark.parametrize("columns", [slice(2, 2 + COLUMNS), torch.tensor([7, 0, 4, 5, 8, 1])], ids=["slice", "indices"])
@pytest.mark.parametrize(
    ("space", "masked"), [(space, masked) for space in SPACES for masked in (False, True) if space != "box" or not masked]
)
@pytest.mark.parametrize(("algo", "loss"), LOSSES.values(), ids=LOSSES)
def test_compiled_gradients_are_those_of_tensor_operations(algo: str, loss: LossConfig, space: str, masked: bool, columns) -> None:
    action = ActionSpec.from_space(SPACES[space])
    batch = make_batch(action, masked, COLUMNS + 3)
    params, value = outputs_of(action)
    found = []
    for objective in both(algo, loss, action):
        fixed = objective.gae_targets(batch, outputs_of(action, COLUMNS + 3)[1]) if algo == "ppo" else None
        found.append(gradients_of(objective, params, value, batch, columns, fixed))
    assert found[0][0].any()
    assert found[0][1].any()
    for ours, plain in zip(*found, strict=True):
        torch.testing.assert_close(torch.as_tensor(ours).double(), plain.double(), rtol=1e-4, atol=1e-5)


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
            assert not gradients_of(objective, params, value, batch)[0].isfinite().all()


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
            of_params, of_value, sums, _ = gradients_of(objective, params, value, batch)
            found.append((sums.float(), of_value, of_params[:, [0, 1, 4, 5]]))
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=1e-5, atol=1e-6)
