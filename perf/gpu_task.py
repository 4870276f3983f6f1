"""What perf/gpu.py gives its stages, and what they give back. This file needs Python alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Result = dict[str, Any]


@dataclass(frozen=True)
class Task:
    """What the stages are given.

    Attributes:
        device: For learner and policy workers.
        seconds: Measured of each workload.
        tiny: A rehearsal.
        keep: Called with what is known so far, which then is not lost if the stage is stopped.
    """

    device: str
    seconds: float
    tiny: bool
    keep: Callable[[Result], None] = lambda _: None
