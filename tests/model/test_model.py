"""Models: one step and the unrolled segment agree, cores match torch's, user parts are checked, moments are right."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor, nn

from sfactory.config import ModelConfig
from sfactory.config.importing import load_object
from sfactory.distributions import ActionDistribution
from sfactory.errors import ConfigError
from sfactory.model import (
    Core,
    GRUCore,
    LSTMCore,
    ObservationNormalizer,
    RunningMeanStd,
    build_model,
    build_uninitialized,
)
from sfactory.model.encoders import NatureCNN
from sfactory.model.heads import PolicyHead
from sfactory.model.normalizer import merge_moments
from sfactory.spaces import ActionSpec, Leaf, ObservationSpec

STEPS, ROWS = 6, 3
OBSERVATIONS = {
    "vector": spaces.Box(-np.inf, np.inf, (5,)),
    "image_chw": spaces.Box(0, 255, (4, 40, 44), np.uint8),
    "image_hwc": spaces.Box(0, 255, (36, 40, 3), np.uint8),
    "grid": spaces.Box(0, 255, (7, 7, 3), np.uint8),
    "ids": spaces.Box(0, 10, (7, 7, 3), np.uint8),
    "ids_chw": spaces.MultiDiscrete(np.full((2, 9, 9), 4)),
    "cells": spaces.Dict({"agent": spaces.Box(0, 4, (2,), int), "target": spaces.Box(-2, 2, (2,), int)}),
    "small": spaces.Box(0, 255, (3, 28, 20), np.uint8),
    "float_image": spaces.Box(0, 1, (3, 12, 12), np.float32),
    "discrete": spaces.Discrete(6, start=2),
    "multidiscrete": spaces.MultiDiscrete([[2, 3], [4, 2]]),
    "bits": spaces.MultiBinary(5),
    "dict": spaces.Dict(
        {"screen": spaces.Box(0, 255, (7, 9, 1), np.uint8), "pos": spaces.Box(-1, 1, (2,)), "level": spaces.Discrete(3)}
    ),
}
ACTION = ActionSpec.from_space(spaces.Tuple((spaces.Discrete(3), spaces.Box(-1, 1, (2,)))))


def _observations(spec: ObservationSpec, *shape: int, seed: int = 0) -> tuple[Tensor, ...]:
    rng = np.random.default_rng(seed)

    def draw(leaf: Leaf) -> np.ndarray:
        if leaf.sizes:
            return rng.integers(0, np.reshape(leaf.sizes, leaf.shape), (*shape, *leaf.shape)).astype(leaf.dtype)
        if leaf.dtype == np.uint8:
            return rng.integers(0, leaf.high + 1, (*shape, *leaf.shape)).astype(np.uint8)
        return rng.normal(2.0, 3.0, (*shape, *leaf.shape)).astype(np.float32)

    return tuple(torch.from_numpy(np.ascontiguousarray(draw(leaf))) for leaf in spec.leaves)


def _model(observation: spaces.Space, seed: int = 0, action: ActionSpec = ACTION, **config: Any) -> nn.Module:
    torch.manual_seed(seed)
    return build_model(
        ObservationSpec.from_space(observation), action, ModelConfig(**{"features": 16, "core_size": 8, **config})
    )


def _step_through(
    model: nn.Module, obs: tuple[Tensor, ...], first: Tensor, state: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Unroll by `forward`, as policy workers do."""
    params, values = [], []
    for t in range(len(first)):
        state = None if state is None else state * (~first[t]).unsqueeze(-1)
        p, v, state = model(tuple(leaf[t] for leaf in obs), state)
        params.append(p)
        values.append(v)
    return torch.stack(params), torch.stack(values)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("core", ["none", "gru", "lstm"])
