"""Atari 2600 games of the Arcade Learning Environment: every ``ALE/...-v5`` id, and the older ``...NoFrameskip-v0`` and
``-v4``.

Observations are the last 4 frames, uint8 ``[4, 84, 84]``, grey; frames before an episode's first are 0. An env step is
`frameskip` (4) simulator frames, of which the last two are pooled by their maximum. Games begin with up to `noop_max`
(30) frames without action and then one frame of FIRE where they have it (`use_fire_reset`); they are truncated after
`max_num_frames_per_episode` (108,000) frames. Rewards are the game's own. With `episodic_life` the loss of a life
terminates the learner's episode after its env step; the game goes on, with a frame of FIRE as at its begin, and reports
and evaluation are of whole games. All these are ``env_kwargs``, as are the arguments of the ids' own environments.

The id chooses one of two protocols, which :attr:`EnvSpec.protocol` names:

- *v5*, ``ALE/...-v5`` and ``...NoFrameskip-v0``: actions stick with `repeat_action_probability` 0.25, and lives mean
  nothing (Machado et al. 2018).
- *classic*, ``...NoFrameskip-v4``: no action sticks, and `episodic_life` (Mnih et al. 2015; PPO's published figures).

Three backends play the same game: games stepped one by one (auto; :mod:`sfactory.envs.families.atari_games`), of whose
screens only what has changed is drawn; ALE's vector environment (vector), stepped by `threads` threads, which auto also
takes for more than one thread and for arguments that only it has, such as `img_height` or `grayscale`; and single
environments in Gymnasium's wrappers (gymnasium). They differ in how the random number of frames without action is
drawn; Gymnasium's counts those frames towards the limit; ALE's vector environment presses FIRE before them, and after a
lost life in place of the next action; and OpenCV, which makes its pictures, rounds a few pixels otherwise.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any, cast

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv, VectorWrapper

from sfactory.envs.factory import make_environment
from sfactory.envs.families import vector
from sfactory.envs.families.atari_games import (
    ENV_KWARGS,
    OBSERVATION_SPACE,
    PROTOCOLS,
    SIDES,
    STACK,
    AtariGroup,
    GameSettings,
)
from sfactory.envs.families.gymnasium import SingleGroup, read_spec
from sfactory.envs.families.vector import VectorGroup
from sfactory.envs.faults import probing
from sfactory.envs.interface import GOES_ON_KEY, EnvRequest, EnvSpec, Group
from sfactory.envs.registry import find_spec
from sfactory.envs.seeds import env_seed
from sfactory.errors import ConfigError
from sfactory.spaces import ActionSpec, ObservationSpec


def handles(request: EnvRequest) -> bool:
    """Atari ids, with every backend but envpool's."""
    return isinstance(request.env, str) and canonical_id(request.env)[0] is not None and request.backend != "envpool"


def canonical_id(env: str) -> tuple[str | None, dict[str, Any]]:
    """The v5 id of the same game and what the id's protocol asks for; None for ids that are not Atari's."""
    name = env.rpartition(":")[2]
    if re.fullmatch(r"ALE/\w+-v5", name):
        return name, PROTOCOLS["v5"]
    if older := re.fullmatch(r"(\w+)NoFrameskip-v([04])", name):
        return f"ALE/{older[1]}-v5", PROTOCOLS["v5" if older[2] == "0" else "classic"]
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
        is_vector = backend == "vector"
        made: Any = _make_vector(request, 1) if is_vector else make_single(request)
        with probing(made):
            spec = (vector.read_spec if is_vector else read_spec)(made, request)
    frames = settings.frameskip
    return dataclasses.replace(
        spec, family="atari", frameskip=frames, render_fps=60 / frames, protocol=settings.protocol
    )


def make_group(request: EnvRequest, spec: EnvSpec, count: int, first_index: int, seed: int) -> Group:
    """A group of `count` games. Raises as `probe` does."""
    backend = _backend(request)
    if backend == "auto":
        return AtariGroup(_settings(request), [env_seed(seed, first_index + row) for row in range(count)])
    if backend == "vector":
        return VectorGroup(
            [_make_vector(request, count)], lambda seeds: _make_vector(request, count), request, spec, first_index, seed
        )
    games = [make_single(request) for _ in range(count)]
    return SingleGroup(games, lambda seeds: make_single(request), request, spec, first_index, seed)


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
    name, protocol = canonical_id(request.env)
    given = {**find_spec(cast(str, name)).kwargs, **protocol, **request.kwargs}
    return GameSettings(**{key: value for key, value in given.items() if key == "game" or key in ENV_KWARGS})


def _make_vector(request: EnvRequest, count: int) -> VectorEnv:
    name, protocol = canonical_id(request.env)
    kwargs = {
        "reward_clipping": False,
        "num_threads": request.threads,
        # not NEXT_STEP, which loses an env step after every end; both cost the same
        "autoreset_mode": AutoresetMode.SAME_STEP,
        **protocol,
        **request.kwargs,
    }
    if ends_lives := kwargs.pop("episodic_life"):  # ALE's own begins a new game
        kwargs["life_loss_info"] = True
        if AutoresetMode(kwargs["autoreset_mode"]) is not AutoresetMode.SAME_STEP:
            raise ConfigError(
                f"env_kwargs autoreset_mode is {kwargs['autoreset_mode']!r}; where lives end episodes, leave it out"
            )
    env = _SeedArray(make_environment(dataclasses.replace(request, env=name, backend="vector", kwargs=kwargs), count))
    return _FurtherLives(env, kwargs.get("use_fire_reset", True)) if ends_lives else env


