"""Crafter (Hafner 2021) as Gymnasium environments, CrafterReward-v1 and CrafterNoReward-v1, registered by an import of
this module. The package itself speaks the API of before Gymnasium."""

from __future__ import annotations

from collections import defaultdict
from typing import Any, ClassVar

import crafter
import gymnasium
import numpy as np
from crafter.engine import World

LENGTH = 10_000
"""Env steps after which an episode is truncated, by default."""


class Crafter(gymnasium.Env):
    """A world of its own for each seed and episode.

    At an episode's end `info` has ``achievements``, the number of different ones, and ``achievement/NAME``, 1 for each
    that was unlocked.

    Args:
        render_mode: rgb_array or None.
        kwargs: Those of ``crafter.Env``: area, view, size, reward, length.
    """

    metadata: ClassVar[dict[str, Any]] = {"render_modes": ["rgb_array"], "render_fps": 10}  # type: ignore[misc]

    def __init__(self, render_mode: str | None = None, length: int = LENGTH, **kwargs: Any) -> None:
        self._arguments = {"length": length, **kwargs}
        self.render_mode = render_mode
        self._game = self._make(None)
        shape = self._game.observation_space.shape
        self.observation_space = gymnasium.spaces.Box(0, 255, shape, np.uint8)
        self.action_space = gymnasium.spaces.Discrete(len(self._game.action_names))

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        if seed is not None:
            self._game = self._make(seed)
        return self._game.reset(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        observation, reward, done, info = self._game.step(int(action))
        dead = info["discount"] == 0
        return observation, float(reward), dead, done and not dead, _achieved(info["achievements"]) if done else {}

    def render(self) -> Any:
        return self._game.render()

    def _make(self, seed: int | None) -> crafter.Env:
        game = crafter.Env(seed=seed, **self._arguments)
        game._world.__class__ = _OrderedWorld  # the same one, which its views hold, too
        return game


class _OrderedWorld(World):
    """A world whose creatures are drawn by its seed alone. Crafter draws some from sets, whose order is that of their
    addresses."""

    def reset(self, seed: int | None = None) -> None:
        super().reset(seed)
        self._chunks: defaultdict[Any, _OrderedSet] = defaultdict(_OrderedSet)


class _OrderedSet(dict[Any, None]):
    """What a world does with its sets, in the order in which their members came."""

    def add(self, member: Any) -> None:
        self[member] = None

    def remove(self, member: Any) -> None:
        del self[member]


def _achieved(counts: dict[str, int]) -> dict[str, Any]:
    unlocked = {f"achievement/{name}": int(count > 0) for name, count in counts.items()}
    return unlocked | {"achievements": sum(unlocked.values())}


for _id, _reward in (("CrafterReward-v1", True), ("CrafterNoReward-v1", False)):
    if _id not in gymnasium.registry:
        gymnasium.register(_id, entry_point=Crafter, kwargs={"reward": _reward})
