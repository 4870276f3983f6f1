"""Low-precision copies of weights at fixed addresses, for recorded forward passes. They are refreshed once per policy
version instead of in every pass. On the CPU, modules of sfactory's own keep copies in oneDNN's order
(:mod:`sfactory.kernels.lowered`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from sfactory.model.layers import Dense

_PLAIN = (nn.Linear, Dense, nn.Conv2d)
"""Modules that use their weights for one product, and for nothing else."""
Answer = Callable[[dict[str, Tensor]], Sequence[Tensor]]
"""What a model gives under autocast with other tensors in the place of some of its parameters, by their names."""


class CastWeights:
    """Copies of those weights that autocast would cast, in memory that stays where it is.

    Args:
        model: Whose weights they are.
        dtype: Autocast's; None: there are no copies.
        answer: Shows which modules run in which dtype, and whether answers with copies are the same: a model of the
            user's may use its weights for something else, too. Then there are no copies.
        tolerance: Largest difference of an answer that still counts as the same.

    Attributes:
        copies: By the parameters' names, for ``torch.func.functional_call``; those of convolutions in channels-last
            order, in which images come.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype | None, answer: Answer, tolerance: float) -> None:
        self.copies: dict[str, Tensor] = {}
        self._own: list[Tensor] = []
        if dtype is None:
            return
        with _watched(model) as (under, outside):
            expected = answer({})
        own = {
            name: weight.detach()
            for name, weight in model.named_parameters()
            if name.rpartition(".")[0] in under - outside
        }
        copies = {name: _cast(weight, dtype) for name, weight in own.items()}
        try:
            same = all(
                torch.allclose(*pair, rtol=tolerance, atol=tolerance)
                for pair in zip(answer(copies), expected, strict=True)
            )
        except RuntimeError:
            same = False
        if same:
            self.copies, self._own = copies, list(own.values())

    def refresh(self) -> None:
        """Take over the model's present weights."""
        for copy, own in zip(self.copies.values(), self._own, strict=True):
            copy.copy_(own)


def _cast(weight: Tensor, dtype: torch.dtype) -> Tensor:
    return weight.to(dtype, memory_format=torch.channels_last if weight.dim() == 4 else torch.preserve_format)


@contextmanager
def _watched(model: nn.Module) -> Iterator[tuple[set[str], set[str]]]:
    """Collects the names of the plain modules that are called under autocast, and outside of it."""
    under, outside = set[str](), set[str]()

    def noting(name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def note(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            (under if torch.is_autocast_enabled(inputs[0].device.type) else outside).add(name)

        return note

    plain = [(name, module) for name, module in model.named_modules() if type(module) in _PLAIN]
    hooks = [module.register_forward_pre_hook(noting(name)) for name, module in plain]
    try:
        yield under, outside
    finally:
        for hook in hooks:
            hook.remove()
