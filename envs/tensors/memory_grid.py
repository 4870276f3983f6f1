"""``sfactory/TensorMemoryGrid``: :mod:`sfactory.envs.native.memory_grid` as tensors."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.vector import AutoresetMode
from torch import Tensor

from sfactory.envs.native.memory_grid import NO_CUE, memory_views
from sfactory.errors import ConfigError


class MemoryGrid(gymnasium.vector.VectorEnv):
    """Walk along corridors to their two doors and take the one in the colour of the cue: reward 1 for it, -1 for the
    other; both terminate. The cue shows in an episode's first observation only, so that it takes memory.

    Observations are uint8 ``[num_envs, 3, 20, 20]``. Rows that have ended rest for a step, in which they are reset.

    Args:
        num_envs: Rows.
        device: Of all tensors.
        length: Cells from the start to the doors.

    Raises:
        ConfigError: If `length` is below 1.
    """

    def __init__(self, num_envs: int = 1, device: str = "cpu", length: int = 6) -> None:
        if length < 1:
            raise ConfigError(f"env_kwargs length is {length}; it must be at least 1")
        self.num_envs, self._length, self._device = num_envs, length, torch.device(device)
        self.metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP, "render_fps": 6}
        self._views = torch.from_numpy(memory_views(length)).to(self._device)
        self.single_observation_space = gymnasium.spaces.Box(0, 255, tuple(self._views.shape[3:]), np.uint8)
        self.single_action_space = gymnasium.spaces.Discrete(2)
        self.observation_space = gymnasium.vector.utils.batch_space(self.single_observation_space, num_envs)
        self.action_space = gymnasium.vector.utils.batch_space(self.single_action_space, num_envs)
        self._random = torch.Generator(self._device)
        self._place, self._cue = (torch.zeros(num_envs, dtype=torch.int64, device=self._device) for _ in range(2))
        self._begins = torch.ones(num_envs, dtype=torch.bool, device=self._device)
        self._over = torch.zeros_like(self._begins)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Tensor, dict[str, Any]]:
        """Begin all episodes anew."""
        if seed is not None:
            self._random.manual_seed(seed)
        self._begin(torch.ones_like(self._over))
        return self._observation(), {}

    def step(self, actions: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, dict[str, Any]]:
        """Move on in all corridors; the first action of an episode has no effect.

        Args:
            actions: Integers ``[num_envs]``: the left door or the right one; on the way both lead one cell forward.
        """
        resting = self._over
        at_doors = ~resting & (self._place == self._length)
        reward = torch.where(at_doors, torch.where(actions == self._cue, 1.0, -1.0), 0.0)
        self._place += (~resting & ~self._begins & ~at_doors).long()
        self._begin(resting)
        self._over = at_doors
        return self._observation(), reward, at_doors.clone(), torch.zeros_like(at_doors), {}

    def _begin(self, rows: Tensor) -> None:
        """Begin an episode in some rows; the others are past their beginning."""
        cue = torch.empty(self.num_envs, device=self._device).uniform_(generator=self._random) < 0.5
        self._cue = torch.where(rows, cue.long(), self._cue)
        self._place = self._place.masked_fill(rows, 0)
        self._begins = rows.clone()
        self._over = torch.zeros_like(rows)

    def _observation(self) -> Tensor:
        shown = torch.where(self._begins, self._cue, NO_CUE)
        return self._views[self._place, 0, shown]