@pytest.mark.parametrize(
    ("kind", "encoder"),
    [
        *((kind, "auto") for kind in OBSERVATIONS),
        ("image_chw", "impala_resnet"),
        ("grid", "impala_resnet"),
        ("ids", "impala_resnet"),
        ("grid", "mlp"),
        ("ids", "mlp"),
        ("dict", "mlp"),
    ],
)
def test_steps_and_unroll_agree(kind: str, encoder: str, core: str, shared: bool) -> None:
    model = _model(
        OBSERVATIONS[kind], encoder=encoder, core=core, core_layers=2, shared_critic=shared, normalize_obs=True
    )
    obs = _observations(model.observation, STEPS, ROWS)
    if model.normalizer is not None:
        model.normalizer.update(obs, torch.ones(STEPS, ROWS, dtype=torch.bool))
    first = torch.zeros(STEPS, ROWS, dtype=torch.bool)
    first[0, 0] = first[2, 1] = first[4, :] = True
    state = torch.randn(ROWS, model.state_size) if model.state_size else None
    assert model.state_size == {"none": 0, "gru": 16, "lstm": 32}[core] * (1 if shared else 2)
    with torch.no_grad():
        model.policy.linear.weight.mul_(100)  # out of the near-uniform start, where every policy looks alike
        params, values = model.unroll(obs, first, state)
        expected_params, expected_values = _step_through(model, obs, first, state)
    assert params.shape == (STEPS, ROWS, 3 + 2 * 2)
    assert values.shape == (STEPS, ROWS)
    torch.testing.assert_close(params, expected_params, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(values, expected_values, rtol=1e-5, atol=1e-5)
    assert params[..., :3].std() > 1e-3


@pytest.mark.parametrize("core", ["gru", "lstm"])
def test_no_memory_crosses_an_episode_start(core: str) -> None:
    model = _model(OBSERVATIONS["vector"], core=core)
    obs = _observations(model.observation, STEPS, ROWS)
    first = torch.zeros(STEPS, ROWS, dtype=torch.bool)
    first[3] = True
    x = obs[0].clone().requires_grad_()
    _, values = model.unroll((x,), first, torch.randn(ROWS, model.state_size))
    values[3:].sum().backward()
    assert (x.grad[:3] == 0).all()
    assert (x.grad[3:] != 0).any()
    torch.testing.assert_close(
        values[3:], model.unroll((obs[0][3:],), first[3:], torch.zeros(ROWS, model.state_size))[1]
    )


@pytest.mark.parametrize(("core", "reference"), [(GRUCore, nn.GRU), (LSTMCore, nn.LSTM)])
@pytest.mark.parametrize("layers", [1, 2])
def test_cores_take_the_weights_of_torch_and_match_it(
    core: type[Core], reference: type[nn.RNNBase], layers: int
) -> None:
    torch.manual_seed(0)
    theirs = reference(4, 5, layers).double()
    ours = core(4, 5, layers).double()
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(STEPS, ROWS, 4, dtype=torch.float64)
    started = torch.zeros(STEPS, ROWS, dtype=torch.bool)
    start = torch.zeros(ROWS, ours.state_size, dtype=torch.float64)
    torch.testing.assert_close(ours.unroll(x, started, start), theirs(x)[0])


@pytest.mark.parametrize("kind", ["image_chw", "image_hwc", "grid", "vector", "dict"])
@pytest.mark.parametrize("core", ["none", "lstm"])
def test_bfloat16_stays_close_and_gives_float32(kind: str, core: str) -> None:
    model = _model(OBSERVATIONS[kind], core=core)
    obs, first = _observations(model.observation, STEPS, ROWS), torch.zeros(STEPS, ROWS, dtype=torch.bool)
    state = torch.zeros(ROWS, model.state_size) if model.state_size else None
    with torch.no_grad():
        exact = model.unroll(obs, first, state)
        with torch.autocast("cpu", torch.bfloat16):
            params, values = model.unroll(obs, first, state)
            one = model(tuple(leaf[0] for leaf in obs), state)
    assert params.dtype == values.dtype == one[0].dtype == one[1].dtype == torch.float32
    assert one[2] is None or one[2].dtype == torch.float32
    torch.testing.assert_close((params, values), exact, rtol=0.05, atol=0.05)
    assert not torch.equal(values, exact[1])


@pytest.mark.parametrize(
    ("shape", "strides"),
    [
        ((4, 84, 84), [(4, 4), (2, 2), (1, 1)]), ((3, 28, 28), [(2, 2), (2, 2), (1, 1)]),
        ((7, 9, 1), [(2, 2), (1, 1), (1, 1)]), ((7, 7, 3), [(1, 1), (1, 1), (1, 1)]),
        ((40, 4, 10), [(2, 2), (2, 2), (2, 1)]),
    ],
)  # fmt: skip
def test_no_convolution_strides_along_a_side_of_one_pixel(shape: tuple[int, ...], strides: list) -> None:
    (leaf,) = ObservationSpec.from_space(spaces.Box(0, 255, shape, np.uint8)).leaves
    encoder, x = NatureCNN(leaf, 8), torch.randint(0, 256, (3, *shape), dtype=torch.uint8)
    assert [convolution.stride for convolution in encoder.convolutions] == strides
    features = encoder(x)
    for convolution in encoder.convolutions:
        convolution.stride = max(convolution.stride)
    torch.testing.assert_close(encoder(x), features)  # so a checkpoint with such strides computes the same


@pytest.mark.parametrize("kind", ["image_chw", "image_hwc"])
def test_pixels_are_scaled_to_one(kind: str) -> None:
    """uint8 pixels give the same features as the image divided by 255 through the unscaled layers."""
    model = _model(OBSERVATIONS[kind])
    encoder = model.actor.encoders[0]
    (pixels,) = _observations(model.observation, ROWS)
    x = pixels.float() / 255
    x = x.permute(0, 3, 1, 2) if kind == "image_hwc" else x
    for convolution in encoder.convolutions:
        x = torch.conv2d(x, convolution.weight, convolution.bias, convolution.stride).relu()
    expected = encoder.linear(x.permute(0, 2, 3, 1).flatten(1)).relu()
    torch.testing.assert_close(encoder(pixels), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["ids", "ids_chw"])
def test_an_image_of_categories_has_a_plane_for_each(kind: str) -> None:
    model = _model(OBSERVATIONS[kind])
    first, (ids,) = model.actor.encoders[0].convolutions[0], _observations(model.observation, ROWS)
    hot = torch.nn.functional.one_hot(ids.long(), first.categories).float()
    order = (0, 3, 4, 1, 2) if kind == "ids" else (0, 1, 4, 2, 3)
    planes = hot.permute(*order).flatten(1, 2)
    expected = torch.conv2d(planes, first.weight, first.bias, first.stride, first.padding)
    torch.testing.assert_close(first(ids), expected, rtol=1e-4, atol=1e-5)


def test_one_mlp_reads_all_leaves_but_images_numbers_first() -> None:
    model = _model(OBSERVATIONS["dict"], hidden=())
    flat, image = model.actor.encoders
    assert (type(image).__name__, model.actor._reads) == ("NatureCNN", [(0, 1), (2,)])
    position, level = torch.tensor([[0.5, -2.0]]), torch.tensor([1], dtype=torch.int32)
    assert flat(level, position).tolist() == [[0.5, -2.0, 0.0, 1.0, 0.0]]


def test_categories_enter_one_hot_and_bits_as_they_are() -> None:
    model = _model(OBSERVATIONS["multidiscrete"], hidden=())
    leaf = torch.tensor([[[1, 2], [3, 0]]], dtype=torch.int32)
    assert model.actor.encoders[0](leaf).tolist() == [[0, 0.5, 0, 0, 0.5, 0, 0, 0, 0.5, 0.5, 0]]
    bits = _model(OBSERVATIONS["bits"], hidden=())
    assert bits.actor.encoders[0](torch.tensor([[1, 0, 1, 1, 0]], dtype=torch.uint8)).tolist() == [[1, 0, 1, 1, 0]]


def test_several_leaves_are_merged_as_wide_as_features_only_where_one_is_an_image() -> None:
    vectors, image = (
        spaces.Tuple((spaces.Box(-1, 1, (3,)), spaces.Discrete(4))),
        spaces.Box(0, 255, (1, 12, 12), np.uint8),
    )
    assert _model(vectors, features=512, hidden=(48, 24)).actor.out_features == 24
    assert _model(vectors, features=512, hidden=()).actor.out_features == 3 + 4, "as they are"
    assert _model(spaces.Tuple((*vectors, image)), features=512).actor.out_features == 512


def test_image_features_without_bound_do_not_saturate_the_layer_that_merges_them() -> None:
    observation = spaces.Dict(image=spaces.Box(0, 255, (3, 36, 36), np.uint8), health=spaces.Box(0, 100, (1,)))
    model = _model(observation, activation="tanh")
    encoder = next(encoder for encoder in model.actor.encoders if hasattr(encoder, "linear"))
    obs, norms = _observations(model.observation, 8), []
    for scale in (1.0, 1000.0):
        encoder.linear.weight.data *= scale
        params, value, _ = model(obs)
        (gradient,) = torch.autograd.grad(params.sum() + value.sum(), encoder.linear.weight)
        norms.append(gradient.norm())
    assert norms[1] > 0.3 * norms[0]


def test_initial_policy_is_near_uniform_with_the_given_std() -> None:
    for adaptive in (False, True):
        model = _model(OBSERVATIONS["vector"], adaptive_std=adaptive, initial_log_std=-0.7)
        params, _, _ = model(_observations(model.observation, 8))
        assert params[:, :5].abs().max() < 0.1
        torch.testing.assert_close(params[:, 5:], torch.full((8, 2), -0.7), atol=0.1, rtol=0)
        assert bool((params[:, 5:] == params[0, 5:]).all()) is not adaptive


def test_the_weights_of_hidden_layers_are_orthogonal_unless_they_are_soon_replaced() -> None:
    asked = (ObservationSpec.from_space(OBSERVATIONS["vector"]), ACTION, ModelConfig(hidden=(16, 16)))
    model, other = build_model(*asked), build_uninitialized(*asked)
    for made, is_orthogonal in ((model, True), (other, False)):
        weights = [part.weight for part in made.modules() if isinstance(part, nn.Linear) and part.out_features == 16]
        assert weights
        for weight in weights:
            narrow = weight if weight.shape[0] <= weight.shape[1] else weight.T
            assert torch.allclose(narrow @ narrow.T, 2 * torch.eye(len(narrow)), atol=1e-5) == is_orthogonal
    other.load_state_dict(model.state_dict())
    assert all(map(torch.equal, model.state_dict().values(), other.state_dict().values()))


@pytest.mark.parametrize("core", ["gru", "lstm"])
def test_the_weights_of_cores_are_orthogonal_unless_they_are_soon_replaced(core: str) -> None:
    asked = (ObservationSpec.from_space(OBSERVATIONS["vector"]), ACTION, ModelConfig(core=core, core_size=16))
    for made, is_orthogonal in ((build_model(*asked), True), (build_uninitialized(*asked), False)):
        weights = [weight for name, weight in made.state_dict().items() if "weight_hh" in name]
        assert weights
        for gate in torch.cat(weights).split(16):
            assert gate.isfinite().all()
            assert torch.allclose(gate @ gate.T, torch.eye(16), atol=1e-5) == is_orthogonal


def test_the_policy_std_is_bounded() -> None:
    model = _model(OBSERVATIONS["vector"], initial_log_std=100.0)
    assert model(_observations(model.observation, 1))[0][0, 5:].tolist() == [2.0, 2.0]


def test_every_parameter_learns() -> None:
    for shared in (True, False):
        model = _model(OBSERVATIONS["dict"], core="lstm", shared_critic=shared, initial_log_std=-0.5)
        params, values = model.unroll(
            _observations(model.observation, STEPS, ROWS),
            torch.zeros(STEPS, ROWS, dtype=torch.bool),
            torch.zeros(ROWS, model.state_size),
        )
        (params.square().sum() + values.square().sum()).backward()
        assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())


