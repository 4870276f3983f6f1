"""Parallel environments: rows, deaths, returns, rests, masks, and mistakes."""

from __future__ import annotations

from collections import defaultdict
from typing import Any, ClassVar

import numpy as np
import pytest
from gymnasium import spaces

from sfactory.envs import EnvRequest, Outcome, StepBuffers, env_seed, general
from sfactory.envs.interface import EnvSpec, Group
from sfactory.envs.observations import new_step_buffers
from sfactory.errors import ConfigError, EnvironmentFault

pettingzoo = pytest.importorskip("pettingzoo")

Events = dict[int, dict[str, str]]
"""For each step what happens to agents: die, cut (truncated), leave (without an end) or come."""


class Team(pettingzoo.ParallelEnv):
    """Three agents that see (seed, episode, step, own number); `events` says who ends and who comes at which step."""

    metadata: ClassVar[dict[str, Any]] = {"name": "team"}

    def __init__(
        self, events: Events | None = None, masked: str = "", start: tuple[str, ...] = ("a", "b", "c"), bad: str = ""
    ) -> None:
        self.possible_agents = ["a", "b", "c"]
        self.events, self.masked, self.start, self.bad = events or {}, masked, start, bad
        self.episode, self.seed = -1, 0

    def observation_space(self, agent: str) -> spaces.Space:
        box = spaces.Box(-1e9, 1e9, (5 if self.bad == "spaces" and agent == "b" else 4,))
        return spaces.Dict({"x": box, "action_mask": spaces.MultiBinary(3)}) if self.masked == "observation" else box

    def action_space(self, agent: str) -> spaces.Space:
        return spaces.Discrete(3)

    def reset(self, seed: int | None = None, options: Any = None) -> tuple[Any, Any]:
        if seed is not None:
            self.seed, self.episode = seed % 1000, -1
        self.agents = list(self.start)
        self.episode += 1
        self.count = 0
        return {agent: self._see(agent) for agent in self.agents}, {agent: self._tell(agent) for agent in self.agents}

    def step(self, actions: dict[str, int]) -> tuple[Any, ...]:
        assert sorted(actions) == sorted(self.agents), "actions of the living only"
        if self.bad == "raise":
            raise RuntimeError("the team broke up")
        self.count += 1
        events = self.events.get(self.count, {})
        ended = [agent for agent, event in events.items() if event in ("die", "cut", "leave")]
        shown = self.agents + [agent for agent, event in events.items() if event == "come"]
        self.agents = [agent for agent in shown if agent not in ended]
        return (
            {agent: None if self.bad == "none" and agent == "b" else self._see(agent) for agent in shown},
            {
                agent: actions[agent] + (np.nan if self.bad == "nan" and agent == "b" else 0.5)
                for agent in shown
                if agent in actions
            },
            {agent: events.get(agent) == "die" for agent in shown},
            {agent: events.get(agent) == "cut" for agent in shown},
            {agent: self._tell(agent) for agent in shown},
        )

    def _see(self, agent: str) -> Any:
        seen = np.array([self.seed, self.episode, self.count, "abc".index(agent)], np.float32)
        return {"x": seen, "action_mask": np.arange(3) != "abc".index(agent)} if self.masked == "observation" else seen

    def _tell(self, agent: str) -> dict[str, Any]:
        told: dict[str, Any] = {"kills": self.count}
        if self.masked == "info":
            told["action_mask"] = np.arange(3) != "abc".index(agent)
        return told

    def render(self) -> np.ndarray:
        return np.full((4, 4, 3), self.count, np.uint8)


def group_of(env: Any, count: int = 1, first_index: int = 0, **kwargs: Any) -> tuple[EnvSpec, Group]:
    wanted = EnvRequest(env, kwargs)
    spec = general.probe(wanted)
    return spec, general.make_group(wanted, spec, count, first_index, seed=3)


