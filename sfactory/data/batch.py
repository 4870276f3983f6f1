"""Training batches: finished segments side by side, as tensors on the learner's device.

A batch has the fields of :class:`sfactory.data.arena.Arena` that the learner needs, time-major with the rows of all
segments as columns: ``[T(+1), B, ...]``. Once its targets are known, its first T steps become :class:`Samples`, from
which minibatches are drawn.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from sfactory.data.arena import WITHOUT_TIME, Arena
from sfactory.data.chunks import Columns, select_columns
from sfactory.data.staging import DoubleBuffer, StagingBuffer


def column_dim(name: str) -> int:
    """The dimension of a batch's field in which its columns lie."""
    return 0 if name in WITHOUT_TIME else 1


@dataclass(frozen=True)
class Batch:
    """Finished segments as tensors.

    T is the segment length, B the number of columns.

    Attributes:
        obs: One tensor ``[T+1, B, *leaf.shape]`` per leaf.
        mask: bool ``[T+1, B, logits]``, or None.
        first: bool ``[T+1, B]``.
        active: bool ``[T+1, B]``.
        reward, terminated, truncated, final_change, log_prob: ``[T, B]``.
        categorical, continuous: ``[T, B, K]`` and ``[T, B, D]``.
        rnn_state: float32 ``[B, S]``.
        owner: int32 ``[B]``.
    """

    obs: tuple[Tensor, ...]
    mask: Tensor | None
    first: Tensor
    active: Tensor
    reward: Tensor
    terminated: Tensor
    truncated: Tensor
    final_change: Tensor
    log_prob: Tensor
    categorical: Tensor
    continuous: Tensor
    rnn_state: Tensor
    owner: Tensor

    @property
    def all_columns(self) -> slice:
        return slice(0, self.first.shape[1])

    def inputs(self, columns: Columns) -> tuple[tuple[Tensor, ...], Tensor, Tensor | None]:
        """Inputs of the network for some columns: observations ``[T+1, n, ...]``, ``first [T+1, n]`` and RNN states
        ``[n, S]``, or None where the model has none."""
        return _inputs(self, columns)

    def actions(self, columns: Columns) -> tuple[Tensor, Tensor, Tensor | None]:
        """Actions of some columns, categorical ``[T, n, K]`` and continuous ``[T, n, D]``, and the masks ``[T, n,
        logits]`` or None."""
        categorical, continuous = (select_columns(x, columns, 1) for x in (self.categorical, self.continuous))
        return categorical, continuous, None if self.mask is None else select_columns(self.mask[:-1], columns, 1)

    def select(self, columns: Columns) -> Batch:
        """The given columns as a batch; views for a slice."""
        return Batch.of(
            {name: select_columns(tensor, columns, column_dim(name)) for name, tensor in self.tensors().items()}
        )

    def beside(self, other: Batch) -> Batch:
        """A batch of this one's columns, and then the other's."""
        more = other.tensors()
        return Batch.of(
            {name: torch.cat((tensor, more[name]), column_dim(name)) for name, tensor in self.tensors().items()}
        )

    def copy(self) -> Batch:
        """The same numbers in memory of their own."""
        return Batch.of({name: tensor.clone() for name, tensor in self.tensors().items()})

    def to(self, device: torch.device) -> Batch:
        """The same numbers on a device."""
        return Batch.of({name: tensor.to(device) for name, tensor in self.tensors().items()})

    def tensors(self) -> dict[str, Tensor]:
        """All tensors by name; those of the observation are ``obs0``, ``obs1`` and so on."""
        named = {name: value for name, value in vars(self).items() if name != "obs" and value is not None}
        return {f"obs{i}": leaf for i, leaf in enumerate(self.obs)} | named

    @staticmethod
    def of(tensors: dict[str, Tensor]) -> Batch:
        """A batch of what :meth:`tensors` gives."""
        obs = tuple(tensor for name, tensor in tensors.items() if name.startswith("obs"))
        others: list[Any] = [tensors.get(f.name) for f in _FIELDS[1:]]
        return Batch(obs, *others)

    def samples(self, targets: Targets, single: bool) -> Samples:
        """The T steps that the policy is trained on, as views of this batch.

        Args:
            targets: Targets ``[T, B]``.
            single: Make every sample a column of its own, ``[1, T B]``. Valid for networks without memory, whose
                samples do not depend on the step before.
        """
        obs, mask = tuple(leaf[:-1] for leaf in self.obs), None if self.mask is None else self.mask[:-1]
        if not single:
            first, actions = self.first[:-1], (self.categorical, self.continuous)
            return Samples(obs, mask, first, self.rnn_state, *actions, self.reward, targets)

        def flat(x: Tensor) -> Tensor:
            return x.flatten(0, 1)[None]

        first, mask = flat(self.first[:-1]), None if mask is None else flat(mask)
        state = self.rnn_state.new_zeros(first.shape[1], self.rnn_state.shape[1])
        actions = flat(self.categorical), flat(self.continuous)
        return Samples(tuple(map(flat, obs)), mask, first, state, *actions, flat(self.reward), targets.flat())


