"""Environments of every kind, played with random actions as their own API has it, without anything between; what only
sfactory makes of an id is played as training plays it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import gymnasium
import numpy as np

from sfactory.envs import make_group
from sfactory.envs.factory import is_parallel, is_vector, make_environment
from sfactory.envs.families import gymnasium as single
from sfactory.envs.families import multiagent, tensors, vector
from sfactory.envs.interface import TOGETHER, EnvRequest, EnvSpec, Outcome, whole_ends
from sfactory.envs.observations import LATE_MASK, NO_MASK, ObservationWriter, mask_in, new_step_buffers
from sfactory.envs.random_play import allowed_categories
from sfactory.errors import EnvironmentFault, shown
from sfactory.spaces import MASK_KEY

VECTOR_ROWS = 4
"""Environments of a vector environment that is checked."""
_ONLY_GROUPS = ("native", "atari", "vizdoom", "envpool")
"""Families whose environments are others than those that Gymnasium makes of the same id."""


class Step(NamedTuple):
    """What one call of step() brought.

    Attributes:
        observation: As the environment gave it.
        rewards: float ``[rows]``.
        ended: bool ``[rows]``; their episodes have ended.
        acted: bool ``[rows]``; the row had an action that counts.
    """

    observation: Any
    rewards: np.ndarray
    ended: np.ndarray
    acted: np.ndarray


class Subject(Protocol):
    """An environment to be checked.

    Attributes:
        kind: single, vector, parallel, or the name of a family of sfactory's own.
        spec: Its spaces and properties.
        rows: Agents that one step moves.
        step_s, reset_s: Seconds of every call of step() and reset().
        cpu_s: Seconds of this process's processor time in step().
    """

    kind: str
    spec: EnvSpec
    rows: int
    step_s: list[float]
    reset_s: list[float]
    cpu_s: float

    def begin(self, seed: int | None) -> Any:
        """Reset, and give the observation."""

    def act(self, rng: np.random.Generator) -> Step:
        """Step with random actions; resets first where the last episode is over."""

    def spaces(self, observation: Any) -> Iterator[tuple[str, Any, Any]]:
        """The parts of an observation with their names and the spaces that they promise to be in."""

    def close(self) -> None:
        """Close the environment."""


def make_subject(request: EnvRequest, probed: EnvSpec) -> Subject:
    """Make an environment of a request.

    Args:
        probed: The spec that training would read of it.
    """
    if probed.family in _ONLY_GROUPS:
        return GroupSubject(request, probed)
    if tensors.handles(request):
        return VectorSubject(tensors.make_on_host(request, VECTOR_ROWS), request)
    env = make_environment(request, VECTOR_ROWS)
    if is_vector(env):
        return VectorSubject(env, request)
    return ParallelSubject(env, request) if is_parallel(env) else SingleSubject(env, request)


def spread_actions(spec: EnvSpec, masks: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Uniform actions of each row, categories int32 ``[rows, K]`` and samples float32 ``[rows, D]`` that fill boxes.

    Args:
        masks: bool ``[rows, logits]`` of allowed categories.
    """
    samples = rng.uniform(-1, 1, (len(masks), spec.action.continuous)).astype(np.float32)
    return allowed_categories(spec.action, masks, rng), samples


