"""An environment on the device whose trajectories are known in advance, in each of the three autoreset modes."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from torch import Tensor


class Schedules(gymnasium.vector.VectorEnv):
    """Row i's episodes last 2 + i % 3 steps and end by turns by termination and by truncation.

    Observations are a Dict of a Box ``count`` [row, episode, step], a Discrete ``kind`` from 5 on and an image ``eye``.
    The reward of a step is 10 x episode + step. With `masked`, the action of the step's parity is forbidden.

    Args:
        told: Whether info says at an episode's end which one it was (``number``), and that rows 0 and 3 go on.
        bad: Global step at which row 1 sees what is not finite.
        broken: Global step at which the environment raises.
        final: What info calls the last observations.
    """

    def __init__(
        self,
        num_envs: int = 1,
        device: str = "cpu",
        mode: str = "SameStep",
        masked: bool = False,
        told: bool = False,
        bad: int = -1,
        broken: int = -1,
        final: str = "final_obs",
    ) -> None:
        self.num_envs, self._device, self._mode = num_envs, torch.device(device), AutoresetMode(mode)
        self.metadata = {"autoreset_mode": self._mode}
        self._masked, self._told, self._bad, self._broken, self._final = masked, told, bad, broken, final
        self.single_observation_space = spaces.Dict(
            {
                "count": spaces.Box(-np.inf, np.inf, (3,), np.float32),
                "kind": spaces.Discrete(4, start=5),
                "eye": spaces.Box(0, 255, (3, 8, 8), np.uint8),
            }
        )
        self.single_action_space = spaces.Discrete(2)
        self.observation_space = gymnasium.vector.utils.batch_space(self.single_observation_space, num_envs)
        self.action_space = gymnasium.vector.utils.batch_space(self.single_action_space, num_envs)
        self._rows = torch.arange(num_envs, device=self._device)
        self._lasts = 2 + self._rows % 3
        self.actions: list[Tensor] = []

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        if options and "reset_mask" in options:
            self._next_episode(options["reset_mask"])
            info = self._info()  # tells nothing of the other rows
            return self._observation(), {key: value & options["reset_mask"][:, None] for key, value in info.items()}
        else:
            self._episode, self._count = (torch.zeros_like(self._rows) for _ in range(2))
            self._over, self._steps = torch.zeros_like(self._rows, dtype=torch.bool), 0
        return self._observation(), self._info()

    def step(self, actions: Tensor) -> tuple[Any, Tensor, Tensor, Tensor, dict[str, Any]]:
        self._steps += 1
        if self._steps == self._broken:
            raise RuntimeError("the simulation has exploded")
        self.actions.append(actions)
        resting = self._over.clone() if self._mode is AutoresetMode.NEXT_STEP else torch.zeros_like(self._over)
        self._next_episode(resting)
        self._count += (~resting).long()
        ended = ~resting & (self._count >= self._lasts)
        reward = torch.where(resting, 77.0, 10.0 * self._episode + self._count)
        terminated, truncated = ended & (self._episode % 2 == 0), ended & (self._episode % 2 == 1)
        self._over = ended
        final, told = self._observation(), self._ends(terminated, ended)
        if self._mode is AutoresetMode.SAME_STEP:
            self._next_episode(ended)
            info = {self._final: final, "final_info": told, "depth": self._count}
            return self._observation(), reward, terminated, truncated, info | self._info()
        return final, reward, terminated, truncated, self._info() | told

    def _ends(self, terminated: Tensor, ended: Tensor) -> dict[str, Any]:
        if not self._told:
            return {}
        goes_on = terminated & (self._rows % 3 == 0)
        return {"number": self._episode, "_number": ended, "goes_on": goes_on, "pair": torch.zeros(self.num_envs, 2)}

    def _next_episode(self, rows: Tensor) -> None:
        self._episode = self._episode + rows.long()
        self._count = self._count.masked_fill(rows, 0)

    def _observation(self) -> dict[str, Tensor]:
        count = torch.stack((self._rows, self._episode, self._count), 1).float()
        if self._steps == self._bad:
            count[1, 2] = torch.nan
        eye = (self._count % 256).to(torch.uint8)[:, None, None, None].expand(-1, 3, 8, 8)
        return {"count": count, "kind": 5 + self._count % 4, "eye": eye}

    def _info(self) -> dict[str, Any]:
        if not self._masked:
            return {}
        return {"action_mask": torch.stack((self._count % 2 == 1, self._count % 2 == 0), 1)}
