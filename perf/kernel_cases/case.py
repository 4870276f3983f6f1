"""A kernel at one size, with the implementations that must agree."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

ROWS = (64, 1024)
Call = Callable[[], Sequence[Any]]
"""One call of an implementation; gives the arrays or tensors that must agree."""


@dataclass(frozen=True)
class Case:
    """A kernel at one size.

    Attributes:
        items: Handled by a call.
        versions: By implementation; they hold their own state, if any.
        calls: Whose results are compared.
        tolerance: Relative and absolute.
    """

    kernel: str
    size: str
    items: int
    versions: dict[str, Call]
    calls: int = 1
    tolerance: float = 1e-4

    def check(self) -> None:
        """Compare the results of all implementations with those of the first.

        Raises:
            AssertionError: Where they differ.
        """
        for number in range(self.calls):
            results = {name: [array_of(part) for part in call()] for name, call in self.versions.items()}
            first, *others = results.values()
            for name, other in zip(list(results)[1:], others, strict=True):
                for i, (a, b) in enumerate(zip(first, other, strict=True)):
                    words = f"{self.kernel}, {self.size}: result {i} of call {number}, {name}"
                    np.testing.assert_allclose(
                        a.astype(float), b.astype(float), self.tolerance, self.tolerance, err_msg=words
                    )


def array_of(part: Any) -> np.ndarray:
    return part.detach().cpu().numpy() if isinstance(part, torch.Tensor) else np.asarray(part)


def copies(arrays: Sequence[np.ndarray], device: torch.device) -> list[torch.Tensor]:
    """Tensors with memory of their own."""
    return [torch.tensor(array, device=device) for array in arrays]
