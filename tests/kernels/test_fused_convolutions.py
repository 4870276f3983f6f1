"""Convolutions fused into passes over images, against torch's. Whole numbers that bfloat16 holds make every comparison
an equality."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from gymnasium import spaces
from torch import Tensor

from perf.fast_modules import exchange_all
from sfactory.kernels import lower_weights
from sfactory.kernels.convolution import layers as convolution_layers
from sfactory.kernels.convolution.fused import FusedConvolutions, FusedPlan, FusedWeights, _pack, fused_plan
from sfactory.kernels.convolution.onednn import Convolution
from sfactory.kernels.convolution.passes import products
from sfactory.kernels.convolution.pixel_blocks import pixel_blocks
from sfactory.model import NatureCNN
from sfactory.model.precision import mixed_precision
from sfactory.spaces import ObservationSpec

pytestmark = pytest.mark.skipif(not products.at_hand(), reason="this processor has no products of bfloat16")

STACKS = {
    "of Atari": ((4, 84, 84), False, [(32, 2, 1), (64, 4, 2), (64, 3, 1)]),
    "one layer, one tap": ((2, 32, 20), False, [(32, 1, 1)]),
    "wide and flat": ((28, 80, 6), True, [(64, (3, 1), 1), (32, (1, 4), 1)]),
    "blocks of 2 and of 3": ((168, 200, 2), True, [(32, 3, 1), (32, 4, 2), (32, (2, 3), 1), (96, (3, 6), 3)]),
    "channels that images have not": ((72, 128, 3), True, [(32, 2, 1), (64, 4, 2), (64, 3, 1)]),
    "fewer products than a tile has rows": ((64, 64, 3), True, [(32, 2, 1), (64, 4, 2), (64, 3, 1)]),
    "one channel": ((1, 84, 84), False, [(32, 2, 1), (64, 4, 2)]),
    "rows and columns that no block has": ((1, 164, 236), False, [(32, 1, 1), (64, 9, 3), (32, 2, 2)]),
}
"""Shape of the stored images, whether their channels come last, and outputs, kernel and stride of each layer over
blocks of pixels."""


def whole_numbers(shape: tuple[int, ...], share: float, generator: torch.Generator) -> Tensor:
    """-1, 0 and 1, of which a share is not 0."""
    signs = torch.randint(0, 2, shape, generator=generator) * 2.0 - 1
    return signs * (torch.rand(shape, generator=generator) < share)


def stack(name: str, images: int) -> tuple[Tensor, list[Convolution]]:
    """Images uint8 ``[N, ...]`` and layers whose outputs bfloat16 holds."""
    generator = torch.Generator().manual_seed(images)
    shape, hwc, kernels = STACKS[name]
    x = whole_numbers((images, *shape), 0.2, generator).abs().byte()
    channels, layers = 16 * (shape[2] if hwc else shape[0]), []
    for outputs, kernel, stride in kernels:
        down, across = (kernel, kernel) if isinstance(kernel, int) else kernel
        weight = whole_numbers((outputs, channels, down, across), 8 / (channels * down * across), generator)
        bias = torch.randint(-1, 3, (outputs,), generator=generator).float()
        layers.append(Convolution(weight.requires_grad_(), bias.requires_grad_(), (stride, stride), (0, 0)))
        channels = outputs
    return x, layers


def plan_for(name: str, layers: list[Convolution]) -> FusedPlan:
    shape, hwc, _ = STACKS[name]
    plan = fused_plan(shape, hwc, layers, torch.bfloat16)
    assert plan is not None
    return plan


def fused(name: str, x: Tensor, layers: list[Convolution]) -> Tensor:
    return FusedConvolutions.apply(x, plan_for(name, layers), *operands(layers))


def operands(layers: list[Convolution]) -> list[Tensor]:
    return [tensor for layer in layers for tensor in (layer.weight, layer.bias)]


def plain(name: str, x: Tensor, layers: list[Convolution]) -> Tensor:
    x = pixel_blocks(x, STACKS[name][1], torch.float32)
    for layer in layers:
        x = F.relu(F.conv2d(x, *layer))
    return x


@pytest.mark.parametrize("images", [1, 3, 4, 9])
@pytest.mark.parametrize("name", STACKS)
def test_outputs_and_gradients_are_those_of_plain_convolutions(name: str, images: int) -> None:
    x, layers = stack(name, images)
    found, expected = fused(name, x, layers), plain(name, x, layers)
    assert 1 < expected.max() <= 256
    assert torch.equal(found.float(), expected)
    of_output = whole_numbers(expected.shape, 0.02, torch.Generator().manual_seed(1))
    both = (torch.autograd.grad(output, operands(layers), of_output.to(output.dtype)) for output in (found, expected))
    for one, other in zip(*both, strict=True):
        assert one.dtype == torch.float32
        assert other.abs().max() > 0
        assert torch.equal(one, other)


@pytest.mark.parametrize("name", ["one layer, one tap", "wide and flat", "one channel"])
def test_images_may_have_signs(name: str) -> None:
    x, layers = stack(name, 3)
    signs = whole_numbers(x.shape, 1.0, torch.Generator().manual_seed(2)).to(torch.int8)
    x = x.to(torch.int8) * signs
    shape, hwc, _ = STACKS[name]
    plan = fused_plan(shape, hwc, layers, torch.bfloat16, signed=True)
    found, expected = FusedConvolutions.apply(x, plan, *operands(layers)), plain(name, x, layers)
    assert (x < 0).any() and expected.max() > 1
    assert torch.equal(found.float(), expected)
    both = (torch.autograd.grad(output.sum(), operands(layers)) for output in (found, expected))
    assert all(torch.equal(*pair) for pair in zip(*both, strict=True))
    with pytest.raises(ValueError, match="images must be int8"):
        plan.forward(x.byte(), (), (), keep=False)


@pytest.mark.parametrize("name", STACKS)
def test_weights_that_are_kept_ready_give_what_training_gives(name: str) -> None:
    """So that importance weights of a policy that has not changed are 1."""
    x, layers = stack(name, 5)
    with torch.no_grad():
        for layer in layers:
            layer.weight.normal_().mul_(0.1)
            layer.bias.normal_()
    trained = fused(name, x, layers)
    with torch.no_grad():
        ready = FusedWeights(plan_for(name, layers), layers)
        for layer in layers:
            layer.weight.zero_()
            layer.bias.zero_()
        assert torch.equal(ready(x), trained)
        assert torch.equal(ready(x[:2]), trained[:2])


def test_images_may_lie_in_any_order() -> None:
    x, layers = stack("of Atari", 6)
    turned = x.permute(2, 0, 3, 1).contiguous().permute(1, 3, 0, 2)
    assert not turned.is_contiguous()
    assert torch.equal(fused("of Atari", turned, layers), fused("of Atari", x, layers))


@pytest.mark.parametrize(
    "wrong", [torch.zeros(2, 4, 80, 84, dtype=torch.uint8), torch.zeros(2, 4, 84, 84)], ids=["shape", "dtype"]
)
def test_other_images_are_refused(wrong: Tensor) -> None:
    _, layers = stack("of Atari", 1)
    with pytest.raises(ValueError, match=r"must be uint8 \(4, 84, 84\)"):
        fused("of Atari", wrong, layers)


@pytest.mark.parametrize(
    ("shape", "kernel", "stride"),
    [((4, 84, 84), (32, 2, 2), 2), ((4, 84, 84), (24, 2, 2), 1), ((4, 20, 24), (32, 2, 2), 1)],
    ids=["first stride", "outputs", "positions"],
)
def test_what_does_not_fit_has_no_plan(shape: tuple[int, int, int], kernel: tuple[int, int, int], stride: int) -> None:
    outputs, down, across = kernel
    layers = [
        Convolution(torch.randn(outputs, 16 * shape[0], down, across), torch.zeros(outputs), (stride, stride), (0, 0))
    ]
    assert fused_plan(shape, False, layers, torch.bfloat16) is None


def test_only_bfloat16_from_float32_and_only_without_padding() -> None:
    _, (layer, *_) = stack("of Atari", 1)
    shape, hwc, _ = STACKS["of Atari"]
    assert fused_plan(shape, hwc, [layer], torch.bfloat16) is not None
    assert fused_plan(shape, hwc, [layer._replace(weight=layer.weight.bfloat16())], torch.bfloat16) is None
    assert fused_plan(shape, hwc, [layer], torch.float32) is None
    assert fused_plan(shape, hwc, [layer._replace(padding=(1, 1))], torch.bfloat16) is None


@pytest.mark.parametrize("shape", [(4, 84, 84), (72, 128, 3), (3, 64, 64)])
def test_an_encoder_takes_them(shape: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    (leaf,) = ObservationSpec.from_space(spaces.Box(0, 255, shape, np.uint8)).leaves
    encoder, x = exchange_all(NatureCNN(leaf, 64)), torch.randint(0, 256, (3, *shape), dtype=torch.uint8)
    monkeypatch.setattr(convolution_layers, "pixels", None)  # the way of all others
    with mixed_precision("cpu", torch.bfloat16):
        trained = encoder(x)
        with torch.no_grad():
            assert torch.equal(encoder(x), trained)
            lower_weights(encoder, torch.bfloat16)
            torch.testing.assert_close(encoder(x), trained, rtol=2e-2, atol=1e-2)


def test_weights_are_rounded_as_torch_does() -> None:
    generator = torch.Generator().manual_seed(0)
    spread = torch.randn(100_000, generator=generator) * 10.0 ** torch.randint(-40, 38, (100_000,), generator=generator)
    extremes = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 3.4e38, -3.4e38, 1e-45, -1e-45])
    weight, order = torch.cat((spread, extremes)), torch.randperm(len(spread) + len(extremes) + 1, generator=generator)
    found = torch.from_numpy(_pack(weight, order.int().numpy(), 1)).view(torch.bfloat16).flatten()
    expected = torch.cat((weight, torch.zeros(1)))[order].bfloat16()
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


def test_threads_and_other_users_of_tiles_do_not_disturb_each_other() -> None:
    x, layers = stack("of Atari", 9)
    expected, linear = plain("of Atari", x, layers).detach(), torch.nn.Linear(64, 48).bfloat16()
    features = torch.randn(70, 64).bfloat16()

    def work(_: int) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            before = linear(features)
            out = fused("of Atari", x, layers).float()
            return out, before - linear(features)

    with ThreadPoolExecutor(4) as pool:
        for out, difference in pool.map(work, range(40)):
            assert torch.equal(out, expected)
            assert not difference.any()
