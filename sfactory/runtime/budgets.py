"""Budgets: how many lost processes and how many faults of environments a run survives."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

from sfactory.telemetry.events import SurvivedFaults

PERIOD_S = 60.0
"""Seconds of a reporting period of :class:`FaultBudget`."""
FULL_MESSAGES = 3
"""Faults shown with their traceback in each period; further ones are only counted."""
NAMED = 5
"""Environments named in such a count."""
ALWAYS_SURVIVED = 100
"""Faults that are survived whatever their rate, so that a short run does not end for a few."""


class RestartBudget:
    """Counts restarts, and bounds those in a row without progress: a run survives rare deaths, and ends where death is
    certain.

    Args:
        limit: Allowed restarts in a row without progress.
    """

    def __init__(self, limit: int) -> None:
        self._limit, self._in_a_row, self._progress = limit, 0, -1

    def allow(self, progress: int) -> bool:
        """Count one more restart, and return whether it is allowed.

        Args:
            progress: Any number that changes with progress.
        """
        self._in_a_row = self._in_a_row + 1 if progress == self._progress else 1
        self._progress = progress
        return self._in_a_row <= self._limit


class FaultBudget:
    """Shows and counts faults of environments that the run survives, and bounds their rate.

    Args:
        rate: Faults per env step above which the run ends; env_fault_rate of :class:`sfactory.config.RuntimeConfig`.
        show: Shows a text to the user.
        clock: Monotonic clock, in seconds.
    """

    def __init__(self, rate: float, show: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._rate, self._show, self._clock = rate, show, clock
        self._period_began, self._shown = clock(), 0
        self._not_shown: Counter[str] = Counter()
        self._last = ""

    def add(self, event: SurvivedFaults) -> None:
        """Count the faults of an event, and show the first one unless too many have been shown in this period."""
        if self._clock() - self._period_began >= PERIOD_S:
            self.flush()
        self._not_shown.update(event.counts)
        self._last = event.first.message
        if self._shown < FULL_MESSAGES:
            self._shown += 1
            self._not_shown[event.first.environment] -= event.first.count
            self._show(f"the run goes on after a fault: {event.first.message}")

    def flush(self) -> None:
        """Show how many faults have only been counted, and begin a new period."""
        if count := self._not_shown.total():
            named = self._not_shown.most_common(NAMED)
            parts = [f"{number} of {name}" for name, number in named if number]
            if rest := count - sum(number for _, number in named):
                parts.append(f"{rest} of others")
            self._show(f"the run has gone on after {count} more faults: {', '.join(parts)}")
        self._not_shown.clear()
        self._period_began, self._shown = self._clock(), 0

    def excess(self, faults: int, env_steps: int) -> str | None:
        """Why the run must end, or None.

        Args:
            faults: Faults since the start of the run.
            env_steps: Env steps sampled in that time.
        """
        if faults <= ALWAYS_SURVIVED or faults <= self._rate * env_steps:
            return None
        return (
            f"environments have failed {faults} times in {env_steps} env steps ({faults / max(env_steps, 1):.2%}), "
            f"more often than runtime.env_fault_rate {self._rate} allows; correct them, or raise it with "
            f"--runtime.env-fault-rate. The last fault:\n{self._last}"
        )
