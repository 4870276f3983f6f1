"""How often processes that died may be started anew."""

from __future__ import annotations


class Restarts:
    """Counts restarts and bounds those in a row without progress: a run goes on through rare deaths, and ends where
    death is certain.

    Args:
        limit: Restarts in a row without progress that are allowed.

    Attributes:
        total: Restarts so far.
    """

    def __init__(self, limit: int) -> None:
        self.total = 0
        self._limit, self._in_a_row, self._progress = limit, 0, -1

    def allow(self, progress: int) -> bool:
        """Count one more restart; whether it is allowed.

        Args:
            progress: Any number that changes whenever something is achieved.
        """
        self._in_a_row = self._in_a_row + 1 if progress == self._progress else 1
        self._progress = progress
        self.total += 1
        return self._in_a_row <= self._limit