def test_normalizer_matches_the_moments_of_all_valid_rows() -> None:
    rng = np.random.default_rng(0)
    spec = ObservationSpec.from_space(
        spaces.Dict({"a": spaces.Box(-9, 9, (2,)), "n": spaces.Discrete(3), "s": spaces.Box(-9, 9, ())})
    )
    normalizer = ObservationNormalizer(spec.leaves)
    assert all(buffer.dtype == torch.float32 for buffer in normalizer.buffers())
    a, s = rng.normal(1000.0, 0.5, (40, 8, 2)).astype(np.float32), rng.normal(-3.0, 2.0, (40, 8)).astype(np.float32)
    valid = rng.random((40, 8)) < 0.7
    a[~valid] = np.nan
    n = torch.zeros(40, 8, dtype=torch.int32)
    for t in range(0, 40, 8):
        part = slice(t, t + 8)
        normalizer.update(
            (torch.from_numpy(a[part]), n[part], torch.from_numpy(s[part])), torch.from_numpy(valid[part])
        )
    before = normalizer.mean_0.clone()
    normalizer.update((torch.full((1, 8, 2), 5.0), n[:1], torch.zeros(1, 8)), torch.zeros(1, 8, dtype=torch.bool))
    assert torch.equal(normalizer.mean_0, before)
    assert normalizer.count == valid.sum()
    np.testing.assert_allclose(normalizer.mean_0, a[valid].astype(np.float64).mean(0), rtol=1e-6)
    np.testing.assert_allclose(normalizer.var_0, a[valid].astype(np.float64).var(0), rtol=1e-3)
    np.testing.assert_allclose(normalizer.var_2, s[valid].var(), rtol=1e-4)
    out = normalizer((torch.tensor([[1000.0, 1e9]]), n[0, :1], torch.tensor([-3.0])))
    assert abs(out[0][0, 0]) < 0.2
    assert out[0][0, 1] == 10.0
    assert out[1].dtype == torch.int32


