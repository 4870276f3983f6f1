"""Random actions are allowed ones, each as often as the others."""

import numpy as np
from gymnasium import spaces

from sfactory.envs.random_play import allowed_categories
from sfactory.spaces import ActionSpec


def test_allowed_categories_are_drawn_equally_often() -> None:
    action = ActionSpec.from_space(spaces.MultiDiscrete([4, 2]))
    masks = np.tile(np.array([[1, 0, 1, 1, 0, 1]], bool), (6000, 1))
    categories = allowed_categories(action, masks, np.random.default_rng(5))
    assert (categories.dtype, categories.shape) == (np.int32, (6000, 2))
    np.testing.assert_allclose(np.bincount(categories[:, 0], minlength=4), [2000, 0, 2000, 2000], atol=200)
    assert (categories[:, 1] == 1).all()


def test_a_box_has_no_categories() -> None:
    action = ActionSpec.from_space(spaces.Box(-1, 1, (2,)))
    assert allowed_categories(action, np.ones((3, 0), bool), np.random.default_rng(5)).shape == (3, 0)
