"""The arena: one memory for all processes, in which nothing overlaps."""

from __future__ import annotations

import multiprocessing
import os

import numpy as np
from arenas import STATE_SIZE, env_spec, make_arena

from sfactory.data.arena import FILLING, FINISHED, FREE, WITHOUT_TIME, Arena, arena_bytes, segment_fields
from sfactory.data.queues import LocalQueue
from sfactory.data.scheduler import reclaim_slots

SPAWN = multiprocessing.get_context("spawn")


def test_every_field_has_its_own_aligned_memory():
    arena = make_arena()
    fields = segment_fields(env_spec(), STATE_SIZE)
    arrays = [*arena.obs, *(getattr(arena, f.name) for f in fields if not f.name.startswith("obs"))]
    assert {id(array) for array in arrays} == {id(array) for array in arena.arrays.values()}
    assert {f.name for f in fields if f.steps == "1"} == {*WITHOUT_TIME}
    for number, array in enumerate(arrays):
        assert array.ctypes.data % 64 == 0
        array[...] = array.dtype.type(number % 2)
    for number, array in enumerate(arrays):
        assert (array == array.dtype.type(number % 2)).all()
    assert arena.obs[0].shape == (3, 5, 5, 3, 8, 8)
    assert arena.rnn_state.shape == (3, 5, STATE_SIZE)
    assert arena.version.shape == (3, 4)


def test_one_step_of_a_group_is_a_contiguous_view():
    arena = make_arena()
    buffers, outcome = arena.step_buffers(1, 2), arena.outcome(1, 2)
    assert all(
        leaf.flags.c_contiguous and np.shares_memory(leaf, whole)
        for leaf, whole in zip(buffers.obs, arena.obs, strict=True)
    )
    buffers.obs[1][:] = 3.0
    outcome.reward[:] = 2.0
    assert (arena.obs[1][1, 2] == 3.0).all()
    assert (arena.reward[1, 2] == 2.0).all()
    assert (arena.reward[1, 1] == 0.0).all()


def _fill(arena: Arena, slot: int) -> None:
    arena.reward[slot] = slot + 0.5
    arena.state[slot] = FINISHED


def test_an_arena_is_the_same_memory_in_another_process_and_has_no_name():
    before = set(os.listdir("/dev/shm"))
    arena = make_arena()
    process = SPAWN.Process(target=_fill, args=(arena, 2))
    process.start()
    process.join()
    assert process.exitcode == 0
    assert (arena.reward[2] == 2.5).all()
    assert arena.state.tolist() == [FREE, FREE, FINISHED]
    assert set(os.listdir("/dev/shm")) <= before


def test_arena_bytes_grow_with_slots():
    fields = segment_fields(env_spec(), 0)
    assert arena_bytes(fields, 20, 4, 5) > 1.9 * arena_bytes(fields, 10, 4, 5)


def test_every_slot_is_in_one_state_and_in_the_free_queue_once_after_a_reclaim():
    """As a death leaves them: one free slot lost with its reader, one being filled, one full but not yet sent."""
    arena, free = make_arena(slots=6), LocalQueue()
    reclaim_slots(arena, free, [])
    assert sorted(free.get_many(0)) == [0, 1, 2, 3, 4, 5]
    assert (arena.state == FREE).all()
    arena.state[[1, 2, 4]] = FILLING
    arena.state[[3, 4]] = FINISHED
    free.put_many([0])
    reclaim_slots(arena, free, [3])
    assert sorted(free.get_many(0)) == [0, 1, 2, 4, 5], "every slot but the learner's, and none twice"
    assert arena.state.tolist() == [FREE, FREE, FREE, FINISHED, FREE, FREE]


def test_an_arena_without_masks_has_none():
    arena = make_arena(masked=False)
    assert arena.mask is None
    assert arena.step_buffers(0, 0).mask is None
    names = {f.name for f in segment_fields(env_spec(masked=False), STATE_SIZE)}
    assert "mask" not in names and {"obs/image", "obs/pos"} <= names