@pytest.mark.parametrize("before", [5e6, 2.5e7])
def test_a_variance_that_batches_confirm_stays_after_months(before: float) -> None:
    """As float32 has it: a batch that counts for less than the last digit changes nothing."""
    mean, var = torch.zeros(5), torch.tensor([0.7, 1.3, 1.4, 1.9, 300.0])
    count, values = torch.tensor(2 * before), torch.stack((var.sqrt(), -var.sqrt()))
    begun = var.clone()
    for _ in range(1000):
        merge_moments(mean, var, count, values, torch.ones(2, dtype=torch.bool))
    torch.testing.assert_close(var, begun, rtol=2e-6, atol=0.0)


def test_a_batch_whose_moments_are_not_finite_does_not_count() -> None:
    returns = RunningMeanStd()
    for values in ([1.0, 3.0], [math.inf] * 1000, [10.0, 10.0]):
        returns.update(torch.tensor(values), torch.ones(len(values), dtype=torch.bool))
    assert (returns.mean, returns.count) == (6.0, 4.0)


@pytest.mark.parametrize("large", [0, 1])
def test_elements_of_an_observation_that_overflow_leave_the_others_their_moments(large: int) -> None:
    box = spaces.Box(-math.inf, math.inf, (2,))
    normalizer = ObservationNormalizer(ObservationSpec.from_space(spaces.Tuple((box, box))).leaves)
    leaves = [torch.tensor([[[1.0, 2.0], [3.0, 6.0]]]) for _ in range(2)]
    normalizer.update(tuple(leaves), torch.ones(1, 2, dtype=torch.bool))
    leaves[large] = torch.full_like(leaves[large], 1e30)
    leaves[1 - large] = torch.stack([torch.full((1, 2), 1e30), torch.tensor([[4.0, 8.0]])], -1)
    normalizer.update(tuple(leaves), torch.ones(1, 2, dtype=torch.bool))
    assert normalizer.count == 4
    assert normalizer.mean_and_scale(large)[0].tolist() == [2.0, 4.0]
    assert normalizer.mean_and_scale(1 - large)[0].tolist() == [2.0, 5.0]


