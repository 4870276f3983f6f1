"""``sfactory/MemoryGrid``: a corridor in pixels whose right door is known only to those who remember the cue at its
start.

Why memory is needed: the cue (red or green) is drawn by a coin of its own, independent of which door is red and which
green. It is visible in the first observation only, and the action taken from that observation has no effect, so the
state after it is the same whatever the cue was. From then on observations are a function of the agent's place and of
the doors, neither of which the cue enters before the episode is over. To a policy without memory the whole episode from
the second observation on is therefore independent of the cue, and any door it takes is the right one with probability
1/2: its expected return is 0, less the time penalty if there is one. With memory the optimum is 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import gymnasium
import numpy as np
from numba import njit

from sfactory.envs.interface import Outcome, StepBuffers
from sfactory.envs.native.base import RESTING, NativeGroup, uniform
from sfactory.errors import ConfigError

_VIEW_CELLS = 5
_CELL_PIXELS = 4
_WALL, _FLOOR, _AGENT, _RED, _GREEN = range(5)
_COLOURS = np.array([(96, 96, 96), (0, 0, 0), (255, 255, 255), (255, 0, 0), (0, 255, 0)], np.uint8)
NO_CUE = 2


class MemoryGrid(NativeGroup):
    """Walk along a corridor to its two doors and take the one in the colour of the cue: reward 1 for it, -1 for the
    other; both terminate.

    Actions at the doors: the left one (0) or the right one (1). In the corridor every action leads one cell forward, so
    that exploring is easy, nothing is gained by waiting, and the cue must be kept in mind for exactly ``length + 1``
    env steps. Observations are the egocentric 5 x 5 cells around the agent as uint8 ``[3, 20, 20]``.

    Args:
        length: Cells from the start to the doors.
        shuffle_doors: Draw the doors' colours anew in every episode; else the left door is red. Much harder to learn:
            the door to take is then the exclusive or of two bits, of which neither alone says anything.
        time_penalty: Subtracted from every env step's reward.
        max_episode_steps: Env steps after which an episode is truncated; unset: no limit, since all episodes last
            ``length + 2``.

    Raises:
        ConfigError: If `length` is below 1.
    """

    render_fps = 6.0

    def __init__(
        self,
        seeds: Sequence[int],
        squash: Literal["clip", "tanh"] = "clip",
        length: int = 6,
        shuffle_doors: bool = False,
        time_penalty: float = 0.0,
        max_episode_steps: int | None = None,
    ) -> None:
        if length < 1:
            raise ConfigError(f"env_kwargs length is {length}; it must be at least 1")
        super().__init__(seeds, squash, length + 2 if max_episode_steps is None else max_episode_steps)
        views = memory_views(length)
        self._views = views.reshape(*views.shape[:3], -1)
        self._shuffle_doors = bool(shuffle_doors)
        self._time_penalty = float(time_penalty)
        self._place = np.zeros(self.rows, np.int32)
        self._cue = np.zeros(self.rows, np.int8)
        self._left_door = np.zeros(self.rows, np.int8)
        self.observation_space = gymnasium.spaces.Box(0, 255, views.shape[3:], np.uint8)
        self.action_space = gymnasium.spaces.Discrete(2)

    def step(self, categorical: np.ndarray, continuous: np.ndarray, outcome: Outcome, after: StepBuffers) -> None:
        state = (self._place, self._cue, self._left_door, self._elapsed, self._random)
        rules = (self._views, self._shuffle_doors, self._max_steps, self._time_penalty)
        _step(*state, *rules, categorical, *outcome, after.obs[0].reshape(self.rows, -1), after.first, after.active)

    def render(self) -> list[np.ndarray]:
        length = len(self._views) - 1
        state = zip(self._place, self._left_door, self._cue, strict=True)
        maps = [_cells(length, int(place), int(left), int(cue))[1:-1, 1:] for place, left, cue in state]
        return [np.kron(_COLOURS[cells], np.ones((16, 16, 1), np.uint8)) for cells in maps]


def _cells(length: int, place: int, left_door: int, cue: int) -> np.ndarray:
    """The whole map as cell kinds ``[7, length + 5]``, with two cells of wall around everything that can be entered.

    Args:
        place: The agent's distance from the start.
        left_door: 0 if the left door is red and the right one green, 1 if it is the other way round.
        cue: 0 red, 1 green, 2 not visible.
    """
    cells = np.full((7, length + 5), _WALL)
    cells[3, 2 : length + 3] = _FLOOR
    cells[2, length + 2] = _RED + left_door
    cells[4, length + 2] = _GREEN - left_door
    if cue != NO_CUE:
        cells[2:5, 1] = _RED + cue
    cells[3, place + 2] = _AGENT
    return cells


def memory_views(length: int) -> np.ndarray:
    """Every observation there is: uint8 ``[place, left_door, cue, 3, 20, 20]``."""
    half = _VIEW_CELLS // 2
    views = np.empty((length + 1, 2, 3, 3, _VIEW_CELLS * _CELL_PIXELS, _VIEW_CELLS * _CELL_PIXELS), np.uint8)
    for place, left_door, cue in np.ndindex(views.shape[:3]):
        around = _cells(length, place, left_door, cue)[3 - half : 4 + half, place + 2 - half : place + 3 + half]
        views[place, left_door, cue] = np.kron(
            _COLOURS[around], np.ones((_CELL_PIXELS, _CELL_PIXELS, 1), np.uint8)
        ).transpose(2, 0, 1)
    return views


@njit(cache=True, nogil=True)
def _begin(place, cue, left_door, elapsed, random, shuffle_doors, row):
    place[row] = 0
    cue[row] = 1 if uniform(random, row) < 0.5 else 0
    left_door[row] = 1 if shuffle_doors and uniform(random, row) < 0.5 else 0
    elapsed[row] = 0


@njit(cache=True, nogil=True)
def _step(
    place,
    cue,
    left_door,
    elapsed,
    random,
    views,
    shuffle_doors,
    max_steps,
    time_penalty,
    actions,
    reward,
    terminated,
    truncated,
    obs,
    first,
    active,
):
    end = len(views) - 1
    for row in range(len(place)):
        ended = False
        fresh = elapsed[row] == RESTING
        gain = 0.0
        if not fresh:
            gain = -time_penalty
            if elapsed[row] > 0:  # the action chosen while the cue was visible has no effect
                if place[row] < end:
                    place[row] += 1
                else:
                    ended = True
                    colour = left_door[row] if actions[row, 0] == 0 else 1 - left_door[row]
                    gain += 1.0 if colour == cue[row] else -1.0
            elapsed[row] += 1
        timed_out = not fresh and not ended and elapsed[row] >= max_steps
        if fresh or ended:
            _begin(place, cue, left_door, elapsed, random, shuffle_doors, row)
        reward[row] = gain
        terminated[row] = ended
        truncated[row] = timed_out
        first[row] = fresh or ended
        active[row] = not timed_out
        if timed_out:
            elapsed[row] = RESTING
        view = views[place[row], left_door[row], cue[row] if elapsed[row] == 0 else NO_CUE]
        for i in range(len(view)):
            obs[row, i] = view[i]
