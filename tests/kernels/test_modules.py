"""Fast modules give what the plain ones give, step by step and over segments, with weights of autocast's dtype kept."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor

from perf.fast_modules import exchange_all
from sfactory.config import ModelConfig
from sfactory.kernels import lower_weights, recurrence, scanned
from sfactory.kernels.scans import GRUScan, LSTMScan
from sfactory.model import Core, GRUCore, LSTMCore, build_model
from sfactory.spaces import ActionSpec, ObservationSpec

ACTION = ActionSpec.from_space(spaces.Discrete(3))
IMAGES = {"image_chw": (4, 40, 44), "image_hwc": (36, 40, 3)}


@pytest.mark.parametrize("core", [LSTMCore, GRUCore])
@pytest.mark.parametrize(("steps", "rows", "size"), [(6, 3, 5), (1, 3, 40), (9, 1, 33)])
def test_compiled_scans_and_steps_are_the_plain_ones(core: type[Core], steps: int, rows: int, size: int) -> None:
    torch.manual_seed(0)
    plain = core(4, size, 2)
    fast = exchange_all(copy.deepcopy(plain))
    x, first = torch.randn(steps, rows, 4, requires_grad=True), torch.rand(steps, rows) < 0.3
    state, grad = torch.randn(rows, plain.state_size, requires_grad=True), torch.randn(steps, rows, size)

    def everything(core: Core) -> tuple[Tensor, ...]:
        out = core.unroll(x, first, state)
        gradients = torch.autograd.grad(out, [x, state, *core.parameters()], grad)
        with torch.no_grad():
            return out, *gradients, *core(x[0], state)

    assert "Compiled" in fast.unroll(x, first, state).grad_fn.name()
    assert "Compiled" not in plain.unroll(x, first, state).grad_fn.name()
    for one, other in zip(everything(fast), everything(plain), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("step", "widths"), [(recurrence._lstm_step, (512, 256, 256)), (recurrence._gru_step, (384, 384, 128, 128))]
)
def test_a_compiled_step_gives_the_same_bits_wherever_its_arrays_lie(step: Any, widths: tuple[int, ...]) -> None:
    """Close together they are not processed many units at once."""
    rng, rows = np.random.default_rng(0), 4
    inputs = [rng.normal(size=(rows, width)).astype(np.float32) for width in widths[:-1]]
    results = set()
    for gap in (0, 1, 4, 16, 64, 100):
        for order in itertools.permutations(range(len(widths))):
            memory, begin, arrays = np.zeros(rows * sum(widths) + gap * len(widths), np.float32), 0, {}
            for i in order:
                arrays[i] = memory[begin : begin + rows * widths[i]].reshape(rows, widths[i])
                begin += rows * widths[i] + gap
            for i, given in enumerate(inputs):
                arrays[i][...] = given
            step(*(arrays[i] for i in range(len(widths))))
            results.add(arrays[len(inputs)].tobytes())
    assert len(results) == 1


@pytest.mark.parametrize("core", [LSTMCore, GRUCore])
def test_scans_and_their_gradients_are_those_of_the_plain_core(core: type[Core]) -> None:
    torch.manual_seed(0)
    plain = core(4, 5, 2).double()
    x, first = torch.randn(6, 3, 4, dtype=torch.float64, requires_grad=True), torch.rand(6, 3) < 0.3
    state = torch.randn(3, plain.state_size, dtype=torch.float64, requires_grad=True)
    leaves = [x, state, *plain.parameters()]
    expected = plain.unroll(x, first, state)
    with scanned(plain):
        found = plain.unroll(x, first, state)
    assert type(plain) is core and "Scan" in found.grad_fn.name()
    torch.testing.assert_close(found, expected)
    grad = torch.randn_like(found)
    torch.testing.assert_close(torch.autograd.grad(found, leaves, grad), torch.autograd.grad(expected, leaves, grad))


def test_gradients_of_the_scans() -> None:
    torch.manual_seed(0)
    draw = {"dtype": torch.float64, "requires_grad": True}
    keep = (torch.rand(4, 2, 1) < 0.7).double()
    state = torch.randn(2, 3, **draw)
    lstm = (torch.randn(4, 2, 12, **draw), torch.randn(12, 3, **draw), keep, state, torch.randn(2, 3, **draw))
    gru = (torch.randn(4, 2, 9, **draw), torch.randn(9, 3, **draw), torch.randn(9, **draw), keep, state)
    assert torch.autograd.gradcheck(LSTMScan.apply, lstm)
    assert torch.autograd.gradcheck(GRUScan.apply, gru)


@pytest.mark.parametrize("shape", IMAGES.values(), ids=IMAGES)
@pytest.mark.parametrize("core", ["none", "lstm", "gru"])
def test_lowered_weights_change_nothing_until_the_weights_do(core: str, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    observation = ObservationSpec.from_space(spaces.Box(0, 255, shape, np.uint8))
    model = exchange_all(
        build_model(observation, ACTION, ModelConfig(features=16, core=core, core_size=8, core_layers=2))
    )
    obs = (torch.from_numpy(np.random.default_rng(0).integers(0, 256, (3, *shape), np.uint8)),)
    state = torch.randn(3, model.state_size) if model.state_size else None
    encoder = model.actor.encoders[0]
    weights = [layer.weight for layer in (*encoder.convolutions, encoder.linear)]
    if core != "none":
        weights += [model.actor.core.weight_ih_l0, model.actor.core.bias_ih_l1]

    def values() -> Tensor:
        with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
            return model(obs, state)[1]

    given = values()
    lower_weights(model, torch.bfloat16)
    assert torch.equal(values(), given)
    for weight in weights:
        before = values()
        with torch.no_grad():
            weight.mul_(1.25)
        assert torch.equal(values(), before)
        lower_weights(model, torch.bfloat16)
        assert not torch.equal(values(), before)
    lower_weights(model, None)
    assert not torch.equal(values(), given)


def test_an_exchanged_module_keeps_its_parameters_and_their_names() -> None:
    observation = ObservationSpec.from_space(spaces.Box(0, 255, (4, 40, 44), np.uint8))
    model = build_model(observation, ACTION, ModelConfig(core="gru"))
    names, tensors = zip(*model.state_dict().items(), strict=True)
    after = exchange_all(model).state_dict()
    assert tuple(after) == names
    assert all(a.data_ptr() == b.data_ptr() for a, b in zip(after.values(), tensors, strict=True))
