"""``sfactory play``: watch the policy of a run folder, in a window, in the terminal, or as a video."""

from __future__ import annotations

import dataclasses
import logging
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import tyro

from sfactory.config import env_name
from sfactory.config.command_line import Switch, flag_as_word
from sfactory.config.policy_options import Folder, Integer, PolicyOptions, Real
from sfactory.envs import native, resolve_env
from sfactory.envs.factory import is_vector, make_environment
from sfactory.envs.families import atari, envpool, vizdoom
from sfactory.envs.faults import close_quietly
from sfactory.envs.interface import EnvRequest
from sfactory.envs.rendering import has_display
from sfactory.errors import ConfigError, counted, shown, telling_errors
from sfactory.eval import exit_status
from sfactory.player import Evaluation, Player, request_of
from sfactory.runs.run_files import read_config
from sfactory.runs.video import prepare_rendering
from sfactory.runtime.interrupts import stopping
from sfactory.telemetry.console import new_console

DESCRIPTION = """Play episodes with the policy of a run folder and show them: in a window where there is a display and
the environment can draw one, else in the terminal, as text or as a picture of coloured blocks."""


@dataclass(frozen=True, kw_only=True)
class Options(PolicyOptions):
    """What the command takes."""

    episodes: int = 3
    """Episodes to play."""
    where: Literal["auto", "window", "terminal"] = "auto"
    """Where to show them; auto: a window if there is a display and the environment has one, else the terminal."""
    video: Folder = None
    """Write MP4 files into this folder instead, one for each episode."""
    fps: Real = None
    """Env steps per second in the terminal; unset: as the environment says; 0: as fast as it goes."""
    sampled: Switch = False
    """Draw actions from the policy; otherwise each is the most probable one."""
    seed: Integer = None
    """Seed of environments and sampled actions; unset: from the run's seed."""
    max_steps: Integer = None
    """Env steps after which an episode that still goes on is ended."""


@telling_errors
def main(args: Sequence[str] | None = None) -> int:
    """Run the command.

    Returns:
        The exit status: 0 done, 1 failed, 2 bad configuration or no place to show anything, 130 or 143 interrupted.
    """
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    args = flag_as_word("--run", args)
    options = tyro.cli(Options, args=args, prog="sfactory play", description=DESCRIPTION)
    player, mode = _player(options)
    with stopping(player.stop) as signals:
        result = _play(options, player, mode)
    if result.episodes:
        returns = ", ".join(f"{value:.2f}" for value in result.returns)
        new_console().print(
            f"{counted(result.episodes, 'episode')}, returns {returns}, mean length {result.length_mean:.1f}"
        )
    return exit_status(player, result, signals)


def _player(options: Options) -> tuple[Player, str]:
    """What plays, and the render_mode of its environments.

    Raises:
        ConfigError: If an option cannot work.
    """
    too_few = options.max_steps is not None and options.max_steps < 1
    if options.episodes < 1 or too_few or (options.fps or 0) < 0:
        raise ConfigError("episodes and max-steps must be at least 1, and fps 0 or more")
    prepare_rendering()
    request = request_of(read_config(options.run), options.env, options.env_kwargs, options.trust)
    mode = "rgb_array" if options.video else render_mode(options.where, request)
    player = Player.of_run(
        options.run, env=options.env, env_kwargs=options.env_kwargs, seed=options.seed, checkpoint=options.checkpoint,
        trust=options.trust, render_mode=mode,
    )  # fmt: skip
    return player, mode


def _play(options: Options, player: Player, mode: str) -> Evaluation:
    fps = player.render_fps if options.fps is None else options.fps
    screen = TerminalScreen(fps) if mode != "human" and not options.video else None
    with player.recorder(options.video) as recorder:
        return player.play(options.episodes, not options.sampled, 1, options.max_steps, recorder or screen)


