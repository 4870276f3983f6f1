"""Atari 2600 games of the Arcade Learning Environment: every ``ALE/...-v5`` id, and the older ``...NoFrameskip-v0`` and ``-v4``.

Observations are the last 4 frames, uint8 ``[4, 84, 84]``, grey; frames before an episode's first are 0. An env step is `frameskip` (4)
simulator frames, of which the last two are pooled by their maximum. Episodes begin with up to `noop_max` (30) frames without action, after
one frame of FIRE in games that have it (`use_fire_reset`); they are truncated after `max_num_frames_per_episode` (108,000) frames. Rewards
are the game's own. With `episodic_life` the loss of a life terminates the episode and the game begins anew. All these are ``env_kwargs``,
as are the arguments of the ids' own environments; actions repeat with the `repeat_action_probability` registered for the id (v5 and v0:
0.25; v4: 0).

Two backends play the same game: ALE's vector environment (auto, vector), stepped by `threads` threads, and single environments in
Gymnasium's wrappers (gymnasium), used by auto also for videos and for the arguments `mode` and `difficulty`. They differ in how the random
number of frames without action is drawn, and in that the vector environment does not count those frames towards the limit. Both leave the
shrinking of frames to :mod:`sfactory.envs.resampling`, which takes a quarter of OpenCV's time for the same pictures but for roundings;
with one of the arguments `img_height`, `img_width`, `stack_num`, `grayscale` and `autoreset_mode` ALE's vector environment makes the
whole observation.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv, VectorWrapper
from gymnasium.vector.utils import batch_space

from sfactory.envs import vector
from sfactory.envs.group import EnvRequest, EnvSpec, Group
from sfactory.envs.gymnasium import SingleGroup, read_spec
from sfactory.envs.making import make_environment
from sfactory.envs.vector import VectorGroup
from sfactory.errors import ConfigError, EnvironmentFault

_PREPROCESSING = {"frameskip": 4, "noop_max": 30, "episodic_life": False, "use_fire_reset": True}
_SINGLE_ONLY = ("mode", "difficulty")
_WHOLLY_ALES = ("img_height", "img_width", "stack_num", "grayscale", "autoreset_mode")
_STACK, _SIDES = 4, (84, 84)


def handles(env: Any, backend: str) -> bool:
    """Atari ids, with every backend but envpool's."""
    return isinstance(env, str) and canonical_id(env)[0] is not None and backend != "envpool"


def canonical_id(env: str) -> tuple[str | None, dict[str, Any]]:
    """The v5 id of the same game and the arguments in which an older id differs from it; None for ids that are not Atari's."""
    name = env.rpartition(":")[2]
    if re.fullmatch(r"ALE/\w+-v5", name):
        return name, {}
    if older := re.fullmatch(r"(\w+)NoFrameskip-v([04])", name):
        return f"ALE/{older[1]}-v5", {"repeat_action_probability": 0.25 if older[2] == "0" else 0.0}
    return None, {}


def probe(request: EnvRequest) -> EnvSpec:
    """Make one game, read its spec, and close it.

    Raises:
        ConfigError: If ale-py is missing, the game is unknown, or `env_kwargs` do not fit.
    """
    if _is_vector(request):
        env, read = _make_vector(request, 1), vector.read_spec
    else:
        env, read = _make_single(request), read_spec
    try:
        frameskip = _preprocessing(request)["frameskip"]
        return dataclasses.replace(read(env, request), family="atari", frameskip=frameskip, render_fps=60 / frameskip)
    except EnvironmentFault as fault:
        raise ConfigError(str(fault)) from fault
    finally:
        env.close()


def make_group(request: EnvRequest, spec: EnvSpec, count: int, first_index: int, seed: int) -> Group:
    """A group of `count` games. Raises as `probe` does."""
    if _is_vector(request):
        return VectorGroup([_make_vector(request, count)], lambda seeds: _make_vector(request, count), request, spec, first_index, seed)
    games = [_make_single(request) for _ in range(count)]
    return SingleGroup(games, lambda seeds: _make_single(request), request, spec, first_index, seed)


def _is_vector(request: EnvRequest) -> bool:
    if request.render_mode is not None or request.backend == "gymnasium":  # the vector environment cannot render
        return False
    single_only = [key for key in _SINGLE_ONLY if key in request.kwargs]
    if single_only and request.backend == "vector":
        raise ConfigError(f"env_kwargs {single_only[0]!r} is not known to ALE's vector environment; use env_backend auto or gymnasium")
    return not single_only


def _preprocessing(request: EnvRequest) -> dict[str, Any]:
    chosen = {key: request.kwargs.get(key, default) for key, default in _PREPROCESSING.items()}
    if not isinstance(chosen["frameskip"], int) or chosen["frameskip"] < 1:
        raise ConfigError(f"env_kwargs frameskip is {chosen['frameskip']!r}; it must be a whole number of frames, at least 1")
    return chosen


