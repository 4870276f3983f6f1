"""Classic control in compiled passes plays as Gymnasium's does, each environment by itself."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
from playing import Play

from sfactory import envs
from sfactory.envs.families import vector
from sfactory.envs.families.classic_control import TASKS, ClassicControl
from sfactory.envs.interface import EnvRequest
from sfactory.errors import ConfigError, EnvironmentFault

NAMES = ("Acrobot-v1", "MountainCar-v0", "MountainCarContinuous-v0")
OTHER_ARGUMENTS: list[tuple[str, dict[str, Any]]] = [
    ("MountainCar-v0", {"goal_velocity": 0.03}),
    ("MountainCarContinuous-v0", {"goal_velocity": 0.02}),
]
ROWS, LIMIT = 4, 150


@pytest.mark.parametrize(("name", "kwargs"), [*((name, {}) for name in NAMES), *OTHER_ARGUMENTS])
def test_each_environment_plays_as_gymnasiums_does(name: str, kwargs: dict[str, Any]) -> None:
    """From the same start of each step: rounding grows too fast in Acrobot to compare whole episodes."""
    singles = [gymnasium.make(name, max_episode_steps=LIMIT, **kwargs) for _ in range(ROWS)]
    compiled = ClassicControl(gymnasium.make(name, max_episode_steps=LIMIT, **kwargs), ROWS)
    seen, _ = compiled.reset(seed=[5, 6, 7, 8])
    np.testing.assert_array_equal(seen, [env.reset(seed=5 + row)[0] for row, env in enumerate(singles)])
    random = np.random.default_rng(1)
    ends = 0
    for _ in range(6 * LIMIT):
        actions = _eager(name, seen, random)
        for row, env in enumerate(singles):
            env.unwrapped.state = compiled._states[row].astype(np.asarray(env.unwrapped.state).dtype)
        seen, rewards, terminated, truncated, info = compiled.step(actions)
        results = [env.step(action) for env, action in zip(singles, actions, strict=True)]
        np.testing.assert_allclose(rewards, [result[1] for result in results], rtol=2e-6, atol=1e-6)
        np.testing.assert_array_equal(np.transpose([terminated, truncated]), [result[2:4] for result in results])
        last = info.get("final_obs", seen)
        np.testing.assert_allclose(last, [result[0] for result in results], rtol=1e-6, atol=1e-6)
        for row in np.flatnonzero(terminated | truncated):
            np.testing.assert_array_equal(seen[row], singles[row].reset()[0])
            ends += 1
    assert ends >= 5 * ROWS
    for env in (*singles, compiled):
        env.close()


def _eager(name: str, seen: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """Actions beyond the bounds, too, and such that all that ends an episode happens."""
    along = np.sign(seen[:, 4] if name == "Acrobot-v1" else seen[:, 1])  # pump energy in
    if name == "MountainCarContinuous-v0":
        return (along * random.uniform(0.5, 1.5, ROWS)).astype(np.float32)[:, None]
    return np.where(random.random(ROWS) < 0.1, random.integers(3, size=ROWS), along + 1).astype(np.int64)


def test_every_task_is_tested() -> None:
    assert {gymnasium.spec(name).entry_point for name in NAMES} == set(TASKS)


@pytest.mark.parametrize("name", NAMES)
def test_a_group_is_seeded_and_squashed_as_one_of_single_environments(name: str) -> None:
    with Play(name, 3) as compiled, Play(name, 3, backend="gymnasium") as single:
        assert (compiled.spec.observation, compiled.spec.action, compiled.spec.frameskip) == (
            single.spec.observation,
            single.spec.action,
            1,
        )
        for step in range(20):
            for each in (compiled, single):
                each.step((np.arange(3) + step) % 3 if compiled.spec.action.sizes else np.sin(step + np.arange(3)))
            for ours, theirs in zip((*compiled.outcome, compiled.obs), (*single.outcome, single.obs), strict=True):
                np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def test_truncated_rows_hand_over_their_final_observations() -> None:
    with Play("MountainCarContinuous-v0", 2, {"max_episode_steps": 5}) as play:
        for _ in range(4):
            play.step(np.ones(2))
            assert play.group.finals is None
        play.step(np.ones(2))
        assert play.outcome.truncated.all()
        assert play.buffers.first.all()
        assert play.group.finals.rows.tolist() == [0, 1]
        assert not np.array_equal(play.group.finals.obs[0], play.obs)


def test_groups_of_one_run_do_not_depend_on_where_they_are_cut() -> None:
    with Play("Acrobot-v1", 4) as whole, Play("Acrobot-v1", 2, first_index=2) as part:
        for step in range(30):
            whole.step(np.arange(4) * step % 3)
            part.step(np.arange(2, 4) * step % 3)
            np.testing.assert_array_equal(whole.obs[2:], part.obs)


@pytest.mark.parametrize("options", [{"backend": "gymnasium"}, {"render_mode": "rgb_array"}])
def test_single_environments_can_be_had(options: dict[str, Any]) -> None:
    with Play("Acrobot-v1", 2, **options) as play:
        assert len({id(env.unwrapped) for env in play.group.envs}) == 2


def test_arguments_that_do_not_fit_are_named() -> None:
    with pytest.raises(ConfigError, match="bogus"):
        envs.probe(EnvRequest("MountainCar-v0", {"bogus": 1}))


def test_an_error_in_close_does_not_hide_the_fault_that_a_probe_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(error: Exception) -> None:
        raise error

    monkeypatch.setattr(vector, "read_spec", lambda *_: fail(EnvironmentFault("no space at all")))
    monkeypatch.setattr(ClassicControl, "close", lambda _: fail(RuntimeError("closed already")))
    with pytest.raises(ConfigError, match="no space at all"):
        envs.probe(EnvRequest("MountainCar-v0", {}))
