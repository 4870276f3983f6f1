"""Batches hold exactly what their slots hold, in the learner's order."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from arenas import make_arena

from sfactory.data.arena import WITHOUT_TIME, Arena
from sfactory.data.batch import Assembler, Batch, Targets

CPU = torch.device("cpu")


def random_arena(masked: bool = True) -> Arena:
    """An arena whose every entry is random."""
    arena, rng = make_arena(slots=5, masked=masked), np.random.default_rng(0)
    for f in dataclasses.fields(Batch):
        value = getattr(arena, f.name)
        for array in value if isinstance(value, tuple) else () if value is None else (value,):
            array[...] = rng.integers(0, 2 if array.dtype == bool else 100, array.shape)
    return arena


def expected(name: str, array: np.ndarray, slots: list[int]) -> np.ndarray:
    """The rows of all slots side by side, after the dimension of time."""
    return np.concatenate(array[slots], axis=0 if name in WITHOUT_TIME else 1)


def check(batch: Batch, arena: Arena, slots: list[int]) -> None:
    for f in dataclasses.fields(Batch):
        got, source = getattr(batch, f.name), getattr(arena, f.name)
        if source is None:
            assert got is None
            continue
        pairs = zip(got, source, strict=True) if isinstance(source, tuple) else [(got, source)]
        for tensor, array in pairs:
            np.testing.assert_array_equal(tensor.numpy(), expected(f.name, array, slots))


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("staged", [True, False])
@pytest.mark.parametrize("slots", [[3], [4, 0, 2]], ids=str)
def test_a_batch_is_what_its_slots_hold(slots: list[int], staged: bool, masked: bool):
    arena = random_arena(masked)
    assemble = Assembler(arena, len(slots), CPU, staged)
    check(assemble(slots), arena, slots)
    others = [(slot + 1) % 5 for slot in slots]
    check(assemble(others), arena, others)


def test_batches_stand_beside_each_other():
    arena = random_arena()
    assemble = Assembler(arena, 2, CPU)
    first = assemble([3, 1]).copy()
    check(first.beside(assemble([4, 0])), arena, [3, 1, 4, 0])


def test_a_copied_batch_outlives_its_slots_and_a_view_does_not():
    arena = random_arena()
    several, single = Assembler(arena, 2, CPU), Assembler(arena, 1, CPU)
    assert (several.is_view, single.is_view) == (False, True)
    batch, view = several([1, 2]), single([1])
    before = batch.reward.clone()
    arena.reward[:] = -1
    assert torch.equal(batch.reward, before)
    assert (view.reward == -1).all()


def test_columns_keep_what_belongs_together():
    """A column has the observations, state, owner, actions and mask of one row."""
    arena = random_arena()
    batch = Assembler(arena, 2, CPU)([0, 3])
    columns = torch.tensor([7, 1])
    part = batch.select(columns)
    for i, column in enumerate(columns.tolist()):
        slot, row = (0, 3)[column // 5], column % 5
        assert np.array_equal(part.obs[0][:, i], arena.obs[0][slot, :, row])
        assert np.array_equal(part.obs[1][:, i], arena.obs[1][slot, :, row])
        assert np.array_equal(part.mask[:, i], arena.mask[slot, :, row])
        assert np.array_equal(part.rnn_state[i], arena.rnn_state[slot, row])
        assert part.owner[i] == arena.owner[slot, row]
    (image, pos), first, state = batch.inputs(columns)
    categorical, continuous, mask = batch.actions(columns)
    assert torch.equal(image, part.obs[0]) and torch.equal(pos, part.obs[1])
    assert torch.equal(first, part.first) and torch.equal(state, part.rnn_state)
    assert torch.equal(categorical, part.categorical) and torch.equal(continuous, part.continuous)
    assert torch.equal(mask, part.mask[:-1]), "the last observation has no action"


def test_single_samples_keep_their_action_mask_and_target():
    batch = Assembler(random_arena(), 2, CPU)([0, 3])
    steps, columns = batch.reward.shape
    targets = Targets(*(batch.reward + i for i, _ in enumerate(dataclasses.fields(Targets))))
    whole, single = batch.samples(targets, single=False), batch.samples(targets, single=True)
    assert whole.first.shape == (steps, columns) and single.first.shape == (1, steps * columns)
    for t in range(steps):
        for column in range(columns):
            i = t * columns + column
            assert all(torch.equal(a[t, column], b[0, i]) for a, b in zip(whole.obs, single.obs, strict=True))
            assert torch.equal(whole.mask[t, column], single.mask[0, i])
            assert torch.equal(whole.categorical[t, column], single.categorical[0, i])
            assert torch.equal(whole.continuous[t, column], single.continuous[0, i])
            name = dataclasses.fields(Targets)[0].name
            assert getattr(whole.targets, name)[t, column] == getattr(single.targets, name)[0, i]
    assert single.rnn_state.shape == (steps * columns, batch.rnn_state.shape[1])


def test_a_model_without_memory_gets_no_state():
    arena = make_arena(slots=2)
    columns, without = slice(0, 5), np.zeros((*arena.rnn_state.shape[:-1], 0), np.float32)
    batch = Assembler(arena, 2, CPU)([0, 1])
    assert batch.inputs(columns)[2] is not None
    assert dataclasses.replace(batch, rnn_state=torch.from_numpy(without).flatten(0, 1)).inputs(columns)[2] is None