def _make_vector(request: EnvRequest, count: int) -> VectorEnv:
    name, differences = canonical_id(request.env)
    settings = {
        "reward_clipping": False,
        "num_threads": request.threads,
        # not NEXT_STEP, which loses an env step after every end; both cost the same
        "autoreset_mode": AutoresetMode.SAME_STEP,
        **differences,
        **_preprocessing(request),
    }
    screen = None if any(key in request.kwargs for key in _WHOLLY_ALES) else _screen(name)
    if screen is not None:
        settings |= {"img_height": screen[0], "img_width": screen[1], "stack_num": 1}
    request = dataclasses.replace(request, env=name, backend="vector", kwargs={**settings, **request.kwargs})
    env = _SeedArray(make_environment(request, count))
    return env if screen is None else _SmallStacks(env)


def _screen(name: str) -> tuple[int, int] | None:
    """Height and width of a game's frames in pixels; None if there is no such game here, of which making it will tell."""
    try:
        import ale_py
    except ImportError:
        return None
    if name not in gymnasium.registry:
        return None
    console = ale_py.ALEInterface()
    console.setLoggerMode(ale_py.LoggerMode.Error)
    console.loadROM(ale_py.roms.get_rom_path(gymnasium.spec(name).kwargs["game"]))
    return console.getScreenDims()


class _SeedArray(VectorWrapper):
    """Hands seeds over as the array that ALE's vector environment demands."""

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        return self.env.reset(seed=np.array(seed, np.int64) if isinstance(seed, list) else seed, options=options)


class _SmallStacks(VectorWrapper):
    """Shrinks and stacks the frames of a vector environment that resets within the step and gives the newest frame alone, ``[N, 1, H, W]``.

    Observations share memory with those of later steps.
    """

    def __init__(self, env: VectorEnv) -> None:
        from sfactory.envs.resampling import Resampler

        super().__init__(env)
        self._resampler = Resampler((*env.single_observation_space.shape[1:], 1), _SIDES)
        self._stacks = np.zeros((env.num_envs, _STACK, *_SIDES), np.uint8)
        self.single_observation_space = spaces.Box(0, 255, (_STACK, *_SIDES), np.uint8)
        self.observation_space = batch_space(self.single_observation_space, env.num_envs)

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict[str, Any]]:
        frames, info = self.env.reset(seed=seed, options=options)
        self._stacks.fill(0)
        return self._pushed(frames, self._stacks), info

    def step(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        frames, reward, terminated, truncated, info = self.env.step(actions)
        ended = np.flatnonzero(terminated | truncated)
        if len(ended):
            finals = np.zeros_like(self._stacks)
            finals[ended] = self._pushed(info["final_obs"][ended], self._stacks[ended])
            info = {**info, "final_obs": finals}
            self._stacks[ended] = 0
        return self._pushed(frames, self._stacks), reward, terminated, truncated, info

    def _pushed(self, frames: np.ndarray, stacks: np.ndarray) -> np.ndarray:
        self._resampler.push(frames.reshape(len(frames), *frames.shape[2:], 1), stacks)
        return stacks


def _make_single(request: EnvRequest) -> gymnasium.Env:
    name, differences = canonical_id(request.env)
    chosen = _preprocessing(request)
    rest = {key: value for key, value in request.kwargs.items() if key not in chosen}
    # grey frames cost less than the colours that AtariPreprocessing does not look at
    kwargs = {**differences, "obs_type": "grayscale", **rest, "frameskip": 1}
    env = make_environment(dataclasses.replace(request, env=name, backend="gymnasium", kwargs=kwargs), 1)
    height, width = env.observation_space.shape
    env = gymnasium.wrappers.AtariPreprocessing(
        _Console(env, chosen["use_fire_reset"]),
        noop_max=chosen["noop_max"],
        frame_skip=chosen["frameskip"],
        screen_size=(width, height),
        terminal_on_life_loss=chosen["episodic_life"],
    )
    env = gymnasium.wrappers.TransformObservation(env, _shrinking((height, width)), spaces.Box(0, 255, _SIDES, np.uint8))
    return gymnasium.wrappers.FrameStackObservation(env, _STACK, padding_type="zero")


def _shrinking(sides: tuple[int, int]) -> Callable[[np.ndarray], np.ndarray]:
    """Makes a small picture of a frame ``[H, W]``."""
    from sfactory.envs.resampling import Resampler

    resampler = Resampler((*sides, 1), _SIDES)

    def shrink(frame: np.ndarray) -> np.ndarray:
        out = np.empty((1, *_SIDES), np.uint8)
        resampler(frame[..., None], out)
        return out[0]

    return shrink


class _Console(gymnasium.Wrapper):
    """Presses FIRE for one frame at a reset where asked to, and keeps ALE's counters out of the episode statistics."""

    def __init__(self, env: gymnasium.Env, use_fire_reset: bool) -> None:
        super().__init__(env)
        meanings = env.unwrapped.get_action_meanings()
        self._fire = meanings.index("FIRE") if use_fire_reset and "FIRE" in meanings else None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        observation, _ = self.env.reset(seed=seed, options=options)
        if self._fire is not None:
            observation = self.env.step(self._fire)[0]
        return observation, {}

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        return (*self.env.step(action)[:4], {})
