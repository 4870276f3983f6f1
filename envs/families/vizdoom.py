"""ViZDoom's scenarios, every ``Vizdoom...-v...`` id of ``vizdoom.gymnasium_wrapper``.

Observations are Dicts. Their pictures (screen, and depth, labels and automap where a scenario has them) are rendered at
the simulator's smallest suitable resolution, because rendering is most of the cost, and shrunk to ``env_kwargs``
``resolution`` (height, width; 72 x 128 unless given) as uint8 ``[C, H, W]``. ``frame_skip`` is 4 unless given; all
other ``env_kwargs`` go to ViZDoom. Pictures whose resolution ViZDoom sets itself (``screen_resolution`` in
``env_kwargs``) are shrunk all the same.

Every game is a process of its own that works in a temporary folder and ends with the thread that made it, however that
ends (on Linux with ``setpriv``).
"""

from __future__ import annotations

import dataclasses
import os
import re
import shlex
import shutil
import weakref
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from sfactory.envs.factory import make_environment
from sfactory.envs.families.gymnasium import SingleGroup, read_spec
from sfactory.envs.faults import probing
from sfactory.envs.interface import EnvRequest, EnvSpec
from sfactory.errors import ConfigError, installing
from sfactory.files import ELSEWHERE, make_temporary_folder, remove_files_elsewhere, remove_temporary_folder

_RESOLUTION = (72, 128)
_SHARED_MEMORY = Path("/dev/shm")


def handles(request: EnvRequest) -> bool:
    """Ids that begin with ``Vizdoom``."""
    env, backend = request.env, request.backend
    return isinstance(env, str) and env.rpartition(":")[2].startswith("Vizdoom") and backend in ("auto", "gymnasium")


def probe(request: EnvRequest) -> EnvSpec:
    """Start one game, read its spec, and end it.

    Raises:
        ConfigError: If vizdoom is missing, the id is unknown, or `env_kwargs` do not fit.
    """
    with probing(make_single(request)) as env:
        spec = read_spec(env, request)
        return dataclasses.replace(spec, family="vizdoom", render_fps=spec.render_fps / spec.frameskip)


def make_group(request: EnvRequest, spec: EnvSpec, count: int, first_index: int, seed: int) -> SingleGroup:
    """A group of `count` games. Raises as `probe` does."""
    games = [make_single(request) for _ in range(count)]
    return SingleGroup(games, lambda seeds: make_single(request), request, spec, first_index, seed)


def make_single(request: EnvRequest) -> gymnasium.Env:
    """A game by itself. Raises as `probe` does."""
    kwargs = {"frame_skip": 4, **request.kwargs}
    resolution = kwargs.pop("resolution", _RESOLUTION)
    if np.shape(resolution) != (2,) or not all(isinstance(size, int) and size > 0 for size in resolution):
        raise ConfigError(
            f"env_kwargs resolution is {resolution!r}; it must be a height and a width in pixels, for example [72, 128]"
        )
    height, width = resolution
    kwargs["screen_resolution"] = kwargs.get("screen_resolution", _smallest_resolution(height, width))
    env = make_environment(dataclasses.replace(request, kwargs=kwargs), 1)
    return DoomGame(env, (height, width))


def _smallest_resolution(height: int, width: int) -> str:
    """The name of ViZDoom's resolution with the fewest pixels that is at least as high and as wide.

    Raises:
        ConfigError: If there is none or vizdoom is missing.
    """
    try:
        from vizdoom import ScreenResolution
    except ImportError as error:
        raise ConfigError(f"ViZDoom environments need the package vizdoom: {error}; {installing('vizdoom')}") from error
    sizes = {name: tuple(map(int, re.findall(r"\d+", name))) for name in ScreenResolution.__members__}
    enough = [name for name, (w, h) in sizes.items() if h >= height and w >= width]
    if not enough:
        raise ConfigError(
            f"env_kwargs resolution is {height} x {width}, but ViZDoom renders at most 1080 x 1920; lower it"
        )
    return min(enough, key=lambda name: sizes[name][0] * sizes[name][1])