class _SeedArray(VectorWrapper):
    """Hands seeds over as the array that ALE's vector environment demands."""

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        given: Any = np.array(seed, np.int64) if isinstance(seed, list) else seed
        return self.env.reset(seed=given, options=options)


class _FurtherLives(VectorWrapper):
    """Tells the ends of lives, which ALE's vector environment reports, from those of games, and presses FIRE to begin
    the next life.

    Args:
        env: The vector environment, with `life_loss_info`.
        use_fire_reset: Press FIRE in games that have it.
    """

    def __init__(self, env: VectorEnv, use_fire_reset: bool) -> None:
        super().__init__(env)
        console: Any = env.unwrapped
        names = [action.name for action in console.ale.get_action_set()]
        is_discrete = isinstance(env.single_action_space, spaces.Discrete)
        self._fire = names.index("FIRE") if use_fire_reset and is_discrete and "FIRE" in names else None
        self._lives, self._goes_on = np.zeros(env.num_envs, int), np.zeros(env.num_envs, bool)

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        observation, info = self.env.reset(seed=seed, options=options)
        self._lives, self._goes_on = info["lives"].copy(), np.zeros(self.num_envs, bool)
        return observation, info

    def step(self, actions: np.ndarray) -> tuple[Any, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        if self._fire is not None:
            actions = np.where(self._goes_on, self._fire, actions)
        observation, reward, terminated, truncated, info = self.env.step(actions)
        lives = info["lives"].copy()  # those of the next game where one has ended
        self._goes_on = terminated & (lives < self._lives)
        self._lives = lives
        return observation, reward, terminated, truncated, {**info, "final_info": {GOES_ON_KEY: self._goes_on}}


_WRAPPED = ("noop_max", "frameskip", "episodic_life", "use_fire_reset")
"""Arguments of the wrappers rather than of Gymnasium's environment."""


def make_single(request: EnvRequest) -> gymnasium.Env:
    """A game in Gymnasium's wrappers. Raises as `probe` does."""
    name, protocol = canonical_id(request.env)
    settings = _settings(request)
    # grey frames cost less than the colours that AtariPreprocessing does not look at
    kwargs = {**protocol, "obs_type": "grayscale", **request.kwargs}
    kwargs = {key: value for key, value in kwargs.items() if key not in _WRAPPED} | {"frameskip": 1}
    env = make_environment(dataclasses.replace(request, env=name, backend="gymnasium", kwargs=kwargs), 1)
    height, width = env.observation_space.shape
    console = _Console(env, settings)
    env = gymnasium.wrappers.AtariPreprocessing(
        console, noop_max=0, frame_skip=settings.frameskip, screen_size=(width, height)
    )
    env = gymnasium.wrappers.TransformObservation(env, _shrinking((height, width)), spaces.Box(0, 255, SIDES, np.uint8))
    env = gymnasium.wrappers.FrameStackObservation(env, STACK, padding_type="zero")
    return _Lives(env, console) if settings.episodic_life else env


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
    """A game frame by frame, which begins as the settings say. Keeps ALE's counters out of the episode statistics."""

    def __init__(self, env: gymnasium.Env, settings: GameSettings) -> None:
        super().__init__(env)
        self._console = cast(Any, env.unwrapped)
        meanings = self._console.get_action_meanings()
        self._noop_max = settings.noop_max
        self._fires = [meanings.index("FIRE")] if settings.use_fire_reset and "FIRE" in meanings else []

    @property
    def lives(self) -> int:
        """Those that are left."""
        return self._console.ale.lives()

    def press_fire(self) -> float:
        """Press FIRE for a frame where asked to; gives the reward."""
        return sum(float(self.env.step(action)[1]) for action in self._fires)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        observation, _ = self.env.reset(seed=seed, options=options)
        waits = self.env.unwrapped.np_random.integers(1, self._noop_max + 1) if self._noop_max else 0
        for action in [0] * waits + self._fires:
            observation, _, terminated, truncated, _ = self.env.step(action)
            if terminated or truncated:
                observation, _ = self.env.reset(options=options)
        return observation, {}

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        return (*self.env.step(action)[:4], {})


class _Lives(gymnasium.Wrapper):
    """Ends an episode with each life. The next one goes on with the game.

    Args:
        env: The whole environment.
        console: The console in it.
    """

    def __init__(self, env: gymnasium.Env, console: _Console) -> None:
        super().__init__(env)
        self._console = console
        self._lives = 0
        self._next: Any = None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        if self._next is not None and seed is None:
            return self._next, {}
        observation, info = self.env.reset(seed=seed, options=options)
        self._lives, self._next = self._console.lives, None
        return observation, info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = self.env.step(action)
        before, self._lives = self._lives, self._console.lives
        # with 0 lives left a game may show its end for some frames more
        if terminated or truncated or not 0 < self._lives < before:
            self._next = None
            return observation, reward, terminated, truncated, info
        self._next = observation
        return observation, float(reward) + self._console.press_fire(), True, False, {**info, GOES_ON_KEY: True}