def play(spec: EnvSpec, group: Group, steps: int, actions: Any = 1) -> list[tuple[StepBuffers, Outcome]]:
    rows = group.rows
    first = new_step_buffers(spec, rows)
    group.reset(first)
    seen = [(first, Outcome(np.zeros(rows), np.zeros(rows, bool), np.zeros(rows, bool)))]
    for _ in range(steps):
        after, outcome = (
            new_step_buffers(spec, rows),
            Outcome(np.full(rows, 9, np.float32), np.ones(rows, bool), np.ones(rows, bool)),
        )
        categorical = np.broadcast_to(np.asarray(actions, np.int32).reshape(-1, 1), (rows, len(spec.action.sizes)))
        group.step(categorical, np.zeros((rows, spec.action.continuous), np.float32), outcome, after)
        seen.append((after, outcome))
    return seen


def story(events: Events, steps: int, **kwargs: Any) -> list[str]:
    """One word per row and step: the step shown (or - for a dead agent's zeros), then F(irst), A(ctive), t(erminated),
    u (truncated)."""
    spec, group = group_of(Team, events=events, **kwargs)
    lines = []
    for frame, outcome in play(spec, group, steps):
        words = []
        for row in range(3):
            obs = frame.obs[0][row]
            shown = str(int(obs[2])) if obs.any() and obs[3] == row else "-"
            marks = zip("FAtu", (frame.first, frame.active, outcome.terminated, outcome.truncated), strict=True)
            words.append(shown + "".join(mark for mark, flags in marks if flags[row]))
        lines.append(" ".join(words))
    return lines


def test_a_dead_agent_waits_and_is_first_when_it_comes_back():
    assert story({2: {"b": "die"}, 4: {"b": "come"}}, 5) == [
        "0FA 0FA 0FA",
        "1A 1A 1A",
        "2A -t 2A",
        "3A - 3A",
        "4A 4FA 4A",
        "5A 5A 5A",
    ]


def test_an_agent_that_comes_late_is_first():
    assert story({1: {"c": "come"}}, 2, start=("a", "b")) == ["0FA 0FA -", "1A 1A 1FA", "2A 2A 2A"]


def test_a_truncated_agent_shows_its_final_observation_once():
    assert story({1: {"b": "cut"}}, 3) == ["0FA 0FA 0FA", "1A 1u 1A", "2A - 2A", "3A - 3A"]


def test_an_agent_that_leaves_without_an_end_is_truncated():
    assert story({1: {"b": "leave"}}, 2) == ["0FA 0FA 0FA", "1A 1u 1A", "2A - 2A"]


def test_a_group_says_which_environments_were_reset():
    """Not so where an agent comes back to a game whose other agents die."""
    spec, group = group_of(Team, 2, events={2: {"b": "come", "a": "die"}, 3: {"b": "die"}}, start=("a",))
    told = []
    for steps in range(5):
        play(spec, group, steps)
        told.append(group.new_games.tolist())
    assert told == [[True, True], [False, False], [False, False], [True, True], [False, False]]


def test_the_next_episode_begins_at_once_when_all_died():
    assert story({1: {"a": "die"}, 2: {"b": "die", "c": "die"}}, 3) == [
        "0FA 0FA 0FA",
        "-t 1A 1A",
        "0FA 0FAt 0FAt",
        "-t 1A 1A",
    ]


def test_the_next_episode_begins_after_a_rest_when_one_was_truncated():
    assert story({1: {"a": "die"}, 2: {"b": "die", "c": "cut"}}, 4) == [
        "0FA 0FA 0FA",
        "-t 1A 1A",
        "- -t 2u",
        "0FA 0FA 0FA",
        "-t 1A 1A",
    ]


def test_rewards_reach_the_rows_that_acted():
    spec, group = group_of(Team, events={1: {"b": "die"}}, count=2)
    rewards = [outcome.reward.tolist() for _, outcome in play(spec, group, 2, actions=[0, 1, 2, 2, 1, 0])]
    assert rewards[1:] == [[0.5, 1.5, 2.5, 2.5, 1.5, 0.5], [0.5, 0.0, 2.5, 2.5, 0.0, 0.5]]
    assert group.extras == [{"kills": 1.0}] * 2


