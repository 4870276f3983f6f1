"""Whether there is a screen on which environments could open their windows."""

from __future__ import annotations

import os

from sfactory.envs.interface import EnvRequest
from sfactory.errors import ConfigError


def has_display() -> bool:
    """Whether there is a screen to open a window on."""
    return any(os.environ.get(display) for display in ("DISPLAY", "WAYLAND_DISPLAY"))


def check_window(request: EnvRequest) -> None:
    """Raise ConfigError if environments are to open windows of their own, and there is no screen: some end the process
    then, others draw all the same and are slow."""
    mode = request.render_mode or request.kwargs.get("render_mode")
    if mode == "human" and not has_display():
        raise ConfigError(
            "env_kwargs render_mode is human, but there is no display to open windows on (DISPLAY and WAYLAND_DISPLAY "
            "are unset); leave it out: sfactory play shows a trained policy in the terminal or as a video"
        )
