"""Flags of ``sfactory profile``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from sfactory.config.command_line import CommandOptions, Switch


@dataclass(frozen=True)
class ProfileOptions(CommandOptions):
    """Flags of ``sfactory profile`` besides those of a run."""

    seconds: float = 30.0
    """To measure; warm-up and the ceiling take about as long again. With --tune: for the whole search."""
    sample_only: Switch = False
    """Rollout and policy workers at full speed, without learning."""
    json: Switch = False
    """The last line of the output is one JSON object."""
    trace: Path | None = None
    """Write a trace of all processes to this file, for ui.perfetto.dev."""
    tune: Switch = False
    """Search workers, environments, groups, policy workers, threads and precision for this machine."""
    tune_out: Path | None = None
    """Where --tune writes the best as YAML for --config; unset: tuned.yaml."""

    @property
    def tuned(self) -> Path:
        """The file that --tune writes."""
        return self.tune_out or Path("tuned.yaml")
