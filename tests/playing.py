"""Plays a group made for a request, for the tests of the environment families."""

from __future__ import annotations

from types import TracebackType
from typing import Any

import numpy as np

from sfactory import envs
from sfactory.envs.interface import EnvRequest, EnvSpec, Group, Outcome, StepBuffers
from sfactory.envs.observations import new_step_buffers


class Play:
    """A group with its arrays, already reset. Closes it at the end of a ``with``.

    Args:
        count: Number of environments.
        options: Other fields of the request, such as `backend`.
    """

    def __init__(
        self,
        env: Any,
        count: int,
        kwargs: dict[str, Any] | None = None,
        *,
        first_index: int = 0,
        seed: int = 1,
        **options: Any,
    ) -> None:
        request = EnvRequest(env, kwargs or {}, **options)
        self.spec: EnvSpec = envs.probe(request)
        self.group: Group = envs.make_group(request, self.spec, count, first_index, seed)
        rows = self.group.rows
        self.buffers: StepBuffers = new_step_buffers(self.spec, rows)
        self.outcome = Outcome(np.full(rows, 9, np.float32), np.ones(rows, bool), np.ones(rows, bool))
        self.group.reset(self.buffers)

    def __enter__(self) -> Play:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.group.close()

    @property
    def obs(self) -> np.ndarray:
        """The first leaf."""
        return self.buffers.obs[0]

    def step(self, actions: np.ndarray) -> Outcome:
        """Step with one number per row and action component: categories or unsquashed Gaussian samples."""
        rows, action = self.group.rows, self.spec.action
        values = np.reshape(actions, (rows, -1))
        categorical = np.broadcast_to(values, (rows, len(action.sizes))).astype(np.int32)
        self.group.step(
            categorical,
            np.broadcast_to(values, (rows, action.continuous)).astype(np.float32),
            self.outcome,
            self.buffers,
        )
        return self.outcome
