"""summary.json: what a run has come to, at its end."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from sfactory.files import write_atomically


@dataclass(frozen=True, kw_only=True)
class Summary:
    """What summary.json says of a run.

    Attributes:
        env: The environment's name.
        protocol: How it is played (``EnvSpec.protocol``), or empty.
        fps: Env steps per second over the whole run.
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
        numbers = {name: _finite(getattr(self, name)) for name in ("wall_s", "fps", "episode_return_mean")}
        extras = {name: _finite(value) for name, value in self.extras.items()}
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)} | numbers | {"extras": extras}
        write_atomically(Path(path), (json.dumps(values, indent=2, allow_nan=False) + "\n").encode())


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


def json_values(value: Any) -> Any:
    """A nested value with None in place of numbers that are not finite, which JSON lacks."""
    if isinstance(value, dict):
        return {key: json_values(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [json_values(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
