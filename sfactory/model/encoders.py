"""Encoders: leaves of an observation to a feature vector."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, cast

import torch.nn.functional as F
from torch import Tensor, nn

from sfactory.config import ModelConfig
from sfactory.config.importing import load_object
from sfactory.errors import ConfigError
from sfactory.model.contracts import checked_encoder, construct
from sfactory.model.initialization import orthogonal
from sfactory.model.layers import ACTIVATIONS, Dense, FlatInput, PixelConv
from sfactory.spaces import Leaf

NATURE_LAYERS = ((32, 8, 4, 0), (64, 4, 2, 0), (64, 3, 1, 0))
"""Channels, kernel, stride and padding of Mnih et al. 2015."""
NATURE_MIN_SIDE = 36
"""The smallest image side on which these layers leave at least one pixel."""


class MLPEncoder(nn.Module):
    """Fully connected layers on flattened leaves.

    Args:
        leaves: Of any kind; categories enter one-hot, pixels divided by their largest value.
        hidden: Widths of the layers; with none the flat input itself is the feature vector.
        activation: tanh, relu, elu or silu.
    """

    def __init__(self, leaves: Sequence[Leaf], hidden: Sequence[int] = (64, 64), activation: str = "tanh") -> None:
        super().__init__()
        flat = FlatInput(leaves)
        widths = (flat.out_features, *hidden)
        layers: list[nn.Module] = [flat]
        for width, following in pairwise(widths):
            layers += [Dense(width, following), ACTIVATIONS[activation]()]
        self.layers = nn.Sequential(*layers)
        self.activation = activation
        self.out_features = widths[-1]

    @property
    def flat(self) -> FlatInput:
        return cast(FlatInput, self.layers[0])

    @property
    def linears(self) -> list[nn.Linear]:
        return [layer for layer in self.layers if isinstance(layer, nn.Linear)]

    def forward(self, *obs: Tensor) -> Tensor:
        flat, *layers = self.layers
        x = flat(*obs)
        for layer in layers:
            x = layer(x)
        return x


class NatureCNN(nn.Module):
    """Three convolutions and a linear layer (Mnih et al. 2015, "Human-level control through deep reinforcement
    learning").

    Images with a side below 36 pixels, on which the original kernels do not fit, get three 3x3 convolutions with
    padding 1 and the same numbers of channels; a convolution has stride 2 as long as the larger side is above 8 pixels,
    else 1. So a 7x7 grid keeps its resolution and 28x28 comes down to 7x7. Along a side of one pixel the stride is 1:
    any other gives the same, but in bfloat16 on the CPU torch 2.13 leaves a part of the weights' gradient unwritten.

    Args:
        leaf: An image, (H, W, C) or (C, H, W).
        features: Width of the linear layer.
    """

    def __init__(self, leaf: Leaf, features: int = 512) -> None:
        super().__init__()
        sides: tuple[int, ...] = leaf.sides
        table = NATURE_LAYERS if min(sides) >= NATURE_MIN_SIDE else _small_layers(max(sides))
        convolutions: list[nn.Conv2d] = []
        for channels, kernel, stride, padding in table:
            strides = (1 if sides[0] == 1 else stride, 1 if sides[1] == 1 else stride)
            if convolutions:
                convolutions.append(
                    orthogonal(nn.Conv2d(convolutions[-1].out_channels, channels, kernel, strides, padding))
                )
            else:
                convolutions.append(PixelConv(leaf, channels, kernel, strides, padding))
            sides = tuple((side + 2 * padding - kernel) // step + 1 for side, step in zip(sides, strides, strict=True))
        self.convolutions = nn.ModuleList(convolutions)
        self.linear = Dense(convolutions[-1].out_channels * math.prod(sides), features)
        self.out_features = features

    def forward(self, x: Tensor) -> Tensor:
        for convolution in self.convolutions:
            x = F.relu_(convolution(x))
        return F.relu_(self.linear(flatten_pixels(x)))


class ImpalaResNet(nn.Module):
    """The large network of Espeholt et al. 2018 (IMPALA, figure 3): three stages of a convolution, a pooling and two
    residual blocks.

    Pooling with padding lets images of every size through.

    Args:
        leaf: An image, (H, W, C) or (C, H, W).
        features: Width of the linear layer.
        channels: Of each stage.
    """

    def __init__(self, leaf: Leaf, features: int = 512, channels: Sequence[int] = (16, 32, 32)) -> None:
        super().__init__()
        sides: tuple[int, ...] = leaf.sides
        stages: list[nn.Module] = []
        for i, width in enumerate(channels):
            first = (
                PixelConv(leaf, width, 3, 1, 1)
                if i == 0
                else orthogonal(nn.Conv2d(channels[i - 1], width, 3, padding=1))
            )
            stages += [first, nn.MaxPool2d(3, 2, 1), _Residual(width), _Residual(width)]
            sides = tuple((side + 1) // 2 for side in sides)
        self.stages = nn.Sequential(*stages)
        self.linear = Dense(channels[-1] * math.prod(sides), features)
        self.out_features = features

    def forward(self, x: Tensor) -> Tensor:
        return F.relu_(self.linear(flatten_pixels(F.relu(self.stages(x)))))


class _Residual(nn.Module):
    """x + conv(relu(conv(relu(x))))."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = orthogonal(nn.Conv2d(channels, channels, 3, padding=1))
        self.second = orthogonal(nn.Conv2d(channels, channels, 3, padding=1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(F.relu_(self.first(F.relu(x))))


def flatten_pixels(x: Tensor) -> Tensor:
    """``[N, C, H, W]`` to ``[N, H W C]``: a view of a channels-last tensor, and the same order for any other."""
    return x.permute(0, 2, 3, 1).flatten(1)


def _small_layers(side: int) -> list[tuple[int, int, int, int]]:
    layers = []
    for channels in (32, 64, 64):
        stride = 2 if side > 8 else 1
        layers.append((channels, 3, stride, 1))
        side = (side - 1) // stride + 1
    return layers


IMAGE_ENCODERS = {"nature_cnn": NatureCNN, "impala_resnet": ImpalaResNet}
KNOWN = ("auto", "mlp", *IMAGE_ENCODERS)


def build_encoders(leaves: Sequence[Leaf], config: ModelConfig) -> tuple[list[Any], list[tuple[int, ...]]]:
    """The encoders, and the positions of the leaves that each of them reads.

    Each image has an image encoder of its own, `auto` a NatureCNN, and one MLP reads all other leaves. A user's encoder
    is made for each leaf.

    Raises:
        ConfigError: On an unknown name, an image encoder without an image, or a user's encoder that breaks its
            contract.
    """
    name = config.encoder
    if isinstance(name, str) and name in KNOWN:
        if name in IMAGE_ENCODERS and not any(leaf.is_image for leaf in leaves):
            shapes = ", ".join(f"{leaf.name} {leaf.shape}" for leaf in leaves)
            raise ConfigError(f"model.encoder {name} needs an image, but the observation has {shapes}; use auto or mlp")
        return _named_encoders(leaves, IMAGE_ENCODERS.get(name, NatureCNN), config)
    if isinstance(name, str) and ":" not in name:
        raise ConfigError(f"unknown model.encoder {name!r}; known: {', '.join(KNOWN)}, or a callable or module:Class")
    role = f"model.encoder {name}"
    make = load_object(name, "model.encoder")
    own = [checked_encoder(construct(make, role, leaf, **config.kwargs), role, leaf) for leaf in leaves]
    return own, [(i,) for i in range(len(leaves))]


def _named_encoders(
    leaves: Sequence[Leaf], image: Callable[[Leaf, int], nn.Module], config: ModelConfig
) -> tuple[list[Any], list[tuple[int, ...]]]:
    """An encoder for each image and one for everything else, in the order of their first leaves."""
    flat = tuple(i for i, leaf in enumerate(leaves) if not leaf.is_image)
    reads = sorted([flat] * bool(flat) + [(i,) for i, leaf in enumerate(leaves) if leaf.is_image])
    encoders: list[nn.Module] = [
        MLPEncoder([leaves[i] for i in flat], config.hidden, config.activation)
        if read == flat
        else image(leaves[read[0]], config.features)
        for read in reads
    ]
    return encoders, reads
