"""Steps of compiled environments, and what makes pictures of screens."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from perf import plain
from perf.kernel_cases.case import ROWS, Call, Case, copies
from sfactory.envs.interface import Outcome, StepBuffers
from sfactory.envs.kernels.resampling import Resampler
from sfactory.envs.kernels.screens import ScreenStacks
from sfactory.envs.native.base import NativeGroup, random_streams
from sfactory.envs.native.cartpole import CartPole
from sfactory.envs.native.memory_grid import MemoryGrid
from sfactory.envs.native.pendulum import Pendulum

PICTURES = ((120, 160), (240, 320))
POLICY_PICTURE = (72, 128)
STEPS_CHECKED = 300


def resampling(device: torch.device) -> Iterator[Case]:
    """A picture of ViZDoom's to the size that a policy sees."""
    for source in PICTURES:
        image = np.random.default_rng(0).integers(0, 256, (*source, 3), np.uint8)
        out = np.empty((3, *POLICY_PICTURE), np.uint8)
        resampler = Resampler(image.shape, POLICY_PICTURE)
        matrices = [plain.area_matrix(a, b) for a, b in zip(source, POLICY_PICTURE, strict=True)]

        def compiled(resampler=resampler, image=image, out=out) -> Sequence[np.ndarray]:
            resampler(image, out)
            return (out,)

        versions: dict[str, Call] = {
            "numba": compiled,
            "numpy": functools.partial(plain.resample, np, image, *matrices),
            f"torch {device}": functools.partial(plain.resample, torch, *copies((image, *matrices), device)),
        }
        yield Case("resample", f"{source[0]} x {source[1]}", 1, versions, tolerance=1.0)


def screens(device: torch.device) -> Iterator[Case]:
    """Two screens of an Atari game to the newest picture of its stack, with what a tenth, and all, of the lines
    change."""
    sides, small = (210, 160), (84, 84)
    matrices = [plain.area_matrix(a, b) for a, b in zip(sides, small, strict=True)]

    def whole(xp: Any, shown: Any, *others: Any, first: Iterator[int]) -> Sequence[Any]:
        number = next(first)
        return (plain.picture(xp, shown[[number % len(shown), (number + 1) % len(shown)]], *others),)

    for changing in (0.1, 1.0):
        console = plain.RecordedConsole(64, sides, changing, seed=0)
        stacks, out = ScreenStacks([console], 4, small), np.empty((4, *small), np.uint8)
        stacks.clear(0, out)

        def compiled(console=console, stacks=stacks, out=out) -> Sequence[np.ndarray]:
            for which in range(2):
                console.show(console.shown + 1)
                stacks.look(0, which)
            stacks.push(0, out)
            return (out[-1],)

        arrays = (console.screens, console.greys, *matrices)
        versions: dict[str, Call] = {
            "numba": compiled,
            "numpy": functools.partial(whole, np, *arrays, first=itertools.count(1, 2)),
            f"torch {device}": functools.partial(whole, torch, *copies(arrays, device), first=itertools.count(1, 2)),
        }
        yield Case("screens", f"{changing:.0%} changing", 1, versions, calls=50, tolerance=1.0)


class CompiledEnvironments:
    """A native group with arrays of its own to write into."""

    def __init__(self, group: NativeGroup) -> None:
        rows, space = group.rows, group.observation_space
        self._group = group
        self._buffers = StepBuffers(
            (np.zeros((rows, *space.shape), space.dtype),), None, np.zeros(rows, bool), np.zeros(rows, bool)
        )
        self._outcome = Outcome(np.zeros(rows, np.float32), np.zeros(rows, bool), np.zeros(rows, bool))

    def step(self, categorical: np.ndarray, continuous: np.ndarray) -> tuple[np.ndarray, ...]:
        self._group.step(categorical, continuous, self._outcome, self._buffers)
        reward, terminated, truncated = self._outcome
        obs = self._buffers.obs[0].reshape(self._group.rows, -1)
        return obs, reward, self._buffers.first, terminated, truncated, self._buffers.active


def environments(device: torch.device) -> Iterator[Case]:
    """One step of every row under random actions; episodes begin and end as they do."""
    views = np.ascontiguousarray(MemoryGrid([0])._views)
    views_of = {np: views, torch: torch.tensor(views, device=device)}
    for rows in ROWS:
        for name, kind, version in (
            ("CartPole", CartPole, plain.PlainCartPole),
            ("Pendulum", Pendulum, plain.PlainPendulum),
            ("MemoryGrid", MemoryGrid, lambda xp, random: plain.PlainMemoryGrid(xp, random, views_of[xp])),
        ):
            random = random_streams(range(rows)).view(np.int64)
            rng = np.random.default_rng(0)
            categorical, continuous = (
                rng.integers(0, 2, (64, rows, 1), np.int32),
                rng.normal(0, 1, (64, rows, 1)).astype(np.float32),
            )
            actions = (continuous if kind is Pendulum else categorical)[..., 0]
            versions: dict[str, Call] = {
                "numba": _stepping(CompiledEnvironments(kind(range(rows))).step, categorical, continuous),
                "numpy": _stepping(version(np, random.copy()).step, actions),
                f"torch {device}": _stepping(
                    version(torch, torch.tensor(random, device=device)).step, *copies([actions], device)
                ),
            }
            yield Case(f"{name}, step", f"{rows} rows", rows, versions, calls=STEPS_CHECKED)


def _stepping(step: Callable[..., Sequence[Any]], *actions: Any) -> Call:
    """Calls `step` with the actions of one step after the other, again and again."""
    count = 0

    def call() -> Sequence[Any]:
        nonlocal count
        count += 1
        return step(*(each[count % len(each)] for each in actions))

    return call
