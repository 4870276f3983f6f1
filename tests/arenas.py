"""A small arena with several observation leaves, masks and both kinds of actions, and a data plane around it."""

from __future__ import annotations

import numpy as np
from gymnasium import spaces

from sfactory.data.arena import Arena, segment_fields
from sfactory.data.plane import DataPlane
from sfactory.data.queues import LocalQueue
from sfactory.data.weights import PublishedWeights
from sfactory.envs.interface import EnvSpec
from sfactory.runtime.wires import LocalEvents
from sfactory.spaces import ActionSpec, ObservationSpec

STATE_SIZE = 7


def env_spec(masked: bool = True) -> EnvSpec:
    """An image and a vector; one category of three and two continuous dimensions."""
    observation = spaces.Dict({"image": spaces.Box(0, 255, (3, 8, 8), np.uint8), "pos": spaces.Box(-1, 1, (2,))})
    action = spaces.Tuple((spaces.Discrete(3), spaces.Box(-1, 1, (2,))))
    return EnvSpec(ObservationSpec.from_space(observation), ActionSpec.from_space(action), masked=masked)


def make_arena(slots: int = 3, rollout: int = 4, rows: int = 5, masked: bool = True) -> Arena:
    return Arena(segment_fields(env_spec(masked), STATE_SIZE), slots, rollout, rows)


def make_plane(
    arena: Arena, policy_worker_of: tuple[int, ...], rollout_worker_of: tuple[int, ...], weights: int = 1
) -> DataPlane:
    """A data plane with local queues, for the given routes of groups."""
    return DataPlane(
        arena,
        PublishedWeights(weights),
        requests=[LocalQueue() for _ in range(max(policy_worker_of) + 1)],
        ready=[LocalQueue() for _ in range(max(rollout_worker_of) + 1)],
        free=LocalQueue(),
        finished=LocalQueue(),
        events=LocalEvents(),
        policy_worker_of=policy_worker_of,
        rollout_worker_of=rollout_worker_of,
    )