class DoomGame(gymnasium.Wrapper):
    """A ViZDoom environment with small planar pictures, true truncation, and a process that leaves nothing behind.

    ViZDoom has no observation left when it has ended an episode for its time, so here the game runs without a limit and
    the episode is truncated at the first env step at or beyond it, with an observation whose value can be bootstrapped.
    Observations share memory with those of later steps.

    Raises:
        ConfigError: If the pictures are smaller than `resolution` (height, width).
    """

    def __init__(self, env: Any, resolution: tuple[int, int]) -> None:
        from sfactory.envs.kernels.resampling import Resampler

        super().__init__(env)
        self._game: Any = env.unwrapped.game
        self._limit = 0
        if env.unwrapped.treat_episode_timeout_as_truncation and self._game.get_episode_timeout() > 0:
            self._limit = self._game.get_episode_timeout() + self._game.get_episode_start_time()
            self._game.set_episode_timeout(0)
        self._pictures: dict[str, tuple[Any, np.ndarray]] = {}
        entries = dict(env.observation_space.spaces)
        for name, space in entries.items():
            if len(space.shape) == 3:
                native = space.shape[:2]
                if native[0] < resolution[0] or native[1] < resolution[1]:
                    raise ConfigError(
                        f"env_kwargs resolution is {resolution}, but screen_resolution renders {native}; lower one or "
                        "raise the other"
                    )
                shape = (space.shape[2], *resolution)
                self._pictures[name] = (
                    Resampler(space.shape, resolution, nearest=name == "labels"),
                    np.empty(shape, np.uint8),
                )
                entries[name] = spaces.Box(0, 255, shape, np.uint8)
        self.observation_space = spaces.Dict(entries)
        self._folder = make_temporary_folder("vizdoom-")
        self._remove_folder = weakref.finalize(self, remove_temporary_folder, self._folder)
        _install_launcher(self._game, self._folder)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        starts = not self._game.is_running()
        observation, info = self.env.reset(seed=seed, options=options)
        if starts:
            remove_files_elsewhere(self._folder)  # 10 MB of shared memory that both sides have opened
        return self._shrink(observation), info

    def step(self, action: Any) -> tuple[dict[str, Any], Any, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = self.env.step(action)
        if self._limit and not terminated:
            truncated = self._game.get_episode_time() >= self._limit
        return self._shrink(observation), reward, terminated, truncated, info

    def render(self) -> Any:
        """A picture; None after a termination, of which the simulator has none but a black one."""
        doom: Any = self.env.unwrapped
        return None if doom.state is None else self.env.render()

    def close(self) -> None:
        try:
            super().close()
        finally:
            self._remove_folder()

    def _shrink(self, observation: dict[str, Any]) -> dict[str, Any]:
        for name, (resample, out) in self._pictures.items():
            resample(observation[name], out)
            observation[name] = out
        return observation


def _install_launcher(game: Any, folder: Path) -> None:
    """Let a game start through a script in `folder`.

    It lists the names of the game's shared memory there, moves there, and makes the game end with its parent thread.
    Where scripts cannot be run, only the configuration file lies in `folder`.
    """
    import vizdoom

    game.set_doom_config_path(str(folder / "vizdoom.ini"))
    launcher = folder / "launch"
    binary = shlex.quote(os.path.abspath(game.get_vizdoom_path() or Path(vizdoom.__file__).with_name("vizdoom")))
    guard = "setpriv --pdeathsig KILL -- " if shutil.which("setpriv") else ""
    launcher.write_text(f'''#!/bin/sh
cd {shlex.quote(str(folder))}
game=$(echo "$*" | sed 's/.*viz_instance_id *//; s/ .*//')
for kind in SM MQCtr MQDoom; do echo "{_SHARED_MEMORY}/ViZDoom$kind$game"; done > {ELSEWHERE}
exec {guard}{binary} "$@"
''')
    launcher.chmod(0o700)
    if not os.access(launcher, os.X_OK):  # a temporary folder mounted noexec
        return
    for path, set_path in (
        (game.get_doom_game_path(), game.set_doom_game_path),
        (game.get_doom_scenario_path(), game.set_doom_scenario_path),
    ):
        if path:
            set_path(os.path.abspath(path))
    game.set_vizdoom_path(str(launcher))
