"""What becomes of a space: which numbers are categories, and where an image's channels are."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gymnasium import spaces

from sfactory.errors import ConfigError
from sfactory.spaces import ActionSpec, Leaf, ObservationSpec, Reading
from sfactory.spaces.tensors import action_parts


def leaf_of(space: spaces.Space, **reading) -> Leaf:
    (leaf,) = ObservationSpec.from_space(space, Reading(**reading)).leaves
    return leaf


@pytest.mark.parametrize(
    ("space", "sizes", "start", "dtype"),
    [
        (spaces.Box(0, 4, (2,), int), (5, 5), (0, 0), "int32"),
        (spaces.Box(np.array([0, -2]), np.array([2, 5]), dtype=np.int8), (3, 8), (0, -2), "int32"),
        (spaces.Box(1, 32, (1,), np.uint8), (32,), (1,), "uint8"),
        (spaces.Box(0, 10, (7, 7, 1), np.uint8), (11,) * 49, (0,) * 49, "uint8"),
    ],
)
def test_integers_of_small_bounds_are_categories(space, sizes, start, dtype) -> None:
    leaf = leaf_of(space)
    assert (leaf.sizes, leaf.start, str(leaf.dtype)) == (sizes, start, dtype)


@pytest.mark.parametrize(
    ("space", "dtype", "high"),
    [
        (spaces.Box(0, 255, (84, 84, 4), np.uint8), "uint8", 255),
        (spaces.Box(0, 255, (128,), np.uint8), "uint8", 255),
        (spaces.Box(0, 1, (3,), np.int64), "uint8", 1),
        (spaces.Box(0, 1, (8, 8, 4), bool), "uint8", 1),
        (spaces.Box(0, 32, (3,), np.int64), "float32", 255),
        (spaces.Box(np.iinfo(np.int64).min, np.iinfo(np.int64).max, (3,), np.int64), "float32", 255),
        (spaces.Box(0, 1, (3,), np.float32), "float32", 255),
    ],
)
def test_bits_brightness_and_amounts_are_numbers(space, dtype, high) -> None:
    leaf = leaf_of(space)
    assert (leaf.sizes, str(leaf.dtype), leaf.high) == ((), dtype, high)


def test_the_model_may_say_how_many_categories_wide_bounds_hold() -> None:
    grid, cell = spaces.Box(0, 255, (7, 7, 3), np.uint8), spaces.Box(0, 4, (2,), int)
    assert leaf_of(grid).sizes == ()
    assert leaf_of(grid, categories=11).sizes == (11,) * 147
    assert leaf_of(cell, categories=11).sizes == (5, 5)
    assert leaf_of(cell, categories=0).dtype == np.float32


@pytest.mark.parametrize(
    ("shape", "layout", "sides"),
    [
        ((84, 84, 4), "hwc", (84, 84)),
        ((4, 84, 84), "chw", (84, 84)),
        ((7, 7, 20), "hwc", (7, 7)),
        ((20, 7, 7), "chw", (7, 7)),
        ((210, 160, 3), "hwc", (210, 160)),
        ((3, 210, 160), "chw", (210, 160)),
        ((8, 8, 8), "hwc", (8, 8)),
    ],
)
def test_channels_are_beside_the_sides_of_a_square_or_the_smaller_end(shape, layout, sides) -> None:
    leaf = leaf_of(spaces.Box(0, 255, shape, np.uint8))
    assert (leaf.layout, leaf.sides) == (layout, sides)


def test_the_model_may_say_where_channels_are() -> None:
    space = spaces.Box(0, 255, (9, 12, 20), np.uint8)
    assert leaf_of(space).channels == 9
    assert leaf_of(space, channels="last").channels == 20


def test_nothing_is_an_image_where_all_is_flattened() -> None:
    assert not leaf_of(spaces.Box(0, 255, (84, 84, 4), np.uint8), images=False).is_image
    assert leaf_of(spaces.MultiDiscrete(np.full((7, 7, 2), 5))).is_image
    assert not leaf_of(spaces.MultiDiscrete(np.arange(2, 100).reshape(7, 7, 2))).is_image


MOVES = spaces.Dict(
    {
        "move": spaces.Discrete(3),
        "attack": spaces.Tuple((spaces.Discrete(2), spaces.Box(-1, 1, (2,)), spaces.MultiDiscrete([2, 2]))),
        "aim": spaces.Box(-1, 1, (1,)),
    }
)


@pytest.mark.parametrize(
    "attack",
    [
        (np.array([0, 1]), np.ones(2), np.array([1, 0, 0, 1])),
        (np.array([0, 1]), None, (np.array([1, 0]), np.array([0, 1]))),
        [np.array([0, 1]), np.array([1, 0, 0, 1])],
    ],
    ids=["with the box", "nested", "without the box"],
)
def test_a_mask_in_a_dict_is_read_by_the_names_of_the_space(attack) -> None:
    action = ActionSpec.from_space(MOVES)
    assert [part.path[0] for part in action.parts] == ["aim", "attack", "attack", "attack", "move"]
    mask = {"move": np.array([1, 1, 0]), "attack": attack}
    assert action.flat_mask(mask).astype(int).tolist() == [0, 1, 1, 0, 0, 1, 1, 1, 0]


def test_a_mask_in_a_dict_that_lacks_an_entry_names_it() -> None:
    with pytest.raises(ValueError, match="no 'move'"):
        ActionSpec.from_space(MOVES).flat_mask({"attack": np.ones(6), "moves": np.ones(3)})


@pytest.mark.filterwarnings("error")
def test_bounds_that_are_too_far_apart_for_a_number_count_as_none() -> None:
    most = np.finfo(np.float32)
    low, high = np.array([most.min, most.min, -2], np.float32), np.array([most.max, 5, 4], np.float32)
    action = ActionSpec.from_space(spaces.Box(low, high))
    given = np.array([[0.5, 7.0, 1.0], [-3.0, -9.0, 0.0]], np.float32)
    none = np.zeros((2, 0), np.int32)
    assert action.batch(none, given).tolist() == [[0.5, 5.0, 4.0], [-3.0, -9.0, 1.0]]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_actions_of_a_box_without_bounds_are_finite_in_its_dtype(dtype: type) -> None:
    action = ActionSpec.from_space(spaces.Box(-np.inf, np.inf, (3,), dtype))
    (found,) = action.batch(np.zeros((1, 0), np.int32), np.array([[1e5, -1e5, 3.0]], np.float32))
    ends = np.finfo(dtype)
    assert found.dtype == dtype and found.tolist() == np.clip([1e5, -1e5, 3.0], ends.min, ends.max).tolist()
    (part,) = action_parts(action)
    assert part(torch.zeros(1, 0), torch.tensor([[1e5, -1e5, 3.0]])).tolist() == [found.tolist()]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("nested", [False, True], ids=["bare", "in a dict"])
def test_actions_of_a_box_without_dimensions_are_arrays(nested: bool) -> None:
    box = spaces.Box(-1, 1, ())
    space = spaces.Dict({"force": box, "go": spaces.Discrete(3)}) if nested else box
    action = ActionSpec.from_space(space)
    rows = action.rows(np.ones((2, len(action.sizes)), np.int32), np.array([[0.5], [3.0]], np.float32))
    assert len(rows) == 2 and all(space.contains(row) for row in rows)
    forces = [row["force"] if nested else row for row in rows]
    assert all(type(force) is np.ndarray for force in forces) and forces == [0.5, 1.0]
    assert not nested or {row["go"] for row in rows} == {1}  # numbers, which may be keys


def test_entries_of_one_name_are_refused() -> None:
    box = spaces.Box(-1, 1, (1,))
    with pytest.raises(ConfigError, match="two entries of the observation space have the name obs/a/b"):
        ObservationSpec.from_space(spaces.Dict({"a/b": box, "a": spaces.Dict({"b": box})}))


@pytest.mark.parametrize(
    "space", [spaces.Box(-1, 1, (0,)), spaces.Dict(), spaces.Tuple((spaces.Box(-1, 1, (2, 0)),))], ids=str
)
def test_an_action_space_without_anything_to_choose_is_refused(space):
    with pytest.raises(ConfigError, match=r"the action space .* is empty"):
        ActionSpec.from_space(space)
