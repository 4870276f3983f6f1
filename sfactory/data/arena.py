"""The arena: all trajectories of a run in shared memory, written by environments and policies, read by the learner.

One table of fields lists every array with its shape, dtype and writer. Arenas are made from it; the learner's batches
have the same fields.

A slot holds one segment: ``rollout`` steps (T) of one group's rows. Arrays are time-major and contiguous per step,
``[slot, T(+1), rows, ...]``, so that one step of one group is a view. Row T holds the observation whose value
bootstraps the segment.

Concurrent access: one process at a time holds a slot, and it is handed on only by sending the slot's index through a
queue. The slot's ``state`` is always one of

- FREE: in the free queue, or held by the learner's :class:`~sfactory.data.scheduler.SlotReleaser`,
- FILLING: held by a group of a rollout worker; between a request and its answer the policy worker writes step t,
- FINISHED: in the finished queue, or held by the learner.

Only the holder writes ``state``, and the learner releases each slot exactly once.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import numpy as np

from sfactory.data.packing import packed
from sfactory.data.shared_memory import SharedBlock
from sfactory.envs.interface import EnvSpec, Outcome, StepBuffers

FREE, FILLING, FINISHED = 0, 1, 2
OWN_POLICY = 0
"""Number of the policy that a run trains. A run has one policy so far; samples of rows with another owner are left out
of its losses and counts."""


class Field(NamedTuple):
    """One array of a slot.

    Attributes:
        name: Attribute of :class:`Arena`; observation leaves are called ``obs/...``.
        shape: Shape of one entry.
        dtype: NumPy dtype.
        steps: Entries per slot in time: ``T+1``, ``T``, or 1 (once per segment, without a time dimension).
        writer: Who writes the array: environment, rollout worker or policy worker.
        per_row: Whether each row has its own entry; otherwise all rows of a step share one.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    steps: Literal["T+1", "T", "1"]
    writer: Literal["environment", "rollout", "policy"]
    per_row: bool = True


WITHOUT_TIME = ("owner", "rnn_state")
"""Fields of one entry per segment, whose arrays lack the dimension of time."""


def segment_fields(env: EnvSpec, state_size: int) -> tuple[Field, ...]:
    """The fields of a segment.

    Args:
        env: Spaces of the environment.
        state_size: Floats of RNN state per row.
    """
    flag, real, count = np.dtype(bool), np.dtype(np.float32), np.dtype(np.int32)
    fields = [Field(leaf.name, leaf.shape, leaf.dtype, "T+1", "environment") for leaf in env.observation.leaves]
    if env.masked:
        fields.append(Field("mask", (env.action.logits,), flag, "T+1", "environment"))
    return (
        *fields,
        Field("first", (), flag, "T+1", "environment"),
        Field("active", (), flag, "T+1", "environment"),
        Field("reward", (), real, "T", "environment"),
        Field("terminated", (), flag, "T", "environment"),
        Field("truncated", (), flag, "T", "environment"),
        Field("final_change", (), real, "T", "rollout"),
        Field("owner", (), count, "1", "rollout"),
        Field("categorical", (len(env.action.sizes),), count, "T", "policy"),
        Field("continuous", (env.action.continuous,), real, "T", "policy"),
        Field("log_prob", (), real, "T", "policy"),
        Field("value", (), real, "T+1", "policy"),
        Field("rnn_state", (state_size,), real, "1", "policy"),
        Field("version", (), np.dtype(np.int64), "T", "policy", per_row=False),
    )


