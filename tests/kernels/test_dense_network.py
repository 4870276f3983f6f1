"""The fast paths of fully connected models are the models themselves: same numbers forwards, same gradients
backwards."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from gymnasium import spaces

from sfactory.config import ModelConfig
from sfactory.data.batch import Batch
from sfactory.data.weights import FlatWeights
from sfactory.kernels.dense_network import DenseNetwork
from sfactory.kernels.tanh import tanh_
from sfactory.model import build_model
from sfactory.model.networks import TorchNetwork
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


MODELS = {
    "tanh": {},
    "relu": {"activation": "relu", "hidden": (5, 33, 6)},
    "own critic": {"shared_critic": False, "hidden": (16,), "normalize_obs": True},
    "adaptive std": {"adaptive_std": True, "normalize_obs": True},
}


SPACES = {
    "vector": spaces.Box(-np.inf, np.inf, (3, 5)),
    "category": spaces.Discrete(30, start=2),
    "grid": spaces.Dict({"agent": spaces.Box(0, 4, (2,), int), "target": spaces.Box(-2, 2, (2,), int)}),
    "filled up": spaces.Dict({"vector": spaces.Box(-np.inf, np.inf, (5,)), "category": spaces.Discrete(3)}),
    "as wide": spaces.Dict({"vector": spaces.Box(-np.inf, np.inf, (8,)), "category": spaces.Discrete(3)}),
    "mixed": spaces.Tuple(
        (
            spaces.MultiDiscrete([3, 4]),
            spaces.Box(-1, 1, (5,)),
            spaces.MultiBinary(3),
            spaces.Box(0, 255, (4,), np.uint8),
            spaces.Discrete(2),
            spaces.Box(-np.inf, np.inf, ()),
        )
    ),
}


def normalized(model):
    """The model, which has seen observations."""
    if model.normalizer is not None:
        model.normalizer.update(observations(model, 4, 50), torch.ones(4, 50, dtype=torch.bool))
    return model


def observations(model, *shape: int, seed: int = 0) -> tuple[torch.Tensor, ...]:
    """Made-up leaves ``[*shape, ...]``, floats among them far from their means."""
    rng = np.random.default_rng(seed)

    def draw(leaf):
        whole = (*shape, *leaf.shape)
        if leaf.sizes:
            return rng.integers(0, np.reshape(leaf.sizes, leaf.shape), whole).astype(leaf.dtype)
        if leaf.dtype == np.uint8:
            return rng.integers(0, leaf.high + 1, whole).astype(np.uint8)
        return rng.normal(1, 20, whole).astype(np.float32)

    return tuple(torch.from_numpy(draw(leaf)) for leaf in model.observation.leaves)


@pytest.mark.parametrize("rows", [1, 7, 600])
@pytest.mark.parametrize(("action", "space"), [(DISCRETE, name) for name in SPACES] + [(MIXED, "vector")])
@pytest.mark.parametrize("config", MODELS.values(), ids=MODELS)
def test_a_step_gives_what_the_model_gives(config: dict, action: spaces.Space, space: str, rows: int) -> None:
    model = normalized(model_of(SPACES[space], action, **config))
    assert DenseNetwork.fits(model, None)
    network, obs = DenseNetwork(model), observations(model, rows, seed=rows)
    for _ in range(2):
        with torch.inference_mode():
            params, value, _ = model(obs)
        got_params, got_value = network(tuple(leaf.numpy() for leaf in obs))
        np.testing.assert_allclose(got_params, params.numpy(), rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(got_value, value.numpy(), rtol=1e-4, atol=1e-5)
        with torch.no_grad():  # as when newer weights have been read
            for parameter in model.parameters():
                parameter.mul_(0.7).add_(0.05)
        network.refresh()


@pytest.mark.parametrize(
    ("observation", "config", "autocast"),
    [
        (spaces.Box(-1, 1, (4,)), {"core": "gru"}, None),
        (spaces.Box(-1, 1, (4,)), {"activation": "silu"}, None),
        (spaces.Box(-1, 1, (4,)), {"hidden": (512,)}, None),
        (spaces.Box(-1, 1, (4,)), {"hidden": ()}, None),
        (spaces.Box(-1, 1, (4,)), {}, torch.bfloat16),
        (spaces.Discrete(9000), {}, None),
        (spaces.Box(0, 255, (9, 9, 1), np.uint8), {}, None),
        (spaces.Box(0, 255, (40, 40, 1), np.uint8), {"encoder": "mlp"}, None),
    ],
)
def test_other_models_run_as_they_are(observation: spaces.Space, config: dict, autocast: torch.dtype | None) -> None:
    assert not DenseNetwork.fits(model_of(observation, DISCRETE, **config), autocast)


@pytest.mark.parametrize("columns", [slice(2, 5), torch.tensor([6, 0, 3, 1])], ids=["slice", "indices"])
@pytest.mark.parametrize(("action", "space"), [(DISCRETE, name) for name in SPACES] + [(MIXED, "vector")])
@pytest.mark.parametrize("config", MODELS.values(), ids=MODELS)
def test_training_has_the_outputs_and_gradients_of_autograd(
    config: dict, action: spaces.Space, space: str, columns: slice | torch.Tensor
) -> None:
    model = normalized(model_of(SPACES[space], action, **config))
    with torch.no_grad():  # some of the deviations beyond their limits
        if config.get("adaptive_std"):
            model.policy.linear.weight.mul_(20)
        elif model.policy.log_std is not None:
            model.policy.log_std.copy_(torch.tensor([2.5, 2.0]))
    flat = FlatWeights(model, gradients=True)
    steps, width = 130, 7  # several tiles, the last one not full
    batch = batch_of(observations(model, steps, width))
    found = []
    for network in (TorchNetwork(model, torch.device("cpu"), None, False), DenseNetwork(model)):
        outputs = network.outputs(batch, columns)
        torch.manual_seed(1)
        flat.parameters.grad.fill_(1.0)  # which is added to
        network.backward(outputs, torch.randn_like(outputs.params), torch.randn_like(outputs.value), {})
        found.append((outputs.params.detach(), outputs.value.detach(), flat.parameters.grad.clone()))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-3)


def batch_of(obs: tuple[torch.Tensor, ...]) -> Batch:
    """With nothing but observations ``[T+1, B, *shape]``."""
    values = {field.name: torch.zeros(obs[0].shape[:2]) for field in dataclasses.fields(Batch)}
    return Batch(**values | {"obs": obs, "rnn_state": torch.zeros(obs[0].shape[1], 0)})


def test_tanh_is_exact_to_3e7_and_keeps_nan() -> None:
    x = torch.linspace(-12, 12, 100_001)
    assert (tanh_(x.clone()).double() - torch.tanh(x.double())).abs().max() < 3e-7
    ends = tanh_(torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0]))
    torch.testing.assert_close(ends, torch.tensor([float("nan"), 1.0, -1.0, 0.0]), equal_nan=True)


def test_tanh_saturates_where_torch_s_does() -> None:
    x = torch.tensor([9.02, 20.0, 1e6, torch.inf])
    for sign in (1.0, -1.0):
        assert torch.equal(tanh_(sign * x), torch.tanh(sign * x)) and (torch.tanh(sign * x).abs() == 1).all()
        assert (tanh_(torch.full((40,), 9.0 * sign)).abs() < 1).all()


def test_saturated_units_learn_nothing() -> None:
    """Adam would make whole steps of a gradient of 1e-7."""
    model = model_of(SPACES["vector"], DISCRETE)
    weights, batch = FlatWeights(model, gradients=True), batch_of((torch.full((2, 3, 3, 5), 100.0),))
    first = model.actor.encoders[0].linears[0]
    first.weight.data.abs_()
    network = DenseNetwork(model)
    outputs = network.outputs(batch, slice(0, 3))
    network.backward(outputs, torch.ones_like(outputs.params), torch.ones_like(outputs.value), {})
    assert not first.weight.grad.any() and weights.parameters.grad.any()