def test_environments_have_their_own_seeds_whatever_the_groups():
    spec, whole = group_of(Team, count=3)
    _, tail = group_of(Team, count=2, first_index=1)
    everything, part = (play(spec, group, 3)[-1][0].obs[0] for group in (whole, tail))
    assert everything[::3, 0].tolist() == [env_seed(3, index) % 1000 for index in range(3)]
    assert (everything[3:] == part).all()


@pytest.mark.parametrize("masked", ["info", "observation"])
def test_masks_of_agents(masked: str):
    spec, group = group_of(Team, masked=masked, events={1: {"b": "die"}, 2: {"a": "cut"}})
    masks = [frame.mask for frame, _ in play(spec, group, 2)]
    assert spec.masked
    assert (masks[0] == ~np.eye(3, dtype=bool)).all()
    assert masks[1].tolist() == [[False, True, True], [True] * 3, [True, True, False]]
    assert masks[2].tolist() == [[True] * 3, [True] * 3, [True, True, False]]


def test_render_gives_one_frame_per_environment():
    spec, group = group_of(Team, count=2)
    play(spec, group, 2)
    assert [frame[0, 0, 0] for frame in group.render()] == [2, 2]


def test_agents_must_share_their_spaces():
    with pytest.raises(ConfigError, match="agents a and b have different observation spaces"):
        general.probe(EnvRequest(Team, {"bad": "spaces"}))


@pytest.mark.parametrize(
    ("bad", "parts"),
    [
        ("raise", ["(Team)", "the team broke up"]),
        ("nan", ["(Team), agent b", "reward is nan"]),
        ("none", ["no observation of agent b"]),
    ],
)
def test_faults_name_environment_and_agent(bad: str, parts: list[str]):
    spec, group = group_of(Team, first_index=6, bad=bad)
    with pytest.raises(EnvironmentFault, match="environment 6") as caught:
        play(spec, group, 1)
    assert all(part in str(caught.value) for part in parts)


def changed(change: Any, base: type = Team, **kwargs: Any) -> Any:
    """A team of which `change` alters what step() returns, or the team itself."""

    class Changed(base):
        def step(self, actions: dict[str, int]) -> Any:
            result = tuple(map(dict, super().step(actions)))
            return change(self, *result) or result

    return lambda: Changed(**kwargs)


def renamed(team: Team, observations: Any, rewards: Any, *rest: Any) -> Any:
    return observations, {f"agent_{name}": reward for name, reward in rewards.items()}, *rest


def for_all(team: Team, observations: Any, rewards: Any, terminations: Any, truncations: Any, infos: Any) -> Any:
    return observations, rewards, {"__all__": False}, {"__all__": False}, infos


def blind(team: Team, observations: Any, *rest: Any) -> None:
    observations["b"] = None


def absent(team: Team, observations: Any, *rest: Any) -> None:
    observations.pop("b", None)


def stays(team: Team, *result: Any) -> None:
    team.agents = ["a", "b", "c"]


def untold(team: Team, *result: Any) -> None:
    result[4]["b"] = None


def late_mask(team: Team, *result: Any) -> None:
    result[4]["b"]["action_mask"] = np.ones(3, bool)


@pytest.mark.parametrize(
    ("change", "event", "words"),
    [
        (renamed, "", "agent a: step.. returned no reward of this agent.* The keys are: agent_a, agent_b, agent_c$"),
        (lambda *result: (result[1], {}, *result[3:]), "", "agent a: step.. returned no reward.* The keys are: none$"),
        (for_all, "", "agent a: step.. returned no termination and no truncation of this agent.* keys are: __all__$"),
        (blind, "cut", "agent b: there is no last observation of this agent, which was truncated"),
        (absent, "cut", "agent b: there is no last observation of this agent, which was truncated"),
        (absent, "leave", "agent b: there is no last observation of this agent, which was truncated"),
        (stays, "die", "agent b has ended, but is still in env.agents; take it out"),
        (untold, "", "agent b: the info is None; it must be a dict"),
        (untold, "die", "agent b: the info is None; it must be a dict"),
        (late_mask, "", "agent b: info has an action_mask, though the first reset.. gave none.*; give it at reset"),
    ],
)
def test_what_step_leaves_out_is_a_fault(change: Any, event: str, words: str):
    spec, group = group_of(changed(change, events={1: {"b": event}} if event else {}), first_index=6)
    with pytest.raises(EnvironmentFault, match=f"^environment 6 .*{words}"):
        play(spec, group, 1)


