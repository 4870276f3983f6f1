"""Keeps a group going while its environments misbehave: notes every fault, and makes environments anew."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import TypeVar

from sfactory.envs.factory import RAISED, fault_of
from sfactory.envs.interface import Breakage
from sfactory.errors import ConfigError, EnvironmentFault

T = TypeVar("T")
MOST_IN_A_ROW = 10
"""Faults of an environment, without a good step in between, at which it is given up."""
PAUSE_S = 0.1
"""Seconds until an environment that could not be made or reset is made again; grows by as much each time, because what
it lacks may come back."""


class Repairs:
    """The faults of a group.

    Args:
        allowed: Whether faults are survived; else each is raised.

    Attributes:
        broken: :attr:`sfactory.envs.interface.Group.broken`.
        step: Number of the group's present step, which the group counts: what tells faults in a row from others.
    """

    def __init__(self, allowed: bool) -> None:
        self.broken: list[Breakage] = []
        self.step = 0
        self._allowed = allowed
        self._remade: defaultdict[int, int] = defaultdict(int)
        self._latest: dict[int, tuple[int, int]] = {}

    def note(self, fault: EnvironmentFault, environment: str, rows: Sequence[int], count: int = 1) -> None:
        """Take down a fault as a :class:`Breakage`.

        Raises:
            EnvironmentFault: The fault itself, if it is not to be survived.
        """
        if not self._allowed:
            raise fault
        # Their frames would keep the faulty environment, and its processes, until the next garbage collection.
        fault.__traceback__ = fault.__cause__ = fault.__context__ = None
        self.broken.append(Breakage(rows, environment, str(fault), count))

    def make_anew(
        self,
        fault: EnvironmentFault,
        index: int,
        environment: str,
        rows: Sequence[int],
        make: Callable[[int], T],
        count: int = 1,
    ) -> T:
        """Take down a fault and put a new environment in the place of the faulty one.

        Args:
            index: Of the environment in its group.
            make: Closes the old environment, makes and resets the new one; told how often it has been made anew. Faults
                of these are taken down too, and it is called again.

        Returns:
            What `make` returned.

        Raises:
            EnvironmentFault: If the fault is not to be survived, or is the last of too many in a row.
        """
        while True:
            self.note(fault, environment, rows, count)
            in_a_row = self._in_a_row(index)
            if in_a_row >= MOST_IN_A_ROW:
                raise EnvironmentFault(
                    f"{fault}\n{environment} has failed {in_a_row} times without a good step in between, though it was "
                    "made anew each "
                    "time; correct it, and start the run again to go on from where it was saved"
                ) from fault
            self._remade[index] += 1
            try:
                return make(self._remade[index])
            except EnvironmentFault as error:
                fault = error
            except ConfigError as error:
                fault = EnvironmentFault(f"{environment} could not be made anew: {error}")
            except RAISED as error:
                fault = fault_of(environment, "being made anew", error)
            time.sleep(PAUSE_S * in_a_row)

    def _in_a_row(self, index: int) -> int:
        """How many faults an environment has had, this one included, since its last good step."""
        step, count = self._latest.get(index, (self.step, 0))
        count = count + 1 if self.step - step <= 1 else 1
        self._latest[index] = self.step, count
        return count
