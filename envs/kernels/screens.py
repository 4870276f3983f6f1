"""The stacks of small grey pictures that a policy sees of Atari games, of which only what has changed on the screens is
drawn.

With ALE's own greys and every picture drawn whole a game of Pong takes 1.1 times as long.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numba import njit

from sfactory.envs.kernels.resampling import join_lines, shrink_line, taps

if TYPE_CHECKING:
    from ale_py import ALEInterface

_UNKNOWN = -1


class ScreenStacks:
    """The last pictures of consoles that play the same game.

    A picture is made of two screens, pooled by their maximum and shrunk by areas as
    :class:`~sfactory.envs.kernels.resampling.Resampler` does. Of most screens only a few lines differ from those of the
    step before, so they are compared before they are made grey and shrunk. A game's own memory is small, for it is cold
    when its turn comes; all else is shared.

    Args:
        consoles: With the game loaded.
        depth: Pictures of a stack.
        sides: Height and width of a picture; not above those of the screen.
    """

    def __init__(self, consoles: Sequence[ALEInterface], depth: int, sides: tuple[int, int]) -> None:
        height, width = consoles[0].getScreenDims()
        self._consoles = consoles
        # lists, because an array would make a new view at every look
        self._pictures = list(np.zeros((len(consoles), depth, *sides), np.uint8))
        self._seen = list(np.zeros((len(consoles), height, width), np.uint8))
        self._mixed = list(np.ones((len(consoles), height), bool))
        self._screens = list(np.empty((2, height, width), np.uint8))
        self._changed, self._pooled = np.zeros(height, bool), np.empty((height, width), np.uint8)
        self._greys = np.full(256, _UNKNOWN, np.int16)
        self._taps = taps((height, width, 1), sides)

    def clear(self, row: int, out: np.ndarray) -> None:
        """Begin a console's stack again, with pictures of zeros and the screen that it shows now. Arguments as of
        `push`."""
        self._pictures[row].fill(0)
        self._mixed[row].fill(True)  # so that every line is drawn
        self.look(row, 0)
        self.look(row, 1)
        self._learn(row, 1)  # also the greys of lines that look as before the first screen, of zeros
        self.push(row, out)

    def look(self, row: int, which: int) -> None:
        """Take the screen that a console shows now for one of the two, 0 or 1, of its next picture; those of one
        console at a time."""
        screen = self._screens[which]
        self._consoles[row].getScreen(screen)
        if _compare(screen, self._seen[row], self._changed, self._greys):
            self._learn(row, which)

    def push(self, row: int, out: np.ndarray) -> None:
        """Append a picture of the two screens to a console's stack, drop the oldest, and copy the stack to `out`.

        Args:
            out: uint8 ``[depth, h, w]``, contiguous; oldest first.
        """
        game = self._seen[row], self._mixed[row], self._pictures[row]
        _push(*self._screens, *game, self._changed, self._pooled, self._greys, *self._taps, out)

    def _learn(self, row: int, which: int) -> None:
        """Take down the greys of all colours of the screen that a console shows now."""
        self._greys[self._screens[which]] = self._consoles[row].getScreenGrayscale()


@njit(cache=True, nogil=True)
def _compare(screen, seen, changed, greys):
    """Mark the lines of `screen` that differ from `seen` in `changed`.

    Returns:
        Whether such a line has a colour whose grey is unknown.
    """
    new, old = screen.view(np.uint64), seen.view(np.uint64)
    lowest = 0
    for y in range(len(screen)):
        if _differ(new, old, y):
            changed[y] = True
            for eight in range(new.shape[1]):
                if new[y, eight] != old[y, eight]:
                    for x in range(8 * eight, 8 * eight + 8):
                        lowest = min(lowest, greys[screen[y, x]])
    return lowest == _UNKNOWN


@njit(nogil=True, inline="always")
def _differ(one, two, y):
    """Whether two screens, eight pixels at a time, have different lines."""
    bits = np.uint64(0)
    for x in range(one.shape[1]):
        bits |= one[y, x] ^ two[y, x]
    return bits != 0


@njit(cache=True, nogil=True)
def _push(one, two, seen, mixed, pictures, changed, pooled, greys, rows, row_weights, places, column_weights, out):
    """Append a picture to `pictures`, ``[depth, h, w]``, drop the oldest, and copy them all to `out`. The rest is as of
    `_draw`."""
    depth = len(pictures)
    stack, copy = pictures.reshape(depth, -1), out.reshape(depth, -1)
    for i in range(1, depth):
        for j in range(stack.shape[1]):
            stack[i - 1, j] = copy[i - 1, j] = stack[i, j]
    _draw(one, two, seen, mixed, changed, pooled, greys, rows, row_weights, places, column_weights, pictures[depth - 1])
    for j in range(stack.shape[1]):
        copy[depth - 1, j] = stack[depth - 1, j]


@njit(nogil=True, fastmath=True)
def _draw(one, two, seen, mixed, changed, pooled, greys, rows, row_weights, places, column_weights, picture):
    """Draw the lines of `picture`, so far the last one, into which lines enter that have changed.

    Args:
        one, two: The screens, ``[H, W]``.
        seen: ``[H, W]``, the second screen of the last picture; becomes that of this one.
        mixed: ``[H]``, whether the first one had another line; becomes that of this picture.
        changed: ``[H]``, whether one of the two has another line than `seen`; cleared.
        pooled: ``[H, W]``, room to work in.
    """
    height, width = two.shape
    first, second, old = one.view(np.uint64), two.view(np.uint64), seen.view(np.uint64)
    for y in range(height):
        was_mixed, mixed[y] = mixed[y], False
        if changed[y]:
            mixed[y] = _differ(first, second, y)
            for x in range(old.shape[1]):
                old[y, x] = second[y, x]
        changed[y] |= was_mixed
    line, sums = np.empty(width, np.float32), np.empty(picture.shape[1], np.float32)
    is_pooled = np.zeros(height, np.bool_)
    for y in range(len(picture)):
        is_changed = False
        for tap in range(len(rows)):
            is_changed |= changed[rows[tap, y]]
        if is_changed:
            for tap in range(len(rows)):
                row = rows[tap, y]
                if not is_pooled[row]:
                    is_pooled[row] = True
                    for x in range(width):
                        pooled[row, x] = greys[two[row, x]]
                    if mixed[row]:
                        for x in range(width):
                            pooled[row, x] = max(pooled[row, x], greys[one[row, x]])
            join_lines(pooled, rows, row_weights, y, line)
            shrink_line(line, places, 0, column_weights, sums, picture[y])
    changed[:] = False
