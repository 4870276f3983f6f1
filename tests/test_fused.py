"""The fast paths of fully connected models are the models themselves: same numbers forwards, same gradients backwards."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from gymnasium import spaces

from sfactory.config import ModelConfig
from sfactory.fused_policy import FusedPolicy
from sfactory.model import build_model
from sfactory.model.fused import fused_layers, tanh_
from sfactory.spaces import ActionSpec, ObservationSpec

DISCRETE = spaces.Tuple((spaces.Discrete(3), spaces.MultiDiscrete([2, 5])))
MIXED = spaces.Dict({"go": spaces.Discrete(3), "force": spaces.Box(-1, 1, (2,))})


def model_of(observation: spaces.Space, action: spaces.Space, **config):
    torch.manual_seed(3)
    model = build_model(ObservationSpec.from_space(observation), ActionSpec.from_space(action), ModelConfig(**config))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


@pytest.mark.parametrize("rows", [1, 2, 7, 130])
@pytest.mark.parametrize("action", [DISCRETE, MIXED], ids=["discrete", "mixed"])
@pytest.mark.parametrize(
    "config",
    [
        {},
        {"activation": "relu", "hidden": (5, 33, 6)},
        {"shared_critic": False, "hidden": (16,), "normalize_obs": True},
        {"adaptive_std": True, "normalize_obs": True},
    ],
    ids=["tanh", "relu", "own critic", "adaptive std"],
)
def test_the_fused_policy_gives_what_the_model_gives(config: dict, action: spaces.Space, rows: int) -> None:
    model = model_of(spaces.Box(-np.inf, np.inf, (3, 5)), action, **config)
    if model.normalizer is not None:
        model.normalizer.update((torch.randn(4, 50, 3, 5) * 3 + 1,), torch.ones(4, 50, dtype=torch.bool))
    assert FusedPolicy.fits(model, None)
    fused, obs = FusedPolicy(model), np.random.default_rng(rows).normal(0, 20, (rows, 3, 5)).astype(np.float32)
    for _ in range(2):
        with torch.inference_mode():
            params, value, _ = model((torch.from_numpy(obs),))
        got_params, got_value = fused(obs)
        np.testing.assert_allclose(got_params, params.numpy(), rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(got_value, value.numpy(), rtol=1e-4, atol=1e-5)
        with torch.no_grad():  # as when newer weights have been read
            for parameter in model.parameters():
                parameter.mul_(0.7).add_(0.05)
        fused.refresh()


@pytest.mark.parametrize(
    ("observation", "config", "autocast"),
    [
        (spaces.Box(-1, 1, (4,)), {"core": "gru"}, None),
        (spaces.Box(-1, 1, (4,)), {"activation": "silu"}, None),
        (spaces.Box(-1, 1, (4,)), {"hidden": (512,)}, None),
        (spaces.Box(-1, 1, (4,)), {"hidden": ()}, None),
        (spaces.Box(-1, 1, (4,)), {}, torch.bfloat16),
        (spaces.Discrete(4), {}, None),
        (spaces.Dict({"a": spaces.Box(-1, 1, (4,)), "b": spaces.Box(-1, 1, (2,))}), {}, None),
    ],
)
def test_other_models_run_as_they_are(observation: spaces.Space, config: dict, autocast: torch.dtype | None) -> None:
    assert not FusedPolicy.fits(model_of(observation, DISCRETE, **config), autocast)


@pytest.mark.parametrize("activation", ["tanh", "relu"])
@pytest.mark.parametrize("widths", [(3, 8), (9, 4, 6), (5, 5, 7, 2)])
def test_fused_layers_have_the_values_and_gradients_of_the_layers(activation: str, widths: tuple[int, ...]) -> None:
    torch.manual_seed(1)
    layers = [torch.nn.Linear(a, b) for a, b in itertools.pairwise(widths)]
    x = torch.randn(11, widths[0], requires_grad=True)
    y = x
    for layer in layers:
        y = getattr(torch, activation)(layer(y))
    direction = torch.randn_like(y)
    inputs = [x, *(p for layer in layers for p in layer.parameters())]
    expected = torch.autograd.grad(y, inputs, direction)
    fused = fused_layers(x, layers, activation)
    torch.testing.assert_close(fused, y, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(torch.autograd.grad(fused, inputs, direction.clone()), expected, rtol=1e-4, atol=1e-5)


def test_tanh_is_exact_to_3e7_and_keeps_nan() -> None:
    x = torch.linspace(-12, 12, 100_001)
    assert (tanh_(x.clone()).double() - torch.tanh(x.double())).abs().max() < 3e-7
    ends = tanh_(torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0]))
    torch.testing.assert_close(ends, torch.tensor([float("nan"), 1.0, -1.0, 0.0]), equal_nan=True)
