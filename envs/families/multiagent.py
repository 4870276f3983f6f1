"""PettingZoo parallel environments: every possible agent is a row."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np

from sfactory.config import env_name
from sfactory.envs.factory import Maker, read_spaces, render_fps
from sfactory.envs.fault_recovery import FaultRecovery
from sfactory.envs.faults import check_reset, close_quietly, environment_fault, environment_name
from sfactory.envs.interface import EnvRequest, EnvSpec, Group, Outcome, StepBuffers
from sfactory.envs.observations import LATE_MASK, ObservationWriter, mask_in, numeric_extras
from sfactory.envs.seeds import env_seed
from sfactory.errors import ConfigError, EnvironmentFault, shown
from sfactory.spaces import MASK_KEY


def read_spec(env: Any, request: EnvRequest) -> EnvSpec:
    """Read the spec of a parallel environment; resets it once.

    Raises:
        ConfigError: If its agents have different spaces, or spaces that are not supported.
        EnvironmentFault: If reset() raises or returns something else than (observations, infos).
    """
    agents = _possible_agents(env, request)
    observation, action = read_spaces(
        _shared_space(env, "observation_space", agents, request),
        _shared_space(env, "action_space", agents, request),
        request,
    )
    name = environment_name(request, 0)
    observations, infos = check_reset(name, lambda: env.reset(seed=0))
    living: Any = getattr(env, "agents", None)
    if not _is_list(living):
        raise EnvironmentFault(f"{name}: env.agents is {shown(living)} after reset(); it must list those that act")
    if not isinstance(observations, Mapping) or not set(living) <= set(observations):
        raise EnvironmentFault(
            f"{name}: reset() returned {shown(observations)}; it must return a dict with those of all of {living}"
        )
    masked = observation.mask_path is not None or any(
        isinstance(info, Mapping) and MASK_KEY in info for info in infos.values()
    )
    return EnvSpec(
        observation, action, agents=len(agents), masked=masked, family="multiagent", render_fps=render_fps(env)
    )


def _is_list(agents: Any) -> bool:
    return isinstance(agents, Collection) and not isinstance(agents, str)


def _possible_agents(env: Any, request: EnvRequest) -> list[Any]:
    """Every agent that may ever live. Raises ConfigError if that is no list of different names."""
    agents, name = env.possible_agents, env_name(request.env)
    if not _is_list(agents) or not len(agents):
        raise ConfigError(f"{name}: possible_agents is {shown(agents)}; it must list every agent that may ever live")
    agents = list(agents)
    for number, agent in enumerate(agents):
        if agent in agents[:number]:
            raise ConfigError(f"{name}: possible_agents lists {agent} twice; give every agent a name of its own")
    return agents


def _shared_space(env: Any, method: str, agents: Sequence[Any], request: EnvRequest) -> Any:
    """The space of all agents that a method of the environment gives.

    Raises:
        ConfigError: If they have several.
        EnvironmentFault: If the method raises.
    """
    spaces = []
    for agent in agents:
        try:
            spaces.append(getattr(env, method)(agent))
        except BaseException as error:
            raise environment_fault(environment_name(request, 0), f"{method}({agent!r})", error) from error
    for agent, space in zip(agents, spaces, strict=True):
        if space != spaces[0]:
            raise ConfigError(
                f"{env_name(request.env)}: the agents {agents[0]} and {agent} have different "
                f"{method.replace('_', ' ')}s, {spaces[0]} and {space}; all agents must share one. Pad them (supersuit "
                "has pad_observations_v0 and pad_action_space_v0)"
            )
    return spaces[0]


def check_told(
    name: str,
    agent: Any,
    rewards: Mapping[Any, Any],
    terminations: Mapping[Any, Any],
    truncations: Mapping[Any, Any],
) -> None:
    """Check that step() tells the reward of an agent that acted, and whether it has ended.

    Args:
        name: Its name in messages.
        agent: The agent.
        rewards, terminations, truncations: What step() returned. One dict of ends is enough, and rewards may have a
            default.

    Raises:
        EnvironmentFault: If it does not.
    """
    try:
        rewards[agent]
        what, dicts = "termination and no truncation", [terminations, truncations]
        if agent in terminations or agent in truncations:
            return
    except KeyError:
        what, dicts = "reward", [rewards]
    keys = ", ".join(dict.fromkeys(str(key) for each in dicts for key in each)) or "none"
    raise EnvironmentFault(
        f"{name}: step() returned no {what} of this agent, which acted; return one for each. The keys are: {keys}"
    )


class ParallelGroup(Group):
    """A group of parallel environments. Row ``e * agents + a`` is agent number a, in ``possible_agents``, of
    environment e.

    Args:
        envs: The environments, all different objects.
        make: Makes one more environment.
        request: The request that they were made from.
        spec: Their spaces and properties.
        first_index: Number in the run of the first of them.
        seed: Seed of the run.
    """

    def __init__(
        self, envs: Sequence[Any], make: Maker, request: EnvRequest, spec: EnvSpec, first_index: int, seed: int
    ) -> None:
        self.rows = len(envs) * spec.agents
        self.new_games: np.ndarray = np.zeros(len(envs), bool)
        self.extras: list[dict[str, float]] = []
        self._envs, self._make = list(envs), make
        self._agents = list(envs[0].possible_agents)
        self._row_of = {agent: a for a, agent in enumerate(self._agents)}
        self._names = [environment_name(request, first_index + index) for index in range(len(envs))]
        self._first_index, self._seed = first_index, seed
        self._action = spec.action
        self._masked = spec.masked
        self._mask_in_observation = spec.observation.mask_path is not None
        self._writer = ObservationWriter(spec, self._row_name, request.validate, request.compiled)
        self._over = [False] * len(envs)
        self._seen: list[Any] = [None] * self.rows
        """Each row's latest observation; None where the agent is dead."""
        self._infos: list[Mapping[str, Any]] = [{}] * self.rows
        self._active = np.zeros(self.rows, bool)
        self._recovery = FaultRecovery(request.survive_faults)
        self.faults = self._recovery.faults

    def reset(self, buffers: StepBuffers) -> None:
        buffers.first.fill(False)
        for index in range(len(self._envs)):
            try:
                self._reset_env(index, buffers.first, env_seed(self._seed, self._first_index + index))
            except EnvironmentFault as fault:
                self._remake(index, fault, buffers.first)
        self._retry(lambda: self._write(buffers), buffers.first)

    def step(self, categorical: np.ndarray, continuous: np.ndarray, outcome: Outcome, after: StepBuffers) -> None:
        self._recovery.step += 1
        actions = self._action.rows(categorical, continuous)
        for array in outcome:
            array.fill(0)
        after.first.fill(False)
        self.new_games.fill(False)
        for index in range(len(self._envs)):
            try:
                if self._over[index]:
                    self._reset_env(index, after.first)
                else:
                    self._step_env(index, actions, outcome, after.first)
            except BaseException as error:
                self._remake(index, environment_fault(self._names[index], "step()", error), after.first, outcome)
        self._retry(lambda: self._writer.check_rewards(outcome.reward), after.first, outcome)
        self._retry(lambda: self._write(after), after.first, outcome)

    def render(self) -> list[Any]:
        return [env.render() for env in self._envs]

    def close(self) -> None:
        envs, self._envs = self._envs, []
        for env in envs:
            close_quietly(env)

    def _retry(self, attempt: Callable[[], None], first: np.ndarray, outcome: Outcome | None = None) -> None:
        """Call `attempt` until no row is at fault, and remake the environment of a faulty row each time."""
        while True:
            try:
                return attempt()
            except EnvironmentFault as fault:
                self._remake(fault.row // len(self._agents), fault, first, outcome)

    def _remake(self, index: int, fault: EnvironmentFault, first: np.ndarray, outcome: Outcome | None = None) -> None:
        """Replace the faulty environment by a new one."""
        rows = range(index * len(self._agents), (index + 1) * len(self._agents))

        def make(times: int) -> None:
            close_quietly(self._envs[index])
            seed = env_seed(self._seed, self._first_index + index, times)
            self._envs[index] = self._make([seed])
            first[rows] = False
            self._reset_env(index, first, seed)

        self._recovery.remake(fault, index, self._names[index], rows, make)
        if outcome is not None:
            for array, value in zip(outcome, (0, True, False), strict=True):
                array[rows] = value

    def _row_name(self, row: int) -> str:
        index, agent = divmod(row, len(self._agents))
        return f"{self._names[index]}, agent {self._agents[agent]}"

    def _reset_env(self, index: int, first: np.ndarray, seed: int | None = None) -> None:
        env = self._envs[index]
        observations, infos = check_reset(self._names[index], lambda: env.reset(seed=seed))
        if not isinstance(observations, Mapping):
            raise EnvironmentFault(f"{self._names[index]}: reset() returned {shown(observations)}; it must be a dict")
        if not env.agents:
            raise EnvironmentFault(
                f"{self._names[index]}: no agent lives after reset(); env.agents must list those that act"
            )
        self._over[index], self.new_games[index] = False, True
        self._bury(index)
        for agent in env.agents:
            first[self._greet(index, agent, observations, infos)] = True

    def _step_env(self, index: int, actions: Sequence[Any] | np.ndarray, outcome: Outcome, first: np.ndarray) -> None:
        env, base = self._envs[index], index * len(self._agents)
        acting = [(base + a, agent) for a, agent in enumerate(self._agents) if self._active[base + a]]
        chosen = {agent: actions[row] for row, agent in acting}
        try:
            result = env.step(chosen)
        except BaseException as error:
            raise environment_fault(self._names[index], f"step({chosen!r})", error) from error
        if not isinstance(result, tuple) or len(result) != 5 or not all(isinstance(part, Mapping) for part in result):
            raise EnvironmentFault(
                f"{self._names[index]}: step() returned {shown(result)}; it must return five dicts by agent: "
                "observations, rewards, terminations, truncations, infos"
            )
        observations, rewards, terminations, truncations, infos = result
        living = [agent for agent in env.agents if not (terminations.get(agent) or truncations.get(agent))]
        self._bury(index)
        for row, agent in acting:
            if agent not in rewards or not (agent in terminations or agent in truncations):
                check_told(self._row_name(row), agent, rewards, terminations, truncations)
            reward = np.asarray(rewards[agent])
            if reward.shape != () or reward.dtype.kind not in "biuf":
                raise EnvironmentFault(
                    f"{self._row_name(row)}: the reward is {shown(rewards[agent])}; it must be one number"
                )
            outcome.reward[row] = reward
            outcome.terminated[row] = bool(terminations.get(agent))
            outcome.truncated[row] = not terminations.get(agent) and agent not in living
            if agent not in living and (extras := numeric_extras(self._info_of(row, agent, infos))):
                self.extras.append(extras)
            if outcome.truncated[row]:  # shown once more, for the value of its last state
                if observations.get(agent) is None:
                    raise EnvironmentFault(
                        f"{self._row_name(row)}: there is no last observation of this agent, which was truncated; "
                        "return it, for its value is bootstrapped"
                    )
                self._seen[row] = observations[agent]
        acted = {agent for _, agent in acting}
        for agent in living:
            row = self._greet(index, agent, observations, infos)
            first[row] = agent not in acted
        if not living:
            if outcome.truncated[base : base + len(self._agents)].any():
                self._over[index] = True
            else:
                self._reset_env(index, first)
        elif len(living) < len(env.agents):
            stays = next(agent for agent in env.agents if agent not in living)
            raise EnvironmentFault(
                f"{self._names[index]}: agent {stays} has ended, but is still in env.agents; take it out. One that "
                "comes back is listed again at a later step"
            )

    def _info_of(self, row: int, agent: Any, infos: Mapping[Any, Any]) -> Mapping[str, Any]:
        info = infos.get(agent, {})
        if not isinstance(info, Mapping):
            raise EnvironmentFault(f"{self._row_name(row)}: the info is {shown(info)}; it must be a dict")
        return info

    def _bury(self, index: int) -> None:
        """Let no agent of an environment live."""
        rows = slice(index * len(self._agents), (index + 1) * len(self._agents))
        self._active[rows] = False
        self._seen[rows] = [None] * len(self._agents)
        self._infos[rows] = [{}] * len(self._agents)

    def _greet(self, index: int, agent: Any, observations: Mapping[Any, Any], infos: Mapping[Any, Any]) -> int:
        """Take in what a living agent sees; gives its row."""
        if agent not in self._row_of:
            raise EnvironmentFault(
                f"{self._names[index]}: the agent {agent} is not in possible_agents, {self._agents}; list it there"
            )
        if observations.get(agent) is None:
            raise EnvironmentFault(
                f"{self._names[index]}: there is no observation of agent {agent}, which is in env.agents; give one"
            )
        row = index * len(self._agents) + self._row_of[agent]
        self._active[row] = True
        self._seen[row] = observations[agent]
        self._infos[row] = info = self._info_of(row, agent, infos)
        if MASK_KEY in info and not self._masked:
            raise EnvironmentFault(f"{self._row_name(row)}: {LATE_MASK}")
        return row

    def _write(self, buffers: StepBuffers) -> None:
        buffers.active[:] = self._active
        rows = [row for row, observation in enumerate(self._seen) if observation is not None]
        if len(rows) == self.rows:
            self._writer.write(self._seen, buffers.obs)
        else:
            self._writer.write_rows(rows, [self._seen[row] for row in rows], buffers.obs)
        self._writer.check_values(buffers.obs)
        if buffers.mask is not None:
            holders = self._seen if self._mask_in_observation else self._infos
            allowed = self._writer.all_allowed
            masks = [
                mask_in(holder) if active else allowed
                for holder, active in zip(holders, self._active.tolist(), strict=True)
            ]
            self._writer.write_masks(masks, buffers.mask)