_FIELDS = dataclasses.fields(Batch)


class BatchSource(Protocol):
    """What a learner's batches are made of; a user's own is named by ``batch_source`` as a callable that takes the
    number of fresh columns and the Config.

    Attributes:
        columns: Columns of every batch that it makes.
    """

    columns: int

    def __call__(self, fresh: Batch) -> Batch:
        """A batch whose first columns are the fresh ones, and which may have others behind them.

        Args:
            fresh: Segments that no batch has had, on the learner's device; valid until the next call, so what is to be
                kept must be copied.
        """


class FreshOnly:
    """The batch source of a run that does not name one: finished segments, each in one batch."""

    def __init__(self, columns: int) -> None:
        self.columns = columns

    def __call__(self, fresh: Batch) -> Batch:
        return fresh


@dataclass(frozen=True)
class Targets:
    """What the policy and the critic are held against in all epochs over a batch; constants, without gradients.

    Attributes:
        advantages: float ``[T, B]``; what multiplies the ratio: normalised first, and then multiplied by V-trace's
            weight.
        returns: float ``[T, B]``; value targets in the critic's own (normalised) units.
        old_values: float ``[T, B]``; of the proximal policy's critic in the same units, read only with value clipping.
        old_log_prob: float ``[T, B]``; log pi_prox(a_t|x_t).
        log_weights: float ``[T, B]``; log pi_prox(a_t|x_t) - log mu(a_t|x_t).
        valid: bool ``[T, B]``; samples to learn from. The entries of all other samples are never used, whatever they
            hold.
    """

    advantages: Tensor
    returns: Tensor
    old_values: Tensor
    old_log_prob: Tensor
    log_weights: Tensor
    valid: Tensor

    def select(self, columns: Columns) -> Targets:
        """Those of some columns."""
        return Targets(
            **{field.name: select_columns(getattr(self, field.name), columns, 1) for field in dataclasses.fields(self)}
        )

    def flat(self) -> Targets:
        """The same with every sample as a column of its own: ``[1, T B]``."""
        return Targets(**{field.name: getattr(self, field.name).reshape(1, -1) for field in dataclasses.fields(self)})


