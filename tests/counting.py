"""An environment that counts its own steps, and the episodes that a group makes of it."""

from __future__ import annotations

from typing import Any, NamedTuple

import gymnasium
import numpy as np
from gymnasium import spaces

from sfactory.envs.interface import Group, Outcome
from sfactory.envs.observations import new_step_buffers

OBSERVATION = spaces.Box(-np.inf, np.inf, (4,), np.float32)


def ending(seed: int, episode: int) -> tuple[int, bool]:
    """Length of an episode, and whether it ends by termination rather than truncation."""
    return 1 + (7 * episode + seed) % 5, (episode // 2 + seed) % 2 == 0


class Counting(gymnasium.Env):
    """Observes (seed, episode, step, a draw of its random stream); the reward is 10 x episode + step + action / 2."""

    observation_space = OBSERVATION
    action_space = spaces.Discrete(2)

    def __init__(self) -> None:
        self.episode = -1
        self.seed = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        if seed is not None:
            self.seed, self.episode = seed % 1000, -1
        self.episode += 1
        self.count = 0
        return self._see(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        length, terminates = ending(self.seed, self.episode)
        assert self.count < length, "stepped after its end"
        self.count += 1
        over = self.count == length
        reward = 10 * self.episode + self.count + action / 2
        info: dict[str, Any] = {"score": -1.0}
        if over:
            info = {
                "score": np.float64(self.episode),
                "won": True,
                "name": "x",
                "TimeLimit.truncated": True,
                "final_x": 1.0,
            }
            if self.episode % 2:
                info["odd"] = 1
        return self._see(), reward, over and terminates, over and not terminates, info

    def _see(self) -> np.ndarray:
        return np.array([self.seed, self.episode, self.count, self.np_random.random()], np.float32)


class Step(NamedTuple):
    """One effective action of one row."""

    obs: tuple[float, ...]
    action: int
    reward: float


class Episode(NamedTuple):
    steps: tuple[Step, ...]
    terminated: bool
    final_obs: tuple[float, ...] | None
    """Of a truncated episode."""


def extras_of(done: list[list[Episode]]) -> list[dict[str, float]]:
    """What a group must have told of finished episodes, sorted by score."""
    numbers = sorted(number for row in done for number in range(len(row)))
    return [{"score": float(n), "won": 1.0, "odd": 1.0} if n % 2 else {"score": float(n), "won": 1.0} for n in numbers]


def policy(obs: np.ndarray) -> np.ndarray:
    """An action for each row that depends on its observation only."""
    return (obs[:, 3] > 0.5).astype(np.int32)


def episodes_of(group: Group, spec: Any, steps: int) -> list[list[Episode]]:
    """Each row's finished episodes; asserts the rules of rest, `first` and `active` on the way."""
    buffers, after = new_step_buffers(spec, group.rows), new_step_buffers(spec, group.rows)
    outcome = Outcome(np.zeros(group.rows, np.float32), np.zeros(group.rows, bool), np.zeros(group.rows, bool))
    done: list[list[Episode]] = [[] for _ in range(group.rows)]
    current: list[list[Step]] = [[] for _ in range(group.rows)]
    group.reset(buffers)
    assert buffers.first.all()
    assert buffers.active.all()
    for _ in range(steps):
        action = policy(buffers.obs[0])
        group.step(action[:, None], np.zeros((group.rows, 0), np.float32), outcome, after)
        finals = dict(zip(group.finals.rows.tolist(), group.finals.obs[0], strict=True)) if group.finals else {}
        assert not (outcome.terminated & outcome.truncated).any()
        for row in range(group.rows):
            ended = bool(outcome.terminated[row] or outcome.truncated[row])
            if not buffers.active[row]:
                assert outcome.reward[row] == 0
                assert not ended
                assert after.first[row]
                assert after.active[row]
                continue
            assert bool(buffers.first[row]) == (not current[row])
            current[row].append(Step(tuple(buffers.obs[0][row].tolist()), int(action[row]), float(outcome.reward[row])))
            if ended:
                final = tuple(finals.get(row, after.obs[0][row]).tolist()) if outcome.truncated[row] else None
                done[row].append(Episode(tuple(current[row]), bool(outcome.terminated[row]), final))
                current[row] = []
                assert after.first[row] == after.active[row]
            else:
                assert after.active[row]
                assert not after.first[row]
                assert row not in finals
        buffers, after = after, buffers
    return done


def episodes_by_hand(env: gymnasium.Env, seed: int, count: int) -> list[Episode]:
    """The first episodes of one environment, played with Gymnasium's API alone."""
    episodes = []
    for number in range(count):
        obs, _ = env.reset(seed=seed if number == 0 else None)
        steps: list[Step] = []
        terminated = truncated = False
        while not (terminated or truncated):
            action = int(policy(obs[None])[0])
            after, reward, terminated, truncated, _ = env.step(action)
            steps.append(Step(tuple(obs.tolist()), action, float(reward)))
            obs = after
        episodes.append(Episode(tuple(steps), terminated, None if terminated else tuple(obs.tolist())))
    return episodes