class _Timed:
    """Times the calls of an environment."""

    def __init__(self, env: Any, spec: EnvSpec, names: Sequence[str]) -> None:
        self.env, self.spec, self.rows = env, spec, len(names)
        self._writer = ObservationWriter(spec, names.__getitem__, validate=True, compiled=False)
        self.step_s: list[float] = []
        self.reset_s: list[float] = []
        self.cpu_s = 0.0
        self._over = False

    def _reset(self, seed: int | None) -> tuple[Any, Any]:
        begin = time.perf_counter()
        result = self.env.reset(seed=seed)
        self.reset_s.append(time.perf_counter() - begin)
        if not isinstance(result, tuple) or len(result) != 2:
            raise EnvironmentFault(f"reset() returned {shown(result)}; it must return observation, info")
        self._over = False
        return result

    def _step(self, action: Any) -> tuple[Any, ...]:
        begin, cpu = time.perf_counter(), time.process_time()
        result = self.env.step(action)
        self.step_s.append(time.perf_counter() - begin)
        self.cpu_s += time.process_time() - cpu
        if not isinstance(result, tuple) or len(result) != 5:
            raise EnvironmentFault(
                f"step() returned {shown(result)}; it must return observation, reward, terminated, truncated, info"
            )
        return result

    def _masks(self, given: Sequence[Any]) -> np.ndarray:
        """The masks of all rows, bool ``[rows, logits]``; raises EnvironmentFault if one is missing, does not fit, or
        allows nothing."""
        masks = np.ones((self.rows, self.spec.action.logits), bool)
        if self.spec.masked:
            self._writer.write_masks(given, masks)
        return masks

    def _look_at_info(self, info: Any, whose: str = "") -> None:
        """Raise EnvironmentFault if it is no dict, or has an action mask that no reset() had."""
        if not isinstance(info, Mapping):
            raise EnvironmentFault(f"{whose}step() returned {shown(info)} as info; it must be a dict")
        if MASK_KEY in info and not self.spec.masked:
            raise EnvironmentFault(f"{whose}{LATE_MASK}")

    def close(self) -> None:
        self.env.close()


def _number(what: str, value: Any) -> float:
    """A reward or a flag as a number.

    Raises:
        EnvironmentFault: If it is none.
    """
    if np.shape(value) != () or not isinstance(value, bool | int | float | np.generic | np.ndarray):
        raise EnvironmentFault(f"step() returned {shown(value)} as {what}; it must be one number")
    return float(value)


class SingleSubject(_Timed):
    """A ``gymnasium.Env``."""

    kind = "single"

    def __init__(self, env: gymnasium.Env, request: EnvRequest) -> None:
        super().__init__(env, single.read_spec(env, request), ["the environment"])
        self._seen: Any = None
        self._info: Any = None

    def begin(self, seed: int | None) -> Any:
        self._seen, self._info = self._reset(seed)
        return self._seen

    def act(self, rng: np.random.Generator) -> Step:
        if self._over:
            self.begin(None)
        holder = self._seen if self.spec.observation.mask_path is not None else self._info
        (action,) = self.spec.action.rows(*spread_actions(self.spec, self._masks([mask_in(holder)]), rng))
        self._seen, reward, terminated, truncated, self._info = self._step(action)
        self._look_at_info(self._info)
        self._over = bool(_number("terminated", terminated) or _number("truncated", truncated))
        return Step(self._seen, np.array([_number("reward", reward)]), np.array([self._over]), np.ones(1, bool))

    def spaces(self, observation: Any) -> Iterator[tuple[str, Any, Any]]:
        yield "observation", self.env.observation_space, observation


