"""A CUDA graph on the CPU: the operations of some work, put down with the tensors that they read and wrote, and done
again on the same memory.

As in a CUDA graph, whatever Python decides or computes while the work is put down stays as it was, and what would make
the host wait for a value, or depends on one, is an error.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal", "lift_fresh", "unique", "item")
"""Operations that tell the host a value, have results of a size that depends on values, or take numbers from the
host's memory."""


class Waits(RuntimeError):
    """The work waits for the device."""


class NoWaits(TorchDispatchMode):
    """Within it an operation that waits for the device is an error."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        name = func.overloadpacket.__name__
        by_flags = name.startswith("index") and any(
            x.dtype == torch.bool for x in tree_leaves(args[1:]) if isinstance(x, Tensor)
        )
        if name.startswith(WAITS) or (by_flags and name in ("index", "index_put", "index_put_")):
            raise Waits(f"{func} within a recording")
        return func(*args, **(kwargs or {}))


class OneDevice(NoWaits):
    """Within it an operation that brings numbers from the host to the device, or back, is an error too."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self._device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        found = super().__torch_dispatch__(func, types, args, kwargs)
        name, used = func.overloadpacket.__name__, [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        there = [x.device.type == self._device for x in used]
        # Numbers of Python's own travel within a launch, but not where a kernel wants all its tensors on one device.
        travels = name in ("where", "index", "index_put", "gather", "cat", "stack", "copy_", "_to_copy", "addcmul")
        lands = [x.device.type == self._device for x in tree_leaves(found) if isinstance(x, Tensor)]
        if travels and len({*there, *lands}) > 1:
            raise Waits(f"{func} between the host and the device")
        return found


class _Tape(NoWaits):
    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Any, tuple, dict, Any]] = []
        self._overwritten: list[tuple[Tensor, Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        for place, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                written = args[place] if place < len(args) else kwargs.get(argument.name)
                self._overwritten += [(x, x.clone()) for x in tree_leaves(written) if isinstance(x, Tensor)]
        found = super().__torch_dispatch__(func, types, args, kwargs)
        self.operations.append((func, args, kwargs, found))
        return found

    def undo(self) -> None:
        """Make memory what it was, since recording runs nothing."""
        with torch._C._AutoDispatchBelowAutograd():
            for x, before in reversed(self._overwritten):
                x.copy_(before)
        self._overwritten.clear()

    def replay(self) -> None:
        with torch._C._AutoDispatchBelowAutograd():
            for func, args, kwargs, found in self.operations:
                if any(x.alias_info is not None and not x.alias_info.is_write for x in func._schema.returns):
                    continue  # a view, of memory that stays where it is
                for own, new in zip(tree_leaves(found), tree_leaves(func(*args, **kwargs)), strict=True):
                    if isinstance(own, Tensor) and own is not new:
                        own.copy_(new)


def record(work: Callable[[], object], *_: object) -> Callable[[], None]:
    """Stands in for :func:`sfactory.data.cuda_graphs.record`; nothing that work does meanwhile lasts."""
    tape = _Tape()
    try:
        with tape:
            work()
    finally:
        tape.undo()
    return tape.replay
