"""Whether a vector environment resets its environments as its metadata says."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from sfactory.commands.checks.findings import Finding
from sfactory.commands.checks.subjects import Step, VectorSubject
from sfactory.envs.interface import FINAL_OBS


class AutoresetCheck:
    """Looks at every step of a vector environment for what its autoreset mode rules out."""

    def __init__(self, subject: VectorSubject) -> None:
        self._subject = subject
        self._ended = np.zeros(subject.rows, bool)
        self._looked_at = 0
        self._problem = ""

    def without_rests(self, step: Step) -> Step:
        """A step in which rows that were only reset did not act."""
        if self._subject.mode != "NEXT_STEP":
            return step
        return step._replace(acted=~self._ended)

    def look_at(self, step: Step) -> None:
        """Look at one step, knowing which rows ended in the one before."""
        mode, info = self._subject.mode, self._subject.info
        if mode == "NEXT_STEP" and (at := self._ended & ((step.rewards != 0) | step.ended)).any():
            self._problem = (
                f"says NEXT_STEP, but row {np.flatnonzero(at)[0]} got reward {step.rewards[at][0]:g}"
                f"{' and ended again' if step.ended[at][0] else ''} in the step after its end, which must only reset it"
            )
        has_finals = isinstance(info, Mapping) and any(key in info for key in FINAL_OBS)
        if mode == "SAME_STEP" and step.ended.any() and not has_finals:
            self._problem = (
                "says SAME_STEP, but info has no final_obs when a row ends; its value is bootstrapped from it"
            )
        self._looked_at += int(np.count_nonzero(self._ended))
        self._ended = step.ended

    def finding(self) -> Finding:
        mode = self._subject.mode
        if self._problem:
            return Finding(
                "autoreset", "problem", f"metadata['autoreset_mode'] {self._problem}; correct one of the two"
            )
        return Finding("autoreset", "ok", f"{mode}, looked at after {self._looked_at} ends")
