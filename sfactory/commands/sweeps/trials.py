"""A trial, and what a sweep asks of whoever chooses trials."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

State = Literal["running", "completed", "pruned", "failed"]


@dataclass
class Trial:
    """One configuration, trained with every seed of the sweep.

    Attributes:
        number: Counts from 0.
        chosen: Values of the searched fields.
        state: running also means that it has not begun.
        scores: Values of its completed runs, by seed.
        value: Value of the trial once it is completed; of a pruned one the last that was reported.
        reason: Why it has failed.
    """

    number: int
    chosen: dict[str, Any]
    state: State = "running"
    scores: dict[int, float] = field(default_factory=dict)
    value: float | None = None
    reason: str = ""


class Trials(Protocol):
    """Chooses the trials of a sweep, and keeps what came of them in the sweep's folder."""

    @property
    def rungs(self) -> Sequence[int]:
        """Env steps at which running trials are compared; empty: never."""
        ...

    def all(self) -> list[Trial]:
        """All trials that have begun so far, by number."""
        ...

    def next(self) -> Trial | None:
        """The next trial to run, at first those that an earlier process left unfinished; None: there are no more."""
        ...

    def loses(self, trial: Trial, env_steps: int, value: float) -> bool:
        """Take the value of a trial's first run at a rung; says whether the trial shall end early."""
        ...

    def end(self, trial: Trial) -> None:
        """Keep the result of a trial."""
        ...


Note = Callable[[str], None]
"""Shows a line of text."""


def value_text(value: Any) -> str:
    """The value of a searched field as it is shown."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)
