"""Pixels that are normalised each by its own moments."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from sfactory.config import Config, ModelConfig, resolve
from sfactory.model import build_model
from sfactory.model.normalizer import PIXEL_STEPS, ObservationNormalizer, PixelNormalizer
from sfactory.spaces import ActionSpec, ObservationSpec

IMAGE = gym.spaces.Box(0, 255, (2, 40, 40), np.uint8)
ACTION = ActionSpec.from_space(gym.spaces.Discrete(3))


class Tiny(nn.Module):
    """An encoder of a user's, which keeps what it was given."""

    def __init__(self, leaf) -> None:
        super().__init__()
        self.leaf, self.out_features, self.seen = leaf, 1, None

    def forward(self, x: Tensor) -> Tensor:
        self.seen = x
        return x.flatten(1).float().mean(1, keepdim=True)


def spec(space: gym.Space = IMAGE) -> ObservationSpec:
    return ObservationSpec.from_space(space)


def pictures(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (*shape, *IMAGE.shape), dtype=torch.uint8, generator=generator)


def test_a_pixel_is_told_in_parts_of_its_own_deviation() -> None:
    normalizer, x = PixelNormalizer(spec().leaves[0]), pictures(64, 5)
    x[..., 0, 0] = 200
    normalizer.update(x, torch.ones(64, 5, dtype=torch.bool))
    counted = x[::16].flatten(0, 1).double()
    mean, deviation = counted.mean(0), counted.std(0, correction=0)
    seen = normalizer(x)
    assert seen.dtype == torch.int8 and seen.shape == x.shape
    assert (seen[..., 0, 0] == 0).all(), "what never changes"
    expected = (x - mean) / (deviation.square() + 1e-5 * 255**2).sqrt()
    assert (seen.double() / PIXEL_STEPS - expected.clamp(-5, 5)).abs().max() <= 0.5 / PIXEL_STEPS + 1e-3
    assert int(normalizer.count) == counted.shape[0]


def test_what_is_rare_is_clamped_at_five_deviations() -> None:
    normalizer, x = PixelNormalizer(spec().leaves[0]), torch.zeros(16, 8, *IMAGE.shape, dtype=torch.uint8)
    normalizer.update(x, torch.ones(16, 8, dtype=torch.bool))
    x[0, 0, 1, 3, 4] = 255
    seen = normalizer(x)
    assert seen[0, 0, 1, 3, 4] == 5 * PIXEL_STEPS
    assert seen.count_nonzero() == 1


def test_before_the_first_update_pixels_are_divided_by_the_largest_value() -> None:
    x = pictures(3)
    seen = PixelNormalizer(spec().leaves[0])(x)
    assert (seen.float() / PIXEL_STEPS - x / 255).abs().max() <= 0.5 / PIXEL_STEPS + 1e-4


def test_steps_that_are_not_valid_do_not_count() -> None:
    one, other = (PixelNormalizer(spec().leaves[0]) for _ in range(2))
    x, valid = pictures(32, 4), torch.ones(32, 4, dtype=torch.bool)
    valid[:, 2:] = False
    one.update(x, valid)
    other.update(x[:, :2], valid[:, :2])
    for found, expected in zip(one.buffers(), other.buffers(), strict=True):
        torch.testing.assert_close(found, expected)


def test_only_pixels_are_normalised_as_asked_for() -> None:
    space = gym.spaces.Dict({"image": IMAGE, "speed": gym.spaces.Box(-1, 1, (3,), np.float32)})
    obs = (pictures(4), torch.randn(4, 3))
    images = ObservationNormalizer(spec(space).leaves, floats=False, images=True)
    for leaf, found, given in zip(images.leaves, images(obs), obs, strict=True):
        assert (leaf.dtype == "int8") == (found.dtype == torch.int8) == (given.dtype == torch.uint8)
    assert images(obs)[1] is obs[1]
    floats = ObservationNormalizer(spec(space).leaves)
    assert floats(obs)[0] is obs[0] and floats.leaves == spec(space).leaves


@pytest.mark.parametrize("encoder", ["auto", "impala_resnet"])
def test_an_image_encoder_reads_normalised_pixels(encoder: str) -> None:
    model = build_model(spec(), ACTION, ModelConfig(normalize_images=True, encoder=encoder))
    x = pictures(16, 2)
    model.normalizer.update((x,), torch.ones(16, 2, dtype=torch.bool))
    params, value, _ = model((x[0],))
    plain = build_model(spec(), ACTION, ModelConfig(encoder=encoder))
    own = {name: tensor for name, tensor in model.state_dict().items() if not name.startswith("normalizer.")}
    plain.load_state_dict(own)
    normalised = (model.normalizer((x[0],))[0].float() / PIXEL_STEPS,)
    for module in plain.modules():
        if hasattr(module, "scale"):
            module.scale = 1.0
    expected = plain(normalised)
    torch.testing.assert_close(params, expected[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(value, expected[1], rtol=1e-4, atol=1e-5)


def test_other_encoders_read_pixels_as_they_are_stored() -> None:
    own = build_model(spec(), ACTION, ModelConfig(normalize_images=True, encoder=Tiny))
    x = pictures(2)
    own((x,))
    assert own.normalizer is None and own.actor.encoders[0].seen is x
    assert own.actor.encoders[0].leaf.dtype == "uint8"
    assert build_model(spec(), ACTION, ModelConfig(normalize_images=True, encoder="mlp")).normalizer is None


def test_images_of_categories_stay() -> None:
    categories = ObservationSpec.from_space(gym.spaces.Box(0, 5, (7, 7, 3), np.uint8))
    assert categories.leaves[0].sizes
    assert build_model(categories, ACTION, ModelConfig(normalize_images=True)).normalizer is None


def test_atari_has_normalised_pixels() -> None:
    assert resolve(Config(env="ALE/Pong-v5")).model.normalize_images
    assert not resolve(Config(env="ALE/Pong-v5", preset="none")).model.normalize_images