class Arena:
    """All slots of a run, in shared memory: an array for each field of a segment, and three of the slots' own.

    Args:
        fields: Fields of a segment.
        slots: Number of slots.
        rollout: T, env steps per row in a segment.
        rows: Rows of a group.

    Attributes:
        arrays: Those of the segments by the names of their fields; the next ones, up to `version`, are the same arrays.
        obs: One array per observation leaf ``[slots, T+1, rows, *leaf.shape]``.
        mask: bool ``[slots, T+1, rows, logits]`` of allowed actions, or None.
        first: bool ``[slots, T+1, rows]``; the observation is the first of its episode.
        active: bool ``[slots, T+1, rows]``; the action has an effect, so the sample counts.
        reward: float32 ``[slots, T, rows]``, reward of the action.
        terminated, truncated: bool ``[slots, T, rows]``, episode end after the action.
        final_change: float32 ``[slots, T, rows]``; the behaviour policy's V(final_obs) - V(x_t), in units of return, of
            rows truncated in an environment that had already reset itself. NaN elsewhere; there V(final_obs) is the
            value at t+1.
        owner: int32 ``[slots, rows]``, number of the policy that owns the row. The design provides for several
            policies; so far every row belongs to :data:`OWN_POLICY`.
        categorical, continuous: Actions, int32 ``[slots, T, rows, K]`` and float32 ``[slots, T, rows, D]``.
        log_prob: float32 ``[slots, T, rows]``, log probability of the action under the behaviour policy.
        value: float32 ``[slots, T+1, rows]``, the behaviour policy's value in units of return; step T only where it was
            requested. The learner computes its own values.
        rnn_state: float32 ``[slots, rows, S]`` before the first step, not yet zeroed where an episode begins.
        version: int64 ``[slots, T]``, version of the policy that chose the actions.
        state: int8 ``[slots]``: FREE, FILLING or FINISHED.
        begun: int64 ``[slots]``: lower bound for the policy versions of the slot's samples.
        finished_s: float64 ``[slots]``: time at which the slot was last filled, in monotonic seconds.
    """

    arrays: dict[str, np.ndarray]
    obs: tuple[np.ndarray, ...]
    mask: np.ndarray | None
    first: np.ndarray
    active: np.ndarray
    reward: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    final_change: np.ndarray
    owner: np.ndarray
    categorical: np.ndarray
    continuous: np.ndarray
    log_prob: np.ndarray
    value: np.ndarray
    rnn_state: np.ndarray
    version: np.ndarray
    state: np.ndarray
    begun: np.ndarray
    finished_s: np.ndarray

    def __init__(self, fields: tuple[Field, ...], slots: int, rollout: int, rows: int) -> None:
        self._build(fields, slots, rollout, rows, SharedBlock(max(1, arena_bytes(fields, slots, rollout, rows))))
        self.state[:] = FREE

    def _build(self, fields: tuple[Field, ...], slots: int, rollout: int, rows: int, block: SharedBlock) -> None:
        layout, _ = _layout(fields, slots, rollout, rows)
        arrays = {name: block.array(shape, dtype, offset) for name, shape, dtype, offset in layout}
        self.state, self.begun, self.finished_s = (
            arrays.pop(f"slot_{name}") for name in ("state", "begun", "finished_s")
        )
        self.slots, self.rollout, self.rows = slots, rollout, rows
        self._recipe = fields, slots, rollout, rows, block
        self.arrays, self.mask = arrays, None
        self.obs = tuple(array for name, array in arrays.items() if name.startswith("obs"))
        vars(self).update((name, array) for name, array in arrays.items() if not name.startswith("obs"))

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild_arena, self._recipe

    def step_buffers(self, slot: int, t: int) -> StepBuffers:
        """Views of the arrays that the environment writes and the policy reads at step t."""
        mask = None if self.mask is None else self.mask[slot, t]
        return StepBuffers(tuple(leaf[slot, t] for leaf in self.obs), mask, self.first[slot, t], self.active[slot, t])

    def outcome(self, slot: int, t: int) -> Outcome:
        """Views of the arrays for the results of the actions of step t."""
        return Outcome(self.reward[slot, t], self.terminated[slot, t], self.truncated[slot, t])


def _rebuild_arena(fields: tuple[Field, ...], slots: int, rollout: int, rows: int, block: SharedBlock) -> Arena:
    arena = Arena.__new__(Arena)
    arena._build(fields, slots, rollout, rows, block)
    return arena


def _layout(fields: tuple[Field, ...], slots: int, rollout: int, rows: int) -> tuple[list[tuple], int]:
    """(name, shape, dtype, offset in bytes) of every array, and the size of the block in bytes."""
    steps = {"T+1": (rollout + 1,), "T": (rollout,), "1": ()}
    arrays = [(f.name, (slots, *steps[f.steps], *((rows,) if f.per_row else ()), *f.shape), f.dtype) for f in fields]
    own = (("state", np.int8), ("begun", np.int64), ("finished_s", np.float64))
    arrays += [(f"slot_{name}", (slots,), np.dtype(kind)) for name, kind in own]
    places, size = packed(array[1:] for array in arrays)
    return [(*array, begin) for array, (begin, _) in zip(arrays, places, strict=True)], size


def arena_bytes(fields: tuple[Field, ...], slots: int, rollout: int, rows: int) -> int:
    """Bytes of shared memory of an arena once all of it has been written."""
    return _layout(fields, slots, rollout, rows)[1]