def test_one_of_the_two_kinds_of_ends_may_be_left_out_and_rewards_may_have_a_default():
    def change(team: Team, observations: Any, rewards: Any, terminations: Any, truncations: Any, infos: Any) -> Any:
        del rewards["b"]
        return observations, defaultdict(float, rewards), {}, truncations, infos

    spec, group = group_of(changed(change, events={2: {"a": "cut"}}))
    (_, outcome), (_, last) = play(spec, group, 2)[1:]
    assert outcome.reward.tolist() == [1.5, 0, 1.5] and not outcome.truncated.any()
    assert last.truncated.tolist() == [True, False, False] and not last.terminated.any()


def test_the_last_observation_of_a_terminated_agent_may_be_missing():
    spec, group = group_of(changed(absent, events={1: {"b": "die"}}))
    frame, outcome = play(spec, group, 1)[-1]
    assert outcome.terminated.tolist() == [False, True, False] and frame.active.tolist() == [True, False, True]


def test_when_all_agents_end_they_may_stay_in_the_list():
    spec, group = group_of(changed(stays, events={1: dict.fromkeys("abc", "die")}))
    assert [frame.first.tolist() for frame, _ in play(spec, group, 2)] == [[True] * 3, [True] * 3, [True] * 3]


class NoSpace(Team):
    def observation_space(self, agent: str) -> spaces.Space:
        return {"a": super().observation_space(agent)}[agent]


class NoAgents(Team):
    def reset(self, seed: int | None = None, options: Any = None) -> tuple[Any, Any]:
        result = super().reset(seed)
        self.agents = None
        return result


def team_of(possible_agents: Any) -> Any:
    def make() -> Team:
        team = Team()
        team.possible_agents = possible_agents
        return team

    return make


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (NoSpace, r"environment 0 .* raised KeyError in observation_space\('b'\)"),
        (NoAgents, r"env.agents is None after reset\(\); it must list those that act"),
        (team_of(None), "possible_agents is None; it must list every agent"),
        (team_of([]), r"possible_agents is \[\]; it must list every agent"),
        (team_of(lambda: ["a"]), "possible_agents is <function .*; it must list every agent"),
        (team_of(["a", "b", "a"]), "possible_agents lists a twice; give every agent a name of its own"),
    ],
)
def test_what_an_environment_says_wrong_of_its_agents_is_one_sentence(make: Any, words: str):
    with pytest.raises(ConfigError, match=words):
        general.probe(EnvRequest(make, {}))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("pettingzoo.classic.rps_v2", "pettingzoo.utils.conversions.aec_to_parallel makes one of this environment"),
        ("pettingzoo.classic.tictactoe_v3", r"agents act one after the other \(AEC\) are not supported"),
    ],
)
def test_a_turn_based_environment_is_refused_with_the_way_out_if_there_is_one(name: str, words: str):
    packaged = pytest.importorskip(name, exc_type=ImportError)
    with pytest.raises(ConfigError, match=words):
        general.probe(EnvRequest(packaged.env, {}))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "truncates"),
    [("pettingzoo.butterfly.cooperative_pong_v6", True), ("pettingzoo.sisl.multiwalker_v9", False)],
)
def test_packaged_environments_play(name: str, truncates: bool):
    packaged = pytest.importorskip(name, exc_type=ImportError)
    spec, group = group_of(packaged.parallel_env, 2, max_cycles=3)
    seen = play(spec, group, 8, actions=0)
    assert group.rows == 2 * spec.agents
    period = 4 if truncates else 3
    for number, (frame, outcome) in enumerate(seen):
        ended = outcome.truncated if truncates else outcome.terminated
        assert ended.all() if number % period == 3 % period and number else not ended.any()
        assert frame.first.all() if number % period == 0 else not frame.first.any()
    group.close()
