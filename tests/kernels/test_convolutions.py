"""Convolutions with ReLU in one pass, and over blocks of pixels, against torch's plain operations."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from gymnasium import spaces
from torch import Tensor, nn

from perf.fast_modules import exchange_all
from perf.plain import nature_cnn
from sfactory.kernels import lower_weights
from sfactory.kernels.convolution import onednn
from sfactory.kernels.convolution.layers import _cut_off, relu_convolutions_in_turn
from sfactory.kernels.convolution.onednn import Convolution
from sfactory.kernels.convolution.pixel_blocks import block_weight, pixel_blocks
from sfactory.model import NatureCNN
from sfactory.model.precision import mixed_precision
from sfactory.spaces import Leaf, ObservationSpec

PRECISIONS = [torch.float32, torch.bfloat16]


def image_leaf(shape: tuple[int, ...], dtype: type = np.uint8) -> Leaf:
    (leaf,) = ObservationSpec.from_space(spaces.Box(0, 255, shape, dtype)).leaves
    assert leaf.is_image
    return leaf


def pictures(shape: tuple[int, ...], seed: int = 0) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 256, shape, np.uint8))


def gradients(module: nn.Module, output: Tensor, seed: int = 1) -> Tensor:
    """Of all parameters, in one vector, for a random gradient of the output."""
    of_output = torch.randn(output.shape, generator=torch.Generator().manual_seed(seed))
    return torch.cat([g.flatten() for g in torch.autograd.grad(output, list(module.parameters()), of_output)])


def error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).detach().norm() / expected.detach().norm())


@pytest.mark.parametrize("images", [1, 8, 19])
@pytest.mark.parametrize("dtype", PRECISIONS)
def test_blocks_hold_the_pixels_of_their_place(images: int, dtype: torch.dtype) -> None:
    x = pictures((images, 3, 12, 20))
    blocks = pixel_blocks(x, False, dtype)
    assert blocks.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(blocks, F.pixel_unshuffle(x, 4).to(dtype))
    signed = x.view(torch.int8)
    assert torch.equal(pixel_blocks(signed, False, dtype), F.pixel_unshuffle(signed, 4).to(dtype))
    of_pixels = pixel_blocks(x.permute(0, 2, 3, 1), True, dtype)
    assert torch.equal(
        of_pixels, F.pixel_unshuffle(x, 4).to(dtype).unflatten(1, (3, 4, 4)).permute(0, 2, 3, 1, 4, 5).flatten(1, 3)
    )


@pytest.mark.parametrize("hwc", [False, True])
@pytest.mark.parametrize("kernel", [4, 8])
def test_a_convolution_over_blocks_is_one_of_stride_four(kernel: int, hwc: bool) -> None:
    x, weight = pictures((2, 36, 44, 3) if hwc else (2, 3, 36, 44)), torch.randn(5, 3, kernel, kernel)
    expected = F.conv2d(x.permute(0, 3, 1, 2).float() if hwc else x.float(), weight, stride=4)
    torch.testing.assert_close(
        F.conv2d(pixel_blocks(x, hwc, torch.float32), block_weight(weight, hwc)), expected, rtol=1e-4, atol=1e-2
    )


@pytest.mark.parametrize(
    "shape",
    [
        (4, 84, 84), (72, 128, 3), (3, 72, 128), (1, 37, 61), (4, 38, 84), (20, 36, 40), (3, 28, 28), (7, 7, 3),
        (40, 4, 10),
    ],
)  # fmt: skip
def test_the_encoder_computes_what_plain_convolutions_do(shape: tuple[int, ...]) -> None:
    """With sides that are multiples of four and others, and with small images, whose layers have padding."""
    torch.manual_seed(0)
    encoder = exchange_all(NatureCNN(image_leaf(shape), 64))
    x = pictures((11, *shape))
    found, expected = encoder(x), nature_cnn(encoder, x)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert error(gradients(encoder, found), gradients(encoder, expected)) < 1e-4
    with torch.inference_mode():
        torch.testing.assert_close(encoder(x), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shape", [(4, 84, 84), (72, 128, 3), (3, 28, 28), (40, 4, 10)])
def test_in_bfloat16_it_is_as_exact_as_autocast(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    encoder = exchange_all(NatureCNN(image_leaf(shape), 64))
    x = pictures((32, *shape))
    exact = nature_cnn(encoder, x)
    with mixed_precision("cpu", torch.bfloat16):
        found, usual = encoder(x).float(), nature_cnn(encoder, x).float()
    assert error(found, exact) < 1.1 * error(usual, exact) < 0.02
    of_exact = gradients(encoder, exact)
    assert error(gradients(encoder, found), of_exact) < 1.1 * error(gradients(encoder, usual), of_exact) < 0.2


@pytest.mark.parametrize("dtype", [*PRECISIONS, torch.float64])
def test_a_chain_has_the_gradients_of_its_input_and_of_every_layer(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 6, 13, 11, generator=generator).to(dtype)
    shapes = [(8, 6, 3, 3), (16, 8, 4, 4), (5, 16, 3, 3)]
    settings = [((2, 2), (1, 1)), ((1, 1), (0, 0)), ((1, 1), (1, 1))]
    given = [
        x,
        *(torch.randn(s, generator=generator).div(10) for s in shapes),
        *(torch.randn(s[0], generator=generator) for s in shapes),
    ]
    weights = [tensor.requires_grad_() for tensor in given]

    def layers(dtype: torch.dtype) -> list[Convolution]:
        return [
            Convolution(w.to(dtype), b.to(dtype), *s)
            for w, b, s in zip(weights[1:4], weights[4:], settings, strict=True)
        ]

    exact = torch.bfloat16 if dtype == torch.bfloat16 else torch.float64
    found, expected = relu_convolutions_in_turn(weights[0], layers(dtype)), weights[0].to(exact)
    for layer in layers(exact):
        expected = F.relu(F.conv2d(expected, *layer))
    tolerance = 0.01 if dtype == torch.bfloat16 else 1e-5
    assert found.dtype == dtype
    assert error(found.double(), expected.double()) < tolerance
    of_output = torch.randn(expected.shape, generator=generator, dtype=torch.float64)
    both = (torch.autograd.grad(output, weights, of_output.to(output.dtype)) for output in (found, expected))
    assert all(error(a.double(), b.double()) < tolerance for a, b in zip(*both, strict=True))


@pytest.mark.parametrize("dtype", PRECISIONS)
def test_a_gradient_is_cut_off_where_the_activation_is_zero_however_it_lies(dtype: torch.dtype) -> None:
    activation = F.relu(torch.randn(2, 5, 4, 3)).to(dtype)
    gradient = torch.randn(2, 5, 4, 3).to(dtype)
    expected = gradient * (activation > 0)
    assert 0 < (activation > 0).float().mean() < 1
    assert torch.equal(_cut_off(gradient.clone(), activation), expected)
    last = [t.clone(memory_format=torch.channels_last) for t in (gradient, activation)]
    assert torch.equal(_cut_off(*last), expected)
    assert torch.equal(last[0], expected)  # where it lay


@pytest.mark.parametrize("shape", [(4, 84, 84), (72, 128, 3), (1, 37, 61), (3, 28, 28), (7, 7, 3), (40, 4, 10)])
@pytest.mark.parametrize("images", [1, 19])
@pytest.mark.parametrize("dtype", PRECISIONS)
def test_weights_kept_in_onednn_order_give_the_same_features(
    dtype: torch.dtype, images: int, shape: tuple[int, ...]
) -> None:
    model, x = exchange_all(NatureCNN(image_leaf(shape))), pictures((images, *shape))
    with torch.no_grad(), mixed_precision("cpu", None if dtype == torch.float32 else dtype):
        expected = model(x)
        lower_weights(model, dtype)
        assert model.linear.lowered.weight.is_mkldnn == onednn.computes(dtype)
        found = model(x)
    assert found.dtype == expected.dtype == dtype
    rtol, atol = (2e-2, 1e-2) if dtype == torch.bfloat16 else (1e-5, 1e-5)
    torch.testing.assert_close(found, expected, rtol=rtol, atol=atol)


def test_this_machine_fuses() -> None:
    assert onednn.computes(torch.float32) == torch.backends.mkldnn.is_available()
    assert not onednn.computes(torch.float64)
