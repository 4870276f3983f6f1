"""perf/kernels.py: what it times does the same work."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from perf import kernels


@pytest.mark.parametrize("family", kernels.FAMILIES, ids=lambda family: family.__name__)
def test_all_implementations_agree(family: Callable[[torch.device], Iterator[kernels.Case]]) -> None:
    """At the smallest size of each kernel."""
    seen: set[str] = set()
    for case in family(torch.device("cpu")):
        if case.kernel not in seen:
            case.check()
        seen.add(case.kernel)
    assert seen
