"""The arena: every trajectory of a run, in shared memory, from the environment's write to the learner's read.

One spec table names every array, its shape, dtype and writer. Arenas are made from it; the learner's batches have the
same fields.

A slot holds one segment: ``rollout`` steps (T) of one group's rows. Arrays are time-major and contiguous per step,
``[slot, T(+1), rows, ...]``, so that one step of one group is a view. Row T holds the observation whose value
bootstraps the segment.

Contract of concurrent access: a slot has one owner at a time, told by ``state``; it passes on only with the slot's
    index in a queue. FREE      in the free queue, or about to be
    FILLING   a rollout worker's group; between a request and its answer, the policy worker that serves it writes step t
    FINISHED  in the finished queue or the learner's
Only the present owner writes ``state``. Every slot is in exactly one state at all times, and the learner returns each
slot exactly once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from sfactory.data.shared_memory import SharedBlock
from sfactory.envs.interface import EnvSpec, Outcome, StepBuffers

FREE, FILLING, FINISHED = 0, 1, 2
OWN_POLICY = 0
"""Number of the policy that a run trains. A run has one policy so far; samples of rows with another owner are left out
of its losses and counts."""
ALIGNMENT = 64


class Field(NamedTuple):
    """One array of a slot.

    Attributes:
        name: Attribute of :class:`Segments`; observation leaves are called ``obs/...``.
        shape: Of one entry.
        dtype: NumPy dtype.
        steps: Entries per slot in time: ``T+1``, ``T``, or 1 (once a segment, without a time dimension).
        writer: The kind of worker that writes it.
        per_row: Whether each row has its own entry; else all rows of a step share one.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    steps: Literal["T+1", "T", "1"]
    writer: Literal["environment", "rollout", "policy"]
    per_row: bool = True


def segment_fields(env: EnvSpec, state_size: int) -> tuple[Field, ...]:
    """The spec table for an environment and a model with `state_size` floats of RNN state per row."""
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
        Field("final_value", (), real, "T", "rollout"),
        Field("owner", (), count, "1", "rollout"),
        Field("categorical", (len(env.action.sizes),), count, "T", "policy"),
        Field("continuous", (env.action.continuous,), real, "T", "policy"),
        Field("log_prob", (), real, "T", "policy"),
        Field("value", (), real, "T+1", "policy"),
        Field("rnn_state", (state_size,), real, "1", "policy"),
        Field("version", (), np.dtype(np.int64), "T", "policy", per_row=False),
    )


@dataclass(frozen=True)
class Segments:
    """The arrays of the spec table; in the arena with a leading slot dimension.

    Attributes:
        obs: One array per observation leaf ``[..., T+1, rows, *leaf.shape]``.
        mask: bool ``[..., T+1, rows, logits]`` of allowed actions, or None.
        first: bool ``[..., T+1, rows]``; an episode's first observation.
        active: bool ``[..., T+1, rows]``; the action has an effect, so the sample counts.
        reward, terminated, truncated: ``[..., T, rows]`` of the step that followed.
        final_value: float32 ``[..., T, rows]``; the behaviour policy's V(final_obs), in units of return, of rows
            truncated in an environment that had already reset itself; NaN elsewhere: there V(final_obs) is the value at
            t+1.
        owner: int32 ``[..., rows]``; the policy that owns the row.
        categorical, continuous: actions, int32 ``[..., T, rows, K]`` and float32 ``[..., T, rows, D]``.
        log_prob: of the behaviour policy, float32 ``[..., T, rows]``.
        value: likewise, in units of return ``[..., T+1, rows]`` (row T only where asked for); the learner takes its
            own.
        rnn_state: float32 ``[..., rows, S]`` before the first step, not yet reset.
        version: int64 ``[..., T]``; the policy version that chose the actions.
    """

    obs: tuple[np.ndarray, ...]
    mask: np.ndarray | None
    first: np.ndarray
    active: np.ndarray
    reward: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    final_value: np.ndarray
    owner: np.ndarray
    categorical: np.ndarray
    continuous: np.ndarray
    log_prob: np.ndarray
    value: np.ndarray
    rnn_state: np.ndarray
    version: np.ndarray


class Arena(Segments):
    """All slots of a run's policy.

    Args:
        fields: The spec table.
        slots: Number of slots.
        rollout: T, env steps per row in a segment.
        rows: Rows of a group.
    """

    state: np.ndarray
    """int8 ``[slots]``: FREE, FILLING or FINISHED."""
    begun: np.ndarray
    """int64 ``[slots]``: no sample of the slot was made by an older policy version than this."""
    finished_s: np.ndarray
    """float64 ``[slots]``: when the slot was last full, in monotonic seconds."""

    def __init__(self, fields: tuple[Field, ...], slots: int, rollout: int, rows: int) -> None:
        self._build(fields, slots, rollout, rows, SharedBlock(arena_bytes(fields, slots, rollout, rows)))
        self.state[:] = FREE

    def _build(self, fields: tuple[Field, ...], slots: int, rollout: int, rows: int, block: SharedBlock) -> None:
        layout, _ = _layout(fields, slots, rollout, rows)
        arrays = {name: block.array(shape, dtype, offset) for name, shape, dtype, offset in layout}
        own = {name: arrays.pop(f"slot_{name}") for name in ("state", "begun", "finished_s")}
        own |= {"slots": slots, "rollout": rollout, "rows": rows}
        obs = tuple(arrays.pop(field.name) for field in fields if field.name.startswith("obs"))
        for name, value in {**own, "_recipe": (fields, slots, rollout, rows, block)}.items():
            object.__setattr__(self, name, value)
        super().__init__(obs=obs, mask=arrays.pop("mask", None), **arrays)

    def __reduce__(self):
        return _rebuild_arena, self._recipe

    def step_buffers(self, slot: int, t: int) -> StepBuffers:
        """The arrays that the environment writes and the policy reads at step t."""
        mask = None if self.mask is None else self.mask[slot, t]
        return StepBuffers(tuple(leaf[slot, t] for leaf in self.obs), mask, self.first[slot, t], self.active[slot, t])

    def outcome(self, slot: int, t: int) -> Outcome:
        """The arrays that the environment writes about the actions of step t."""
        return Outcome(self.reward[slot, t], self.terminated[slot, t], self.truncated[slot, t])


def _rebuild_arena(fields: tuple[Field, ...], slots: int, rollout: int, rows: int, block: SharedBlock) -> Arena:
    arena = Arena.__new__(Arena)
    arena._build(fields, slots, rollout, rows, block)
    return arena


def _layout(fields: tuple[Field, ...], slots: int, rollout: int, rows: int) -> tuple[list[tuple], int]:
    """(name, shape, dtype, offset) of every array, and the block's size in bytes."""
    steps = {"T+1": (rollout + 1,), "T": (rollout,), "1": ()}
    arrays = [(f.name, (slots, *steps[f.steps], *((rows,) if f.per_row else ()), *f.shape), f.dtype) for f in fields]
    own = (("state", np.int8), ("begun", np.int64), ("finished_s", np.float64))
    arrays += [(f"slot_{name}", (slots,), np.dtype(kind)) for name, kind in own]
    layout, offset = [], 0
    for name, shape, dtype in arrays:
        layout.append((name, shape, dtype, offset))
        size = math.prod(map(int, shape)) * dtype.itemsize
        offset += -(-size // ALIGNMENT) * ALIGNMENT
    return layout, offset


def arena_bytes(fields: tuple[Field, ...], slots: int, rollout: int, rows: int) -> int:
    """Bytes of shared memory that an arena takes once all of it has been written."""
    return _layout(fields, slots, rollout, rows)[1]