@dataclass(frozen=True)
class Samples:
    """Samples with their targets, from which minibatches are drawn. Each column holds consecutive steps.

    Attributes:
        obs: One tensor ``[T, B, *leaf.shape]`` per leaf.
        mask: bool ``[T, B, logits]``, or None.
        first: bool ``[T, B]``.
        rnn_state: float32 ``[B, S]`` before the first step.
        categorical, continuous: ``[T, B, K]`` and ``[T, B, D]``.
        reward: ``[T, B]``, the environment's own.
        targets: Targets ``[T, B]``.
    """

    obs: tuple[Tensor, ...]
    mask: Tensor | None
    first: Tensor
    rnn_state: Tensor
    categorical: Tensor
    continuous: Tensor
    reward: Tensor
    targets: Targets

    def inputs(self, columns: Columns) -> tuple[tuple[Tensor, ...], Tensor, Tensor | None]:
        """As :meth:`Batch.inputs`."""
        return _inputs(self, columns)

    def actions(self, columns: Columns) -> tuple[Tensor, Tensor, Tensor | None]:
        """As :meth:`Batch.actions`."""
        categorical, continuous = (select_columns(x, columns, 1) for x in (self.categorical, self.continuous))
        return categorical, continuous, None if self.mask is None else select_columns(self.mask, columns, 1)


def _inputs(samples: Batch | Samples, columns: Columns) -> tuple[tuple[Tensor, ...], Tensor, Tensor | None]:
    obs = tuple(select_columns(leaf, columns, 1) for leaf in samples.obs)
    state = select_columns(samples.rnn_state, columns, 0) if samples.rnn_state.shape[-1] else None
    return obs, select_columns(samples.first, columns, 1), state


class Assembler:
    """Makes batches of a fixed number of segments.

    On the CPU a batch of one segment is a view of its slot. Other batches are copied slot by slot into a buffer that is
    reused. For CUDA the buffer is pinned, and one asynchronous copy moves all fields to the device while it still
    computes on the previous batch; the slots may be released as soon as the call returns.

    Args:
        arena: Arena of the segments.
        segments: Segments per batch.
        device: Device of the batches.
        staged: Whether batches are copied through a staging buffer; None: on CUDA only.

    Attributes:
        is_view: Whether batches are views of slots, which must not be released while the batch is in use.
    """

    def __init__(self, arena: Arena, segments: int, device: torch.device, staged: bool | None = None) -> None:
        staged = device.type == "cuda" if staged is None else staged
        self._arena, self._segments = arena, segments
        self.is_view = segments == 1 and not staged
        sources = {f.name: getattr(arena, f.name) for f in _FIELDS if f.name != "obs"}
        sources |= {f"obs{i}": leaf for i, leaf in enumerate(arena.obs)}
        self._sources: dict[str, np.ndarray] = {name: array for name, array in sources.items() if array is not None}
        shapes = [(self._shape(name, array), array.dtype) for name, array in self._sources.items()]
        self._turns = DoubleBuffer(shapes, device) if staged else None
        self._kept = None if self.is_view or staged else StagingBuffer(shapes, device, staged=False)

    def __call__(self, slots: list[int]) -> Batch:
        """The batch of the given slots; valid until the next call, and where it is a view, as long as the slot is not
        given back."""
        packed = self._kept if self._turns is None else self._turns.next()
        if packed is None:
            return self._batch([torch.from_numpy(array[slots[0]]) for array in self._sources.values()])
        for (name, source), target in zip(self._sources.items(), packed.arrays, strict=True):
            self._gather(name, source, target, slots)
        if self._turns is not None:
            self._turns.upload()
        return self._batch(packed.tensors)

    def _batch(self, tensors: list[Tensor]) -> Batch:
        return Batch.of(dict(zip(self._sources, tensors, strict=True)))

    def _shape(self, name: str, source: np.ndarray) -> tuple[int, ...]:
        rows = self._arena.rows * self._segments
        return (source.shape[1], rows, *source.shape[3:]) if column_dim(name) else (rows, *source.shape[2:])

    def _gather(self, name: str, source: np.ndarray, target: np.ndarray, slots: list[int]) -> None:
        rows = self._arena.rows
        for i, slot in enumerate(slots):
            part = slice(i * rows, (i + 1) * rows)
            if column_dim(name):
                target[:, part] = source[slot]
            else:
                target[part] = source[slot]
