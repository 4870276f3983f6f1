"""The flags of every command that plays the policy of a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import tyro

from sfactory.config.command_line import Switch
from sfactory.config.fields import Checkpoint
from sfactory.config.flags import MappedOrUnset, Name

Folder = Annotated[str | None, tyro.conf.arg(metavar="FOLDER")]
"""A flag whose help says what it takes, and not that it may be None; so are the following."""
File = Annotated[str | None, tyro.conf.arg(metavar="FILE")]
Integer = Annotated[int | None, tyro.conf.arg(metavar="INT")]
Real = Annotated[float | None, tyro.conf.arg(metavar="FLOAT")]


@dataclass(frozen=True, kw_only=True)
class PolicyOptions:
    """Which policy is played, and where."""

    run: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """Run folder; also as --run RUN."""
    best: Switch = False
    """The best checkpoint instead of the latest: by evaluation where the run had it (eval.every), else by the return
    in training."""
    env: Name = None
    """Environment to play in instead of the saved one: a Gymnasium id, module:Id or module:callable."""
    env_kwargs: MappedOrUnset = None
    """Keyword arguments of the environment; unset: those of the run."""
    trust: Switch = False
    """Import the environment and the classes that the run's config names as module:Name; use its env_kwargs also if
    they name files."""

    @property
    def checkpoint(self) -> Checkpoint:
        """The checkpoint to play."""
        return "best" if self.best else "latest"

    def given(self, fields: Sequence[str]) -> str:
        """The flags among `fields` that the command line holds, as text; empty if there is none."""
        given = [name for name in fields if getattr(self, name) is not None and getattr(self, name) is not False]
        return ", ".join(f"--{name.replace('_', '-')}" for name in given)
