"""The watchdog: finds processes without a heartbeat, and runs that stall although all processes are alive."""

from __future__ import annotations

import time
from collections.abc import Callable, Container

LOOK_S = 1.0
"""Longest time in seconds that one look counts for. Longer gaps mean that this process was held up, perhaps with all
others: the machine slept, the process was stopped, or a callback took long."""

HINT = "an environment may hang (runtime.step_timeout_s sets the limit, for a step of all environments of a group)"
"""What is told of a process that steps environments and shows no sign of life."""


class Watchdog:
    """Measures silence in the time that it has been watching, which excludes times at which it could not.

    Args:
        limits: Seconds without a heartbeat after which a process counts as hanging, by name.
        sampling: Names of those that step environments.
        stall_s: Seconds without any work after which the run counts as stalled.
        clock: Monotonic clock, in seconds.
    """

    def __init__(
        self,
        limits: dict[str, float],
        sampling: Container[str],
        stall_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limits, self._sampling, self._stall_s, self._clock = limits, sampling, stall_s, clock
        self._looked = clock()
        self._watched = self._worked = 0.0
        self._heartbeats: dict[str, float] = {}
        self._shown = dict.fromkeys(limits, 0.0)
        self._work = -1.0

    def look(self, heartbeats: dict[str, float], work: float) -> dict[str, str]:
        """Descriptions of what hangs, by the name of the process, or "sampling" if the run stalls without a hanging
        process.

        Args:
            heartbeats: Time of each process's last heartbeat by the same clock; in the future if it has yet to start.
            work: Any number that grows while any process works rather than waits for others.
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
        found = {
            name: f"no sign of life for {s:.0f} s" + (f"; {HINT}" if name in self._sampling else "")
            for name, s in silent.items()
            if s > self._limits[name]
        }
        if work != self._work:
            self._work, self._worked = work, self._watched
        elif not found and (idle := self._watched - self._worked) > self._stall_s:
            found["sampling"] = f"nothing was sampled or learned for {idle:.0f} s, though all processes are alive"
        return found