class VectorSubject(_Timed):
    """A Gymnasium vector environment. It resets the rows that have ended by itself, unless its autoreset mode is
    DISABLED.

    Attributes:
        mode: Name of its autoreset mode.
        info: Of the last step.
    """

    kind = "vector"

    def __init__(self, env: gymnasium.vector.VectorEnv, request: EnvRequest) -> None:
        super().__init__(env, vector.read_spec(env, request), [f"row {row}" for row in range(env.num_envs)])
        mode = (env.metadata or {}).get("autoreset_mode")
        self.mode = getattr(mode, "name", str(mode))
        self._ended = np.zeros(self.rows, bool)
        self.info: Any = None
        self._seen: Any = None

    def begin(self, seed: int | None) -> Any:
        self._seen, self.info = self._reset(seed)
        self._ended = np.zeros(self.rows, bool)
        return self._seen

    def act(self, rng: np.random.Generator) -> Step:
        ended, rests = self._ended, self._ended & (self.mode == "NEXT_STEP")
        if self.mode == "DISABLED" and ended.any():
            self._seen, fresh = self.env.reset(options={"reset_mask": ended})
            masks = np.where(ended[:, None], self._masks_of(fresh, ended), self._masks_of(self.info, ~ended))
        else:
            masks = self._masks_of(self.info, ~rests)
        masks = self._masks(list(masks | (rests & ~masks.any(1))[:, None]))
        actions = self.spec.action.batch(*spread_actions(self.spec, masks, rng))
        self._seen, rewards, terminated, truncated, self.info = self._step(actions)
        self._look_at_info(self.info)
        arrays = [np.asarray(value) for value in (rewards, terminated, truncated)]
        for what, array in zip(("rewards", "terminations", "truncations"), arrays, strict=True):
            if array.shape != (self.rows,):
                raise EnvironmentFault(f"step() returned {what} of shape {array.shape}; it must be ({self.rows},)")
        self._ended = arrays[1].astype(bool) | arrays[2].astype(bool)
        return Step(self._seen, arrays[0].astype(float), self._ended, np.ones(self.rows, bool))

    def _masks_of(self, info: Any, needed: np.ndarray) -> np.ndarray:
        """The masks in the observation or in an info, which must have those of the rows in `needed`."""
        everything = np.ones((self.rows, self.spec.action.logits), bool)
        if not self.spec.masked:
            return everything
        holder = self._seen if self.spec.observation.mask_path is not None else info
        found = mask_in(holder)
        present = np.asarray(holder.get(f"_{MASK_KEY}", np.full(self.rows, found is not None)))
        if (missing := needed & ~present).any():
            raise EnvironmentFault(f"row {np.flatnonzero(missing)[0]}: {NO_MASK}")
        if found is None:
            return everything
        return np.where(present[:, None], self.spec.action.flat_masks(found, present), True)

    def spaces(self, observation: Any) -> Iterator[tuple[str, Any, Any]]:
        yield "observation", self.env.observation_space, observation


