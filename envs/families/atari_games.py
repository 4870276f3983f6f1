"""Games of the Arcade Learning Environment, stepped one after the other in one process, with the usual
preprocessing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from gymnasium import spaces

from sfactory.envs.interface import Group, Outcome, StepBuffers, SurvivedFault
from sfactory.errors import ConfigError

if TYPE_CHECKING:
    from ale_py import ALEInterface

STACK, SIDES = 4, (84, 84)
OBSERVATION_SPACE = spaces.Box(0, 255, (STACK, *SIDES), np.uint8)
PROTOCOLS: dict[str, dict[str, Any]] = {
    "v5": {"repeat_action_probability": 0.25, "episodic_life": False},
    "classic": {"repeat_action_probability": 0.0, "episodic_life": True},
}
"""The ways in which published figures were played, by their names, and in what they differ."""


@dataclass(frozen=True)
class GameSettings:
    """What a game is and how it is played: the ``env_kwargs`` that it takes. ``game`` is ALE's name of it, such as
    space_invaders.

    Raises:
        ConfigError: If a value cannot be meant.
    """

    game: str
    frameskip: int = 4
    noop_max: int = 30
    episodic_life: bool = False
    use_fire_reset: bool = True
    max_num_frames_per_episode: int = 108_000
    repeat_action_probability: float = 0.25
    full_action_space: bool = False
    mode: int | None = None
    difficulty: int | None = None

    @property
    def protocol(self) -> str:
        """Name of the protocol, *own* for no published one, and what it says."""
        names = [name for name, options in PROTOCOLS.items() if self == GameSettings(self.game, **options)]
        sticky = f"actions stick with probability {self.repeat_action_probability:g}"
        return (
            f"{names[0] if names else 'own'} ({sticky if self.repeat_action_probability else 'no sticky actions'}, "
            f"{'a lost life ends an episode of the learner' if self.episodic_life else 'lost lives end nothing'})"
        )

    def __post_init__(self) -> None:
        for name, least in (("frameskip", 1), ("noop_max", 0), ("max_num_frames_per_episode", 1)):
            value = getattr(self, name)
            if not isinstance(value, int) or value < least:
                raise ConfigError(
                    f"env_kwargs {name} is {value!r}; it must be a whole number of frames, at least {least}"
                )
        for name in ("episodic_life", "use_fire_reset", "full_action_space"):
            if not isinstance(value := getattr(self, name), bool):
                raise ConfigError(f"env_kwargs {name} is {value!r}; it must be true or false")
        if not isinstance(self.repeat_action_probability, int | float) or not 0 <= self.repeat_action_probability <= 1:
            raise ConfigError(
                f"env_kwargs repeat_action_probability is {self.repeat_action_probability!r}; it must be from 0 to 1"
            )


ENV_KWARGS = frozenset(field.name for field in fields(GameSettings)) - {"game"}


class AtariGroup(Group):
    """A group of games. One row each; terminated rows begin anew at once, or play the next life where only a life has
    ended; truncated ones rest for a step.

    Args:
        settings: The game and its options.
        seeds: One seed per game.

    Attributes:
        actions: Number of actions of the game.

    Raises:
        ConfigError: If the game has no such mode or difficulty.
    """

    def __init__(self, settings: GameSettings, seeds: Sequence[int]) -> None:
        from sfactory.envs.kernels.screens import ScreenStacks

        self.rows = len(seeds)
        self.goes_on: np.ndarray = np.zeros(len(seeds), bool)
        self.extras: list[dict[str, float]] = []
        self.faults: list[SurvivedFault] = []
        self._settings = settings
        self._consoles = [load(settings, seed) for seed in seeds]
        self._randoms = [np.random.default_rng(seed) for seed in seeds]
        legal = (
            self._consoles[0].getLegalActionSet()
            if settings.full_action_space
            else self._consoles[0].getMinimalActionSet()
        )
        self.actions = len(legal)
        self._actions = legal
        self._noop, self._fire = type(legal[0]).NOOP, type(legal[0]).FIRE
        self._fires = settings.use_fire_reset and self._fire in legal
        self._stacks = ScreenStacks(self._consoles, STACK, SIDES)
        self._lives, self._frames = [0] * self.rows, [0] * self.rows
        self._rests = [False] * self.rows

    def reset(self, buffers: StepBuffers) -> None:
        for row, stack in enumerate(buffers.obs[0]):
            self._begin(row, stack)
        buffers.first.fill(True)
        buffers.active.fill(True)

    def step(self, categorical: np.ndarray, continuous: np.ndarray, outcome: Outcome, after: StepBuffers) -> None:
        results = []
        self.goes_on.fill(False)
        for row, (action, stack) in enumerate(zip(categorical[:, 0].tolist(), after.obs[0], strict=True)):
            results.append(self._step(row, action, stack))
        outcome.reward[:], outcome.terminated[:], outcome.truncated[:], after.first[:] = zip(*results, strict=True)
        np.logical_not(outcome.truncated, out=after.active)

    def render(self) -> list[np.ndarray]:
        return [console.getScreenRGB() for console in self._consoles]

    def close(self) -> None:
        """Do nothing: the consoles are freed with the group."""

    def _step(self, row: int, action: int, stack: np.ndarray) -> tuple[int, bool, bool, bool]:
        """Play an env step of a game, or begin an episode where the last one was truncated.

        Returns:
            Its reward, whether it terminated, whether it was truncated, and whether the pictures are those of a new
            episode. A life's end is noted in `goes_on`.
        """
        if self._rests[row]:
            self._begin(row, stack)
            return 0, False, False, True
        console, settings, chosen = self._consoles[row], self._settings, self._actions[action]
        reward = 0
        for left in range(settings.frameskip - 1, -1, -1):
            reward += console.act(chosen)
            if console.game_over():
                self._begin(row, stack)
                return reward, True, False, True
            if left <= 1:
                self._stacks.look(row, left)
        if settings.frameskip == 1:
            self._stacks.look(row, 1)
        self._stacks.push(row, stack)
        before, self._lives[row] = self._lives[row], console.lives()
        self._frames[row] += settings.frameskip
        self._rests[row] = self._frames[row] >= settings.max_num_frames_per_episode
        # with 0 lives left a game may show its end for some frames more
        if not (settings.episodic_life and 0 < self._lives[row] < before) or self._rests[row]:
            return reward, False, self._rests[row], False
        self.goes_on[row] = True
        if self._fires:
            reward += console.act(self._fire)
        return reward, True, False, True

    def _begin(self, row: int, stack: np.ndarray) -> None:
        console, noop_max = self._consoles[row], self._settings.noop_max
        console.reset_game()
        waits = int(self._randoms[row].integers(1, noop_max, endpoint=True)) if noop_max else 0
        for action in [self._noop] * waits + [self._fire] * self._fires:
            console.act(action)
            if console.game_over():
                console.reset_game()
        self._stacks.clear(row, stack)
        self._lives[row], self._frames[row], self._rests[row] = console.lives(), 0, False


def load(settings: GameSettings, seed: int) -> ALEInterface:
    """A console with a game in it. Takes 0.1 s.

    Raises:
        ConfigError: If the game has no such mode or difficulty.
    """
    import ale_py

    ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)
    console = ale_py.ALEInterface()
    console.setFloat("repeat_action_probability", settings.repeat_action_probability)
    console.setInt("random_seed", seed)
    console.loadROM(cast(Any, ale_py.roms.get_rom_path(settings.game)))
    for name, known, choose in (
        ("mode", console.getAvailableModes(), console.setMode),
        ("difficulty", console.getAvailableDifficulties(), console.setDifficulty),
    ):
        if (value := getattr(settings, name)) is not None:
            if value not in known:
                raise ConfigError(f"env_kwargs {name} is {value!r}; {settings.game} has {', '.join(map(str, known))}")
            choose(value)
    return console
