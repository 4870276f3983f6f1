"""Where commands and the live display print."""

from __future__ import annotations

from rich.console import Console


def new_console() -> Console:
    """A console on standard output that leaves ``module:Name`` as it is: rich would make an emoji of ``:Printer:``."""
    return Console(emoji=False)
