"""Convolutions on the processor's matrix tiles, against torch's. Whole numbers that bfloat16 holds make every comparison an equality."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from sfactory.model import tiles_cpu as tiles
from sfactory.model.convolutions_cpu import lower_convolutions, relu_convolutions
from sfactory.model.onednn import Convolution
from sfactory.model.tile_convolutions_cpu import TOGETHER, tile_plan

pytestmark = pytest.mark.skipif(not tiles.at_hand(), reason="this processor has no matrix tiles")

STACKS = {
    "of Atari": ((64, 21, 21), [(32, 2, 1), (64, 4, 2), (64, 3, 1)]),
    "one layer, one tap": ((32, 8, 5), [(32, 1, 1)]),
    "wide and flat": ((96, 7, 20), [(64, (3, 1), 1), (32, (1, 4), 1)]),
    "blocks of 2 and of 3": ((32, 42, 50), [(32, 3, 1), (32, 4, 2), (32, (2, 3), 1), (96, (3, 6), 3)]),
}


def whole_numbers(shape: tuple[int, ...], share: float, generator: torch.Generator) -> Tensor:
    """-1, 0 and 1, of which a share is not 0."""
    signs = torch.randint(0, 2, shape, generator=generator) * 2.0 - 1
    return signs * (torch.rand(shape, generator=generator) < share)


def stack(name: str, images: int) -> tuple[Tensor, list[Convolution]]:
    generator = torch.Generator().manual_seed(images)
    (channels, height, width), kernels = STACKS[name]
    x = whole_numbers((images, channels, height, width), 0.2, generator).bfloat16().to(memory_format=torch.channels_last)
    layers = []
    for outputs, kernel, stride in kernels:
        down, across = (kernel, kernel) if isinstance(kernel, int) else kernel
        weight = whole_numbers((outputs, channels, down, across), 8 / (channels * down * across), generator)
        bias = torch.randint(-1, 3, (outputs,), generator=generator).float()
        layers.append(Convolution(weight.requires_grad_(), bias.requires_grad_(), (stride, stride), (0, 0)))
        channels = outputs
    return x, layers


def plain(x: Tensor, layers: list[Convolution]) -> Tensor:
    x = x.float()
    for layer in layers:
        x = F.relu(F.conv2d(x, *layer))
    return x


@pytest.mark.parametrize("images", [1, TOGETHER - 1, TOGETHER, 2 * TOGETHER + 1])
@pytest.mark.parametrize("name", STACKS)
def test_outputs_and_gradients_are_those_of_plain_convolutions(name: str, images: int) -> None:
    x, layers = stack(name, images)
    assert tile_plan(tuple(x.shape[1:]), layers, x.dtype) is not None
    found, expected = relu_convolutions(x, layers), plain(x, layers)
    assert 1 < expected.max() <= 256
    assert torch.equal(found.float(), expected)
    operands = [tensor for layer in layers for tensor in (layer.weight, layer.bias)]
    of_output = whole_numbers(expected.shape, 0.02, torch.Generator().manual_seed(1))
    both = (torch.autograd.grad(output, operands, of_output.to(output.dtype)) for output in (found, expected))
    for one, other in zip(*both, strict=True):
        assert one.dtype == torch.float32
        assert other.abs().max() > 0
        assert torch.equal(one, other)


@pytest.mark.parametrize("name", STACKS)
def test_weights_that_are_kept_ready_give_what_training_gives(name: str) -> None:
    """So that importance weights of a policy that has not changed are 1."""
    x, layers = stack(name, 5)
    x = torch.randn_like(x)
    with torch.no_grad():
        for layer in layers:
            layer.weight.normal_().mul_(0.1)
            layer.bias.normal_()
    trained = relu_convolutions(x, layers)
    with torch.no_grad():
        ready = lower_convolutions(tuple(x.shape[1:]), layers, torch.bfloat16)
        assert torch.equal(relu_convolutions(x, layers), trained)
        for layer in layers:
            layer.weight.zero_()
            layer.bias.zero_()
        assert torch.equal(ready(x), trained)
        assert torch.equal(ready(x[:2]), trained[:2])


def test_what_is_not_a_number_shows() -> None:
    x, layers = stack("of Atari", 2)
    x[1, 0, 10, 10] = float("nan")
    out = relu_convolutions(x, layers)
    assert out[1].isnan().any()
    assert not out[0].isnan().any()


@pytest.mark.parametrize(
    ("shape", "kernel", "stride"),
    [((16, 21, 21), (32, 2, 2), 1), ((64, 21, 21), (24, 2, 2), 1), ((64, 20, 20), (32, 2, 2), 2), ((64, 6, 5), (32, 2, 2), 1)],
    ids=["channels", "outputs", "first stride", "positions"],
)
def test_what_does_not_fit_goes_by_other_ways(shape: tuple[int, int, int], kernel: tuple[int, int, int], stride: int) -> None:
    outputs, down, across = kernel
    layers = [Convolution(torch.randn(outputs, shape[0], down, across), torch.zeros(outputs), (stride, stride), (0, 0))]
    assert tile_plan(shape, layers, torch.bfloat16) is None
    x = torch.randn(2, *shape).bfloat16().to(memory_format=torch.channels_last)
    torch.testing.assert_close(relu_convolutions(x, layers).float(), plain(x, layers), rtol=0.05, atol=0.2)


def test_only_bfloat16_from_float32_and_only_without_padding() -> None:
    _, (layer, *_) = stack("of Atari", 1)
    assert tile_plan((64, 21, 21), [layer._replace(weight=layer.weight.bfloat16())], torch.bfloat16) is None
    assert tile_plan((64, 21, 21), [layer], torch.float32) is None
    assert tile_plan((64, 21, 21), [layer._replace(padding=(1, 1))], torch.bfloat16) is None


def test_the_gradient_of_the_images_goes_by_other_ways() -> None:
    x, layers = stack("of Atari", 2)
    found, expected = (
        torch.autograd.grad(f(x, layers).float().sum(), x)[0] for x, f in ((x.requires_grad_(), relu_convolutions), (x, plain))
    )
    torch.testing.assert_close(found, expected)


def test_threads_and_other_users_of_the_tiles_do_not_disturb_each_other() -> None:
    x, layers = stack("of Atari", 9)
    expected, linear = plain(x, layers).detach(), torch.nn.Linear(64, 48).bfloat16()
    features = torch.randn(70, 64).bfloat16()

    def work(_: int) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            before = linear(features)
            out = relu_convolutions(x, layers).float()
            return out, before - linear(features)

    with ThreadPoolExecutor(4) as pool:
        for out, difference in pool.map(work, range(40)):
            assert torch.equal(out, expected)
            assert not difference.any()


def test_numba_may_be_told_to_compile_for_another_processor() -> None:
    program = "from sfactory.model import tiles_cpu; assert not tiles_cpu.at_hand()"
    subprocess.run([sys.executable, "-c", program], check=True, env=os.environ | {"NUMBA_CPU_NAME": "generic"})
