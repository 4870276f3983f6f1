"""Who hangs: processes without a sign of life, and a run in which nobody works although all are alive."""

from __future__ import annotations

import time
from collections.abc import Callable

LOOK_S = 1.0
"""What one look counts for at most. Whoever looks more seldom was held up, perhaps with everybody else: the machine
slept, this process was stopped, or it was busy with a callback."""


class Watchdog:
    """Looks at a run again and again, and counts the seconds that it has been looking on.

    Args:
        limits: Seconds of silence after which a process counts as hanging, by name.
        stall_s: Seconds without any work after which the run does.
        clock: Seconds; monotonic.
    """

    def __init__(self, limits: dict[str, float], stall_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._limits, self._stall_s, self._clock = limits, stall_s, clock
        self._looked = clock()
        self._watched = self._worked = 0.0
        self._heartbeats: dict[str, float] = {}
        self._shown = dict.fromkeys(limits, 0.0)
        self._work = -1.0

    def look(self, heartbeats: dict[str, float], work: float) -> dict[str, str]:
        """What is wrong, by the name of the process, or of "sampling" if no single process is to blame.

        Args:
            heartbeats: When each process last gave a sign of life, by the same clock; in the future if it is only about
                to start.
            work: Any number that grows as long as anybody in the run works, rather than wait for others.
        """
        now = self._clock()
        step = min(now - self._looked, LOOK_S)
        self._looked = now
        self._watched += step
        for name, heartbeat in heartbeats.items():
            if heartbeat != self._heartbeats.get(name):
                self._heartbeats[name] = heartbeat
                self._shown[name] = self._watched - min(now - heartbeat, step)
        silent = {name: self._watched - shown for name, shown in self._shown.items()}
        hint = "an environment may hang (runtime.step_timeout_s sets the limit)"
        found = {name: f"no sign of life for {s:.0f} s; {hint}" for name, s in silent.items() if s > self._limits[name]}
        if work != self._work:
            self._work, self._worked = work, self._watched
        elif not found and (idle := self._watched - self._worked) > self._stall_s:
            found["sampling"] = f"nothing was sampled or learned for {idle:.0f} s, though all processes are alive"
        return found