def test_running_mean_std_and_its_state() -> None:
    rng = np.random.default_rng(0)
    values, valid = rng.normal(5.0, 3.0, (6, 50)), rng.random((6, 50)) < 0.5
    moments = RunningMeanStd()
    assert (float(moments.mean), float(moments.std)) == (0.0, 1.0)
    for row, good in zip(values, valid, strict=True):
        moments.update(torch.from_numpy(row.astype(np.float32)), torch.from_numpy(good))
    restored = RunningMeanStd()
    restored.load_state_dict(moments.state_dict())
    assert math.isclose(float(restored.mean), values[valid].mean(), rel_tol=1e-6)
    assert math.isclose(float(restored.std), values[valid].std(), rel_tol=1e-6)


class OwnEncoder(nn.Module):
    def __init__(self, leaf: Leaf, width: int = 3) -> None:
        super().__init__()
        self.out_features = width
        self.linear = nn.Linear(math.prod(leaf.shape), width)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.flatten(1))


class OwnCore(Core):
    """A leaky sum."""

    def __init__(self, in_features: int, **_: Any) -> None:
        super().__init__()
        self.out_features = self.state_size = in_features

    def forward(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        state = 0.9 * state + x
        return state, state


class OwnModel(nn.Module):
    state_size = 0

    def __init__(self, observation: ObservationSpec, action: ActionSpec, config: ModelConfig) -> None:
        super().__init__()
        self.linear = nn.Linear(5, action.logits + 2 * action.continuous + 1)

    def forward(self, obs: tuple[Tensor, ...], state: None = None) -> tuple[Tensor, Tensor, None]:
        out = self.linear(obs[0])
        return out[..., :-1], out[..., -1], None

    def unroll(self, obs: tuple[Tensor, ...], first: Tensor, state: None = None) -> tuple[Tensor, Tensor]:
        return self(obs)[:2]


def test_users_own_parts() -> None:
    model = _model(OBSERVATIONS["vector"], encoder=OwnEncoder, core=f"{__name__}:OwnCore", kwargs={"width": 4})
    assert model.state_size == 4
    obs, first = _observations(model.observation, STEPS, ROWS), torch.rand(STEPS, ROWS) < 0.4
    state = torch.randn(ROWS, 4)
    torch.testing.assert_close(model.unroll(obs, first, state), _step_through(model, obs, first, state))
    whole = _model(OBSERVATIONS["vector"], model=OwnModel)
    assert whole.normalizer is None
    assert whole.action is ACTION


class NoWidth(OwnEncoder):
    def __init__(self, leaf: Leaf) -> None:
        super().__init__(leaf)
        del self.out_features


class WrongWidth(OwnEncoder):
    def __init__(self, leaf: Leaf) -> None:
        super().__init__(leaf)
        self.out_features = 7


class NoUnroll(nn.Module):
    out_features = state_size = 3

    def __init__(self, in_features: int) -> None:
        super().__init__()


class WrongModel(OwnModel):
    def forward(self, obs: tuple[Tensor, ...], state: None = None) -> tuple[Tensor, ...]:
        return super().forward(obs, state)[:2]


class OtherUnroll(OwnModel):
    """Doubles what the learner sees."""

    def unroll(self, obs: tuple[Tensor, ...], first: Tensor, state: None = None) -> tuple[Tensor, Tensor]:
        params, value = super().unroll(obs, first, state)
        return 2 * params, value


class FlatUnroll(OwnModel):
    """Leaves out the time."""

    def unroll(self, obs: tuple[Tensor, ...], first: Tensor, state: None = None) -> tuple[Tensor, Tensor]:
        params, value = super().unroll(obs, first, state)
        return params, value.flatten()


class FailingUnroll(OwnModel):
    def unroll(self, *inputs: Any) -> tuple[Tensor, Tensor]:
        raise KeyError("mistake")


class Stateless(OwnCore):
    def __init__(self, in_features: int) -> None:
        super().__init__(in_features)
        self.state_size = 0


class Remembering(OwnCore):
    """Does not begin episodes at zero."""

    def unroll(self, x: Tensor, first: Tensor, state: Tensor) -> Tensor:
        return super().unroll(x, torch.zeros_like(first), state)


class Forgetting(OwnCore):
    """Begins each step at zero."""

    def unroll(self, x: Tensor, first: Tensor, state: Tensor) -> Tensor:
        return super().unroll(x, torch.ones_like(first), state)


class Unbroken(OwnCore):
    """Begins an episode at zero in the first step alone."""

    def unroll(self, x: Tensor, first: Tensor, state: Tensor) -> Tensor:
        return super().unroll(x, torch.cat((first[:1], torch.zeros_like(first[1:]))), state)


class Dropping(OwnModel):
    """Has a Dropout, which draws other numbers at every call in training."""

    def forward(self, obs: tuple[Tensor, ...], state: None = None) -> tuple[Tensor, Tensor, None]:
        params, value, _ = super().forward(obs, state)
        return nn.functional.dropout(params, training=self.training), value, None


class Shifting(OwnEncoder):
    """Changes what it is given."""

    def forward(self, x: Tensor) -> Tensor:
        x -= 1.0
        return super().forward(x)


class ShiftingUnroll(OwnCore):
    def unroll(self, x: Tensor, first: Tensor, state: Tensor) -> Tensor:
        outputs = super().unroll(x, first, state)
        state.mul_(0.9)
        return outputs


class Imaginary(OwnCore):
    def __init__(self, in_features: int) -> None:
        super().__init__(in_features)
        self.poles = nn.Parameter(torch.ones(3, dtype=torch.complex64))


class Doubled(OwnEncoder):
    """Computes in float64 throughout."""

    def __init__(self, leaf: Leaf) -> None:
        super().__init__(leaf)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.double())


