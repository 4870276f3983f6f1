"""summary.json: what a run has come to, at its end."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from sfactory.files import json_values, write_atomically


@dataclass(frozen=True, kw_only=True)
class Summary:
    """What summary.json says of a run.

    Attributes:
        env: The environment's name.
        protocol: How it is played (``EnvSpec.protocol``), or empty.
        wall_s: Seconds that the run has taken, over all resumes, until its last batch.
        fps: Env steps per second over the whole run, without the time before the last command's first batch.
        extras: Means of the last report.
        error: What made a failed run fail.
        phases: Share of every phase in the time of each kind of worker, 0 to 1.
        machine: Facts about the machine, for a reader.
    """

    status: Literal["completed", "interrupted", "failed"]
    env: str
    seed: int
    env_steps: int
    frames: int
    wall_s: float
    fps: float
    episode_return_mean: float
    protocol: str = ""
    extras: Mapping[str, float] = field(default_factory=dict)
    error: str | None = None
    phases: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    machine: Mapping[str, str] = field(default_factory=dict)

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write the file as one step. NaN becomes null."""
        values = json_values(dataclasses.asdict(self))
        write_atomically(Path(path), (json.dumps(values, indent=2, allow_nan=False) + "\n").encode())
