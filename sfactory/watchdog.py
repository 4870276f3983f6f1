"""Who hangs: processes without a sign of life, and a run in which nobody works although all are alive."""

from __future__ import annotations

import time
from collections.abc import Callable

LATE_S = 5.0
"""A watcher that comes back after so long was itself held up, perhaps with everybody else; silence counts anew from then."""


class Watchdog:
    """Looks at a run again and again.

    Args:
        limits: Seconds of silence after which a process counts as hanging, by name.
        stall_s: Seconds without any work after which the run does.
        clock: Seconds; monotonic.
    """

    def __init__(self, limits: dict[str, float], stall_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._limits, self._stall_s, self._clock = limits, stall_s, clock
        self._looked = self._awake_since = self._worked = clock()
        self._work = -1.0

    def look(self, heartbeats: dict[str, float], work: float) -> dict[str, str]:
        """What is wrong, by the name of the process, or of "sampling" if no single process is to blame.

        Args:
            heartbeats: When each process last gave a sign of life, by the same clock.
            work: Any number that grows with every piece of work in the run.
        """
        now = self._clock()
        if now - self._looked > LATE_S:
            self._awake_since = self._worked = now
        self._looked = now
        silent = {name: now - max(heartbeat, self._awake_since) for name, heartbeat in heartbeats.items()}
        hint = "an environment may hang (runtime.step_timeout_s sets the limit)"
        found = {name: f"no sign of life for {s:.0f} s; {hint}" for name, s in silent.items() if s > self._limits[name]}
        if work != self._work:
            self._work, self._worked = work, now
        elif not found and now - self._worked > self._stall_s:
            found["sampling"] = f"nothing was sampled or learned for {now - self._worked:.0f} s, though all processes are alive"
        return found