class Loose(OwnModel):
    """A further output without a name."""

    def unroll(self, *inputs: Any) -> tuple[Tensor, ...]:
        params, value = super().unroll(*inputs)
        return params, value, value


class Flattened(OwnModel):
    """A further output without the time."""

    def unroll(self, *inputs: Any) -> tuple[Any, ...]:
        params, value = super().unroll(*inputs)
        return params, value, {"more": value.flatten()}


def test_parameters_are_those_that_are_trained_in_float32() -> None:
    def make(leaf: Leaf) -> nn.Module:
        return OwnEncoder(leaf).double()

    assert {p.dtype for p in _model(OBSERVATIONS["vector"], encoder=make).parameters()} == {torch.float32}


def test_a_module_is_tried_in_evaluation_mode_and_trained_afterwards() -> None:
    assert _model(OBSERVATIONS["vector"], model=Dropping).training


def test_a_whole_model_is_given_its_keyword_arguments() -> None:
    class Wide(OwnModel):
        def __init__(self, observation: ObservationSpec, action: ActionSpec, config: ModelConfig, width: int) -> None:
            super().__init__(observation, action, config)
            self.width = width

    assert _model(OBSERVATIONS["vector"], model=Wide, kwargs={"width": 7}).width == 7


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"encoder": "natur_cnn"}, "known: auto, mlp, nature_cnn, impala_resnet"),
        ({"encoder": "nature_cnn"}, "needs an image"),
        ({"core": "rnn"}, "known: none, gru, lstm"),
        ({"encoder": "no_such_module_here:X"}, "cannot be imported"),
        ({"encoder": "math:NoSuchName"}, "has no NoSuchName"),
        ({"encoder": "math:pi"}, "not callable"),
        ({"model": "plain_name"}, "module:Name"),
        ({"encoder": NoWidth}, "out_features"),
        ({"encoder": WrongWidth}, r"\(2, 7\)"),
        ({"encoder": lambda leaf: None}, "must make a torch.nn.Module"),
        ({"encoder": OwnEncoder, "kwargs": {"nonsense": 1}}, "nonsense"),
        ({"core": NoUnroll}, "unroll"),
        ({"model": WrongModel}, r"\(params, value, state\)"),
        ({"model": OtherUnroll}, r"unroll gave the parameters .* both must give the same numbers"),
        ({"model": FlatUnroll}, r"unroll turned three steps of two rows into \(6,\); it must be \(3, 2"),
        ({"model": FailingUnroll}, "unroll failed on a batch of two observations.*KeyError"),
        ({"model": OwnModel, "kwargs": {"width": 7}}, "unexpected keyword argument 'width'"),
        ({"encoder": Shifting}, "changes its input in place"),
        ({"core": ShiftingUnroll}, "unroll changes its input in place"),
        ({"core": Imaginary}, "complex parameters, poles, .* real and imaginary parts, which torch.complex joins"),
        ({"encoder": Doubled}, "failed on a batch of two observations.*dtype"),
        ({"model": Loose}, "unroll returned Tensor besides .* a third value must be a mapping of names to tensors"),
        ({"model": Flattened}, r"unroll gave \(6,\) as 'more' .* it must be a tensor \(3, 2, ...\)"),
        ({"core": Stateless}, "state_size is 0; it must be at least 1"),
        ({"core": Remembering}, "unroll gave the outputs .* for step 0"),
        ({"core": Forgetting}, "unroll gave the outputs .* for step 0"),
        ({"core": Unbroken}, "unroll gave the outputs .* for step 2"),
    ],
)
def test_wrong_parts_say_what_is_wrong(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _model(OBSERVATIONS["vector"], **config)


class Tempered(ActionDistribution):
    """Has a temperature besides."""

    @property
    def width(self) -> int:
        return super().width + 1


class Sharper(ActionDistribution):
    """Has the parameters of the built-in one."""


@pytest.mark.parametrize(("distribution", "width"), [(Tempered, 8), (Sharper, 7)])
def test_the_policy_gives_as_many_parameters_as_a_distribution_takes(distribution: Any, width: int) -> None:
    model = _model(OBSERVATIONS["vector"], distribution=distribution)
    assert model(_observations(model.observation, ROWS))[0].shape == (ROWS, width)
    assert isinstance(model.policy, PolicyHead) == (distribution is Sharper)


def test_load_object_gives_nested_names_and_callables() -> None:
    assert load_object("collections:OrderedDict.fromkeys") is not None
    assert load_object(math.sqrt) is math.sqrt
