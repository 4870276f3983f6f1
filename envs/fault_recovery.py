"""Fault recovery: records every fault of a group's environments and remakes the environments."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import TypeVar

from sfactory.envs.faults import environment_fault
from sfactory.envs.interface import SurvivedFault
from sfactory.errors import ConfigError, EnvironmentFault

T = TypeVar("T")
MOST_IN_A_ROW = 10
"""Faults of one environment without a good step in between after which the run ends."""
PAUSE_S = 0.1
"""Seconds before a failed attempt to remake an environment is repeated, times the number of attempts: a missing
resource may come back."""


class FaultRecovery:
    """The faults of a group.

    Args:
        survive: Whether faults are survived; else each is raised.

    Attributes:
        faults: :attr:`sfactory.envs.interface.Group.faults`.
        step: Number of the group's present step, which the group counts: what tells faults in a row from others.
    """

    def __init__(self, survive: bool) -> None:
        self.faults: list[SurvivedFault] = []
        self.step = 0
        self._survive = survive
        self._remade: defaultdict[int, int] = defaultdict(int)
        self._latest: dict[int, tuple[int, int]] = {}

    def record(self, fault: EnvironmentFault, environment: str, rows: Sequence[int], count: int = 1) -> None:
        """Record a fault as a :class:`SurvivedFault`.

        Args:
            fault: The fault.
            environment: Name of the environment.
            rows: Its rows in the group.
            count: Number of environments affected.

        Raises:
            EnvironmentFault: The fault itself, if faults are not survived.
        """
        if not self._survive:
            raise fault
        # Tracebacks keep the faulty environment and its processes alive until the next garbage collection.
        fault.__traceback__ = fault.__cause__ = fault.__context__ = None
        self.faults.append(SurvivedFault(rows, environment, str(fault), count))

    def remake(
        self,
        fault: EnvironmentFault,
        index: int,
        environment: str,
        rows: Sequence[int],
        make: Callable[[int], T],
        count: int = 1,
    ) -> T:
        """Record a fault and replace the faulty environment by a new one.

        Args:
            fault: The fault.
            index: Index of the environment in its group.
            environment: Name of the environment.
            rows: Its rows in the group.
            make: Closes the old environment, makes and resets the new one. Its argument is the number of times the
                environment has been remade. It is called again after a fault of its own, which is recorded too.
            count: Number of environments affected.

        Returns:
            The result of `make`.

        Raises:
            EnvironmentFault: If faults are not survived, or after too many in a row.
        """
        while True:
            self.record(fault, environment, rows, count)
            in_a_row = self._in_a_row(index)
            if in_a_row >= MOST_IN_A_ROW:
                raise EnvironmentFault(
                    f"{fault}\n{environment} has failed {in_a_row} times without a good step in between, though it was "
                    "made anew each time; correct it, and start the run again to go on from where it was saved"
                ) from fault
            self._remade[index] += 1
            try:
                return make(self._remade[index])
            except ConfigError as error:
                fault = EnvironmentFault(f"{environment} could not be made anew: {error}")
            except BaseException as error:
                fault = environment_fault(environment, "being made anew", error)
            time.sleep(PAUSE_S * in_a_row)

    def _in_a_row(self, index: int) -> int:
        """Number of faults of an environment since its last good step, this one included."""
        step, count = self._latest.get(index, (self.step, 0))
        count = count + 1 if self.step - step <= 1 else 1
        self._latest[index] = self.step, count
        return count