def render_mode(where: Literal["auto", "window", "terminal"], request: EnvRequest) -> str:
    """The render_mode that shows an environment where it was asked for, or else where it can be shown.

    Raises:
        ConfigError: If it cannot be shown there.
    """
    modes, name = _render_modes(request), env_name(request.env)
    if where == "window" or (where == "auto" and has_display() and "human" in modes):
        if "human" not in modes:
            raise ConfigError(f"{name} draws no window (render_modes {modes}); use --where terminal or --video FOLDER")
        if not has_display():
            raise ConfigError(
                "there is no display to open a window on (DISPLAY and WAYLAND_DISPLAY are unset); use --where "
                "terminal or --video FOLDER"
            )
        return "human"
    if "ansi" in modes:
        return "ansi"
    if "rgb_array" not in modes:
        raise ConfigError(f"{name} draws neither text nor pictures (render_modes {modes}); sfactory eval plays it")
    if not on_terminal():
        raise ConfigError(
            "there is no display, and the output is no terminal that could show pictures; use --video FOLDER"
        )
    return "rgb_array"


def on_terminal() -> bool:
    """Whether the output is a terminal."""
    return sys.stdout.isatty()


def _render_modes(request: EnvRequest) -> list[str]:
    """The render modes that an environment says it has."""
    request = dataclasses.replace(request, env=resolve_env(request.env), render_mode=None)
    if isinstance(request.env, str):
        if native.handles(request) or envpool.handles(request):
            return ["rgb_array"]
        kwargs = {name: value for name, value in request.kwargs.items() if name != "render_mode"}
        request = dataclasses.replace(request, backend="gymnasium", kwargs=kwargs)
    family = next((family for family in (atari, vizdoom) if family.handles(request)), None)
    env = family.make_single(request) if family else make_environment(request, 1)
    close_quietly(env)
    if is_vector(env):
        raise ConfigError(f"{env_name(request.env)} makes vector environments, which are not shown; sfactory eval does")
    return list((getattr(env, "metadata", None) or {}).get("render_modes", []))


class TerminalScreen:
    """Shows what an environment renders in the terminal: text as it is, pictures as coloured blocks, each of two
    pixels. Where the output is no terminal, one text follows the other.

    Args:
        fps: Pictures per second; 0: as many as it gets.
    """

    def __init__(self, fps: float) -> None:
        self._pause, self._next = 1 / fps if fps else 0.0, 0.0
        self._begins, self._moves = True, on_terminal()

    def begin_episode(self) -> None:
        self._begins = True

    def add(self, image: Any) -> None:
        time.sleep(max(0.0, self._next - time.monotonic()))
        self._next = time.monotonic() + self._pause
        if isinstance(image, np.ndarray) and image.dtype == np.uint8 and image.ndim == 3 and image.shape[2] == 3:
            columns, lines = shutil.get_terminal_size()
            text = blocks(image, columns, lines - 2)
        elif isinstance(image, str):
            text = image
        else:
            raise ConfigError(f"render() returned {shown(image)}; it must return text, or uint8 [height, width, 3]")
        if self._moves:
            sys.stdout.write(("\x1b[2J" if self._begins else "") + "\x1b[H")
        print(text, flush=True)
        self._begins = False


def blocks(image: np.ndarray, columns: int, lines: int) -> str:
    """A picture as lines of half blocks, in colours of 24 bits.

    Args:
        image: uint8 ``[H, W, 3]``.
        columns, lines: Most characters of a line, and lines.
    """
    height, width, _ = image.shape
    scale = min(1.0, columns / width, 2 * lines / height)
    down, across = max(2, int(height * scale) // 2 * 2), max(1, int(width * scale))
    rows, places = (np.linspace(0, size, count, False).astype(int) for size, count in ((height, down), (width, across)))
    sums = np.add.reduceat(np.add.reduceat(image.astype(np.float32), rows, 0), places, 1)
    areas = np.diff(np.append(rows, height))[:, None] * np.diff(np.append(places, width))
    pixels = (sums / np.maximum(areas, 1)[..., None]).astype(int)
    return "\n".join(map(_half_blocks, pixels[::2].tolist(), pixels[1::2].tolist()))


def _half_blocks(above: Sequence[Sequence[int]], below: Sequence[Sequence[int]]) -> str:
    """A line of characters, each of which shows a pixel of one row above one of the other; colours are named where they
    change."""
    line, last = [], None
    for pair in zip(above, below, strict=True):
        if pair != last:
            line.append("\x1b[38;2;{};{};{}m\x1b[48;2;{};{};{}m".format(*pair[0], *pair[1]))
            last = pair
        line.append("▀")
    return "".join((*line, "\x1b[0m"))


if __name__ == "__main__":
    sys.exit(main())
