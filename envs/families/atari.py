"""Atari 2600 games of the Arcade Learning Environment: every ``ALE/...-v5`` id, and the older ``...NoFrameskip-v0`` and
``-v4``.

Observations are the last 4 frames, uint8 ``[4, 84, 84]``, grey; frames before an episode's first are 0. An env step is
`frameskip` (4) simulator frames, of which the last two are pooled by their maximum. Episodes begin with up to
`noop_max` (30) frames without action, after one frame of FIRE in games that have it (`use_fire_reset`); they are
truncated after `max_num_frames_per_episode` (108,000) frames. Rewards are the game's own. With `episodic_life` the loss
of a life terminates the episode and the game begins anew. All these are ``env_kwargs``, as are the arguments of the
ids' own environments; actions repeat with the `repeat_action_probability` registered for the id (v5 and v0: 0.25; v4:
0).

Three backends play the same game: games stepped one by one (auto; :mod:`sfactory.envs.families.atari_games`), of whose
screens only what has changed is drawn; ALE's vector environment (vector), stepped by `threads` threads, which auto also
takes for more than one thread and for arguments that only it has, such as `img_height` or `grayscale`; and single
environments in Gymnasium's wrappers (gymnasium). They differ in how the random number of frames without action is
drawn; Gymnasium's counts those frames towards the limit, and OpenCV, which makes the vector environment's pictures,
rounds a few pixels otherwise.
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

from sfactory.envs.factory import find_spec, make_environment
from sfactory.envs.families import vector
from sfactory.envs.families.atari_games import ENV_KWARGS, OBSERVATION_SPACE, SIDES, STACK, AtariGroup, GameSettings
from sfactory.envs.families.gymnasium import SingleGroup, read_spec
from sfactory.envs.families.vector import VectorGroup
from sfactory.envs.interface import EnvRequest, EnvSpec, Group
from sfactory.envs.seeds import env_seed
from sfactory.errors import ConfigError, EnvironmentFault
from sfactory.spaces import ActionSpec, ObservationSpec


def handles(request: EnvRequest) -> bool:
    """Atari ids, with every backend but envpool's."""
    return isinstance(request.env, str) and canonical_id(request.env)[0] is not None and request.backend != "envpool"


def canonical_id(env: str) -> tuple[str | None, dict[str, Any]]:
    """The v5 id of the same game and the arguments in which an older id differs from it; None for ids that are not
    Atari's."""
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
    settings, backend = _settings(request), _backend(request)
    if backend == "auto":
        actions = spaces.Discrete(AtariGroup(settings, [0]).actions)
        spec = EnvSpec(
            ObservationSpec.from_space(OBSERVATION_SPACE, request.reading),
            ActionSpec.from_space(actions, request.squash),
        )
    else:
        env, read = (
            (_make_vector(request, 1), vector.read_spec) if backend == "vector" else (_make_single(request), read_spec)
        )
        try:
            spec = read(env, request)
        except EnvironmentFault as fault:
            raise ConfigError(str(fault)) from fault
        finally:
            env.close()
    return dataclasses.replace(spec, family="atari", frameskip=settings.frameskip, render_fps=60 / settings.frameskip)


def make_group(request: EnvRequest, spec: EnvSpec, count: int, first_index: int, seed: int) -> Group:
    """A group of `count` games. Raises as `probe` does."""
    backend = _backend(request)
    if backend == "auto":
        return AtariGroup(_settings(request), [env_seed(seed, first_index + row) for row in range(count)])
    if backend == "vector":
        return VectorGroup(
            [_make_vector(request, count)], lambda seeds: _make_vector(request, count), request, spec, first_index, seed
        )
    games = [_make_single(request) for _ in range(count)]
    return SingleGroup(games, lambda seeds: _make_single(request), request, spec, first_index, seed)


def _backend(request: EnvRequest) -> str:
    """Which of the three it is: auto, vector or gymnasium."""
    is_known = request.kwargs.keys() <= ENV_KWARGS
    if request.render_mode is not None and request.backend != "gymnasium":  # ALE's vector environment cannot render
        return "auto" if is_known else "gymnasium"
    if request.backend == "auto":
        return "auto" if is_known and request.threads == 1 else "vector"
    if request.backend == "vector" and (other := [key for key in ("mode", "difficulty") if key in request.kwargs]):
        raise ConfigError(
            f"env_kwargs {other[0]!r} is not known to ALE's vector environment; use env_backend auto or gymnasium"
        )
    return request.backend


def _settings(request: EnvRequest) -> GameSettings:
    name, differences = canonical_id(request.env)
    given = {**find_spec(name).kwargs, **differences, **request.kwargs}
    return GameSettings(**{key: value for key, value in given.items() if key == "game" or key in ENV_KWARGS})


def _make_vector(request: EnvRequest, count: int) -> VectorEnv:
    name, differences = canonical_id(request.env)
    settings = {
        "reward_clipping": False,
        "num_threads": request.threads,
        # not NEXT_STEP, which loses an env step after every end; both cost the same
        "autoreset_mode": AutoresetMode.SAME_STEP,
        **differences,
    }
    request = dataclasses.replace(request, env=name, backend="vector", kwargs={**settings, **request.kwargs})
    return _SeedArray(make_environment(request, count))


class _SeedArray(VectorWrapper):
    """Hands seeds over as the array that ALE's vector environment demands."""

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        return self.env.reset(seed=np.array(seed, np.int64) if isinstance(seed, list) else seed, options=options)


_WRAPPED = ("noop_max", "frameskip", "episodic_life", "use_fire_reset")
"""Arguments of the wrappers rather than of Gymnasium's environment."""


def _make_single(request: EnvRequest) -> gymnasium.Env:
    name, differences = canonical_id(request.env)
    settings = _settings(request)
    rest = {key: value for key, value in request.kwargs.items() if key not in _WRAPPED}
    # grey frames cost less than the colours that AtariPreprocessing does not look at
    kwargs = {**differences, "obs_type": "grayscale", **rest, "frameskip": 1}
    env = make_environment(dataclasses.replace(request, env=name, backend="gymnasium", kwargs=kwargs), 1)
    height, width = env.observation_space.shape
    env = gymnasium.wrappers.AtariPreprocessing(
        _Console(env, settings.use_fire_reset),
        noop_max=settings.noop_max,
        frame_skip=settings.frameskip,
        screen_size=(width, height),
        terminal_on_life_loss=settings.episodic_life,
    )
    env = gymnasium.wrappers.TransformObservation(env, _shrinking((height, width)), spaces.Box(0, 255, SIDES, np.uint8))
    return gymnasium.wrappers.FrameStackObservation(env, STACK, padding_type="zero")


def _shrinking(sides: tuple[int, int]) -> Callable[[np.ndarray], np.ndarray]:
    """Makes a small picture of a frame ``[H, W]``."""
    from sfactory.envs.kernels.resampling import Resampler

    resampler = Resampler((*sides, 1), SIDES)

    def shrink(frame: np.ndarray) -> np.ndarray:
        out = np.empty((1, *SIDES), np.uint8)
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
