"""What the runner makes of faults of environments, which the run survives: it says them, not too often, and ends the
run when there are too many."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

from sfactory.telemetry.control_block import SurvivedFaults

PERIOD_S = 60.0
FULL = 3
"""Faults told with their traceback in each period; the others are only counted."""
NAMED = 5
"""Environments named in such a count."""
LEAST = 100
"""Faults that are survived at any rate, so that a short run does not end for a few."""


class FaultBudget:
    """Says and counts faults of environments.

    Args:
        rate: Faults per env step beyond which the run ends; env_fault_rate of :class:`sfactory.config.RuntimeConfig`.
        say: Shows a text to the user.
        clock: Seconds; monotonic.
    """

    def __init__(self, rate: float, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._rate, self._say, self._clock = rate, say, clock
        self._began, self._told = clock(), 0
        self._untold: Counter[str] = Counter()
        self._last = ""

    def add(self, event: SurvivedFaults) -> None:
        """Take note of a worker's message, and say it if it is time."""
        if self._clock() - self._began >= PERIOD_S:
            self.flush()
        self._untold.update(event.counts)
        self._last = event.first.message
        if self._told < FULL:
            self._told += 1
            self._untold[event.first.environment] -= event.first.count
            self._say(f"the run goes on after a fault: {event.first.message}")

    def flush(self) -> None:
        """Say how many faults have not been told, and begin a new period."""
        if count := self._untold.total():
            named = self._untold.most_common(NAMED)
            parts = [f"{number} of {name}" for name, number in named if number]
            if rest := count - sum(number for _, number in named):
                parts.append(f"{rest} of others")
            self._say(f"the run has gone on after {count} more faults: {', '.join(parts)}")
        self._untold.clear()
        self._began, self._told = self._clock(), 0

    def excess(self, faults: int, env_steps: int) -> str | None:
        """Why the run must end, or None.

        Args:
            faults: Since the start of the run.
            env_steps: Sampled in that time.
        """
        if faults <= LEAST or faults <= self._rate * env_steps:
            return None
        return (
            f"environments have failed {faults} times in {env_steps} env steps ({faults / max(env_steps, 1):.2%}), "
            "more often than "
            f"runtime.env_fault_rate {self._rate} allows; correct them, or raise it with --runtime.env-fault-rate. The "
            "last fault:\n"
            f"{self._last}"
        )