class ParallelSubject(_Timed):
    """A PettingZoo parallel environment."""

    kind = "parallel"

    def __init__(self, env: Any, request: EnvRequest) -> None:
        spec = multiagent.read_spec(env, request)
        super().__init__(env, spec, [f"agent {agent}" for agent in env.possible_agents])
        self._agents = list(env.possible_agents)
        self._seen: Mapping[Any, Any] = {}
        self._infos: Mapping[Any, Any] = {}

    def begin(self, seed: int | None) -> Any:
        self._seen, self._infos = self._reset(seed)
        return self._seen

    def act(self, rng: np.random.Generator) -> Step:
        if self._over:
            self.begin(None)
        acting = list(self.env.agents)
        holders = self._seen if self.spec.observation.mask_path is not None else self._infos
        masks = [mask_in(holders.get(agent)) if agent in acting else self._writer.all_allowed for agent in self._agents]
        actions = self.spec.action.rows(*spread_actions(self.spec, self._masks(masks), rng))
        by_agent = dict(zip(self._agents, actions, strict=True))
        result = self._step({agent: by_agent[agent] for agent in acting})
        if not all(isinstance(part, Mapping) for part in result):
            raise EnvironmentFault(f"step() returned {shown(result)}; it must return five dicts by agent")
        self._seen, rewards, terminations, truncations, self._infos = result
        step = Step(self._seen, np.zeros(self.rows), *np.zeros((2, self.rows), bool))
        living = [agent for agent in self.env.agents if not (terminations.get(agent) or truncations.get(agent))]
        self._look_at_agents(acting, rewards, terminations, truncations)
        self._look_at_living(acting, living, terminations)
        self._over = not living
        for agent in self.env.agents:
            self._look_at_info(self._infos.get(agent, {}), f"agent {agent}: ")
        for agent in acting:
            row = self._agents.index(agent)
            step.rewards[row] = _number(f"the reward of {agent}", rewards[agent])
            step.acted[row] = True
            step.ended[row] = agent not in living
        return step

    def _look_at_agents(
        self,
        acting: list[Any],
        rewards: Mapping[Any, Any],
        terminations: Mapping[Any, Any],
        truncations: Mapping[Any, Any],
    ) -> None:
        """Raise EnvironmentFault where step() does not tell of every agent that acted, or tells of what is none."""
        told = {"rewards": rewards, "terminations": terminations, "truncations": truncations}
        for agent in acting:
            multiagent.check_told(f"agent {agent}", agent, **told)
        for what, values in told.items():
            for agent in values:
                if agent not in self._agents:
                    raise EnvironmentFault(
                        f"step() returned {what} of {shown(agent)}, which is not in possible_agents; leave them out, "
                        "or correct the name"
                    )

    def _look_at_living(self, acting: list[Any], living: list[Any], terminations: Mapping[Any, Any]) -> None:
        """Raise EnvironmentFault where an observation is missing, or env.agents lists whom it must not."""
        for agent in self.env.agents:
            if agent not in self._agents:
                raise EnvironmentFault(f"env.agents lists {shown(agent)}, which is not in possible_agents")
            if living and agent not in living:
                raise EnvironmentFault(f"agent {agent} has ended, but is still in env.agents; take it out")
        for agent in living:
            if self._seen.get(agent) is None:
                raise EnvironmentFault(f"there is no observation of agent {agent}, which is in env.agents; give one")
        for agent in acting:
            if agent not in living and not terminations.get(agent) and self._seen.get(agent) is None:
                raise EnvironmentFault(
                    f"there is no last observation of agent {agent}, which was truncated; return it, for its value is "
                    "bootstrapped"
                )

    def spaces(self, observation: Any) -> Iterator[tuple[str, Any, Any]]:
        for agent, value in observation.items():
            if agent in self._agents:
                yield f"observation of {agent}", self.env.observation_space(agent), value


class GroupSubject:
    """Environments as training steps them, of a family whose preprocessing decides what they are."""

    def __init__(self, request: EnvRequest, spec: EnvSpec) -> None:
        self.kind, self.spec = spec.family, spec
        self.rows = VECTOR_ROWS if spec.family in TOGETHER else 1
        self.step_s: list[float] = []
        self.reset_s: list[float] = []
        self.cpu_s = 0.0
        self._request, self._group = request, make_group(request, spec, self.rows, 0, 0)
        self._buffers = new_step_buffers(spec, self.rows)

    def begin(self, seed: int | None) -> Any:
        self._group.close()
        self._group = make_group(self._request, self.spec, self.rows, 0, seed or 0)
        begin = time.perf_counter()
        self._group.reset(self._buffers)
        self.reset_s.append(time.perf_counter() - begin)
        return self._buffers.obs

    def act(self, rng: np.random.Generator) -> Step:
        masks = self._buffers.mask
        actions = spread_actions(
            self.spec, np.ones((self.rows, self.spec.action.logits), bool) if masks is None else masks, rng
        )
        outcome = Outcome(np.zeros(self.rows, np.float32), np.zeros(self.rows, bool), np.zeros(self.rows, bool))
        acted = self._buffers.active.copy()
        begin, cpu = time.perf_counter(), time.process_time()
        self._group.step(*actions, outcome, self._buffers)
        self.step_s.append(time.perf_counter() - begin)
        self.cpu_s += time.process_time() - cpu
        self._group.extras.clear()
        ended = whole_ends(outcome, self._group.goes_on)
        return Step(self._buffers.obs, outcome.reward.astype(float), ended, acted)

    def spaces(self, observation: Any) -> Iterator[tuple[str, Any, Any]]:
        yield from ()

    def close(self) -> None:
        self._group.close()
