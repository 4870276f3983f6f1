from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
from playing import Play

from sfactory import envs
from sfactory.envs.interface import EnvRequest
from sfactory.errors import ConfigError

NAMES = ["sfactory/CartPole", "sfactory/Pendulum", "sfactory/MemoryGrid"]


def test_cartpole_follows_gymnasiums_physics_rewards_and_termination() -> None:
    play = Play("sfactory/CartPole", 6)
    single = gymnasium.make("CartPole-v1").unwrapped
    assert play.spec.observation.space == single.observation_space
    rng = np.random.default_rng(0)
    terminations = 0
    for _ in range(80):
        states, actions = play.group._state.copy(), rng.integers(0, 2, 6)
        outcome = play.step(actions)
        for row in range(6):
            single.reset()
            single.state = states[row]
            obs, reward, terminated, _, _ = single.step(actions[row])
            assert (outcome.reward[row], outcome.terminated[row]) == (reward, terminated)
            if terminated:
                terminations += 1
                assert play.buffers.first[row]
                assert np.abs(play.obs[row]).max() <= 0.05
            else:
                np.testing.assert_allclose(play.obs[row], obs, atol=1e-5)
    assert terminations > 5


@pytest.mark.parametrize("squash", ["clip", "tanh"])
def test_pendulum_follows_gymnasiums_physics_and_rewards(squash: str) -> None:
    play = Play("sfactory/Pendulum", 6, squash=squash)
    single = gymnasium.make("Pendulum-v1").unwrapped
    assert play.spec.observation.space == single.observation_space
    rng = np.random.default_rng(0)
    for _ in range(150):
        states, actions = play.group._state.copy(), rng.normal(0, 2, (6, 1)).astype(np.float32)
        outcome = play.step(actions)
        torques = play.spec.action.batch(np.zeros((6, 0), np.int32), actions)
        for row in range(6):
            single.reset()
            single.state = states[row]
            obs, reward, *_ = single.step(torques[row])
            np.testing.assert_allclose(play.obs[row], obs, atol=1e-5)
            np.testing.assert_allclose(outcome.reward[row], reward, atol=1e-5)


def test_time_limits_are_those_of_gymnasium() -> None:
    cartpole, pendulum = Play("sfactory/CartPole", 4), Play("sfactory/Pendulum", 4)
    for step in range(1, 501):
        outcome = cartpole.step(cartpole.obs @ [0.3, 0.6, 3, 2] > 0)
        assert not outcome.terminated.any(), "the controller let the pole fall"
        assert outcome.truncated.all() == outcome.truncated.any() == (step == 500)
    for step in range(1, 201):
        assert (pendulum.step(np.zeros(4)).truncated == (step == 200)).all()


@pytest.mark.parametrize("env", NAMES)
def test_a_truncated_row_shows_its_final_observation_and_rests_one_step(env: str) -> None:
    play = Play(env, 3, {"max_episode_steps": 4})
    assert play.buffers.first.all()
    assert play.buffers.active.all()
    for _ in range(2):
        first = play.obs.copy()
        for step in range(1, 5):
            outcome = play.step(np.zeros(3))
            assert (outcome.truncated == (step == 4)).all()
            assert not outcome.terminated.any()
            assert not play.buffers.first.any()
            assert (play.buffers.active == (step < 4)).all()
        assert (play.obs != first).any()
        outcome = play.step(np.ones(3))
        assert not outcome.reward.any()
        assert not (outcome.terminated | outcome.truncated).any()
        assert play.buffers.first.all()
        assert play.buffers.active.all()
        assert play.group.finals is None


def test_a_terminated_row_begins_anew_at_once_and_a_last_step_is_not_truncated_too() -> None:
    unlimited = Play("sfactory/CartPole", 1)
    fall = next(step for step in range(1, 100) if unlimited.step(np.ones(1)).terminated[0])
    limited = Play("sfactory/CartPole", 1, {"max_episode_steps": fall})
    for _ in range(fall):
        outcome = limited.step(np.ones(1))
    assert (outcome.terminated[0], outcome.truncated[0], outcome.reward[0]) == (True, False, 1.0)
    assert limited.buffers.first[0]
    assert limited.buffers.active[0]
    limited.step(np.ones(1))
    assert not limited.buffers.first[0]


@pytest.mark.parametrize("env", NAMES)
def test_results_depend_on_the_seed_and_the_index_in_the_run_but_not_on_the_grouping(env: str) -> None:
    short = {"max_episode_steps": 30}
    whole = Play(env, 5, short, first_index=2)
    parts = [Play(env, 2, short, first_index=2), Play(env, 3, short, first_index=4)]
    actions = np.random.default_rng(0).integers(0, 2, (100, 5))
    for step in actions:
        whole.step(step)
        parts[0].step(step[:2])
        parts[1].step(step[2:])
        for name in ("obs", "outcome"):
            expected = getattr(whole, name) if name == "obs" else np.stack(whole.outcome)
            got = [getattr(part, name) if name == "obs" else np.stack(part.outcome) for part in parts]
            np.testing.assert_array_equal(np.concatenate(got, axis=0 if name == "obs" else 1), expected)
    other = Play(env, 200, seed=2)
    if env != "sfactory/MemoryGrid":
        assert len(np.unique(other.obs, axis=0)) == 200
        assert not np.array_equal(other.obs[:5], Play(env, 5).obs)


def test_starts_are_spread_as_gymnasiums_are() -> None:
    cartpole, pendulum = Play("sfactory/CartPole", 4000), Play("sfactory/Pendulum", 4000)
    for values, limit in ((cartpole.group._state, 0.05), (pendulum.group._state, np.array([np.pi, 1.0]))):
        scaled = values / limit
        assert np.abs(scaled).max() <= 1
        np.testing.assert_allclose(np.quantile(scaled, [0.25, 0.5, 0.75], axis=0) - [[-0.5], [0], [0.5]], 0, atol=0.06)
        assert np.abs(np.corrcoef(scaled, rowvar=False) - np.eye(values.shape[1])).max() < 0.06


def memory_grid(rows: int = 8, **kwargs: Any) -> Play:
    return Play("sfactory/MemoryGrid", rows, kwargs)


def is_green(pixel: np.ndarray) -> np.ndarray:
    return pixel[:, 1] > pixel[:, 0]


def best_actions(play: Play, cue_is_green: np.ndarray) -> np.ndarray:
    left_is_green = is_green(play.obs[:, :, 6, 10])
    return np.where(left_is_green == cue_is_green, 0, 1)


@pytest.mark.parametrize("shuffle_doors", [False, True])
@pytest.mark.parametrize("length", [1, 6])
def test_whoever_remembers_the_cue_always_wins_and_whoever_inverts_it_always_loses(
    length: int, shuffle_doors: bool
) -> None:
    for sign in (1, -1):
        play = memory_grid(length=length, shuffle_doors=shuffle_doors)
        cue_is_green = is_green(play.obs[:, :, 10, 6])
        assert 0 < cue_is_green.sum() < 8
        for step in range(length + 2):
            outcome = play.step(best_actions(play, cue_is_green if sign > 0 else ~cue_is_green))
            assert (outcome.terminated == (step == length + 1)).all()
        assert (outcome.reward == sign).all()
        assert play.buffers.first.all()


def test_observations_after_the_cue_are_the_same_bytes_for_both_cues() -> None:
    actions = np.random.default_rng(3).integers(0, 2, (8, 32))
    plays = [memory_grid(32, shuffle_doors=True), memory_grid(32, shuffle_doors=True)]
    for cue, play in enumerate(plays):
        play.group._cue.fill(cue)
    over = np.zeros(32, bool)
    for step in actions:
        outcomes = [play.step(step) for play in plays]
        np.testing.assert_array_equal(outcomes[0].terminated | over, outcomes[1].terminated | over)
        ends = outcomes[0].terminated & ~over
        assert (outcomes[0].reward[ends] == -outcomes[1].reward[ends]).all()
        over |= ends
        np.testing.assert_array_equal(plays[0].obs[~over], plays[1].obs[~over])
    assert over.all()


def test_the_action_taken_while_the_cue_is_visible_has_no_effect() -> None:
    plays = [memory_grid(), memory_grid()]
    first = plays[0].obs.copy()
    for action, play in enumerate(plays):
        play.step(np.full(8, action))
    assert (plays[0].obs != first).any()
    np.testing.assert_array_equal(plays[0].obs, plays[1].obs)
    assert not plays[0].buffers.first.any()


def test_cue_and_doors_are_independent_fair_coins() -> None:
    play = memory_grid(4000, shuffle_doors=True)
    counts = np.bincount(2 * play.group._cue + play.group._left_door, minlength=4)
    assert np.abs(counts / 4000 - 0.25).max() < 0.03
    fixed = memory_grid(4000).group
    assert not fixed._left_door.any()
    assert abs(fixed._cue.mean() - 0.5) < 0.03


def test_a_random_walk_ends_without_time_limit_and_gains_nothing_on_average() -> None:
    play, rng = memory_grid(500), np.random.default_rng(0)
    total = 0.0
    for step in range(1, 81):
        outcome = play.step(rng.integers(0, 2, 500))
        assert (outcome.terminated == (step % 8 == 0)).all()
        assert not outcome.truncated.any()
        total += outcome.reward.sum()
    assert abs(total / 5000) < 0.05


def test_the_time_penalty_is_taken_from_every_steps_reward() -> None:
    play = memory_grid(length=2, time_penalty=0.25)
    cue_is_green = is_green(play.obs[:, :, 10, 6])
    rewards = [play.step(best_actions(play, cue_is_green)).reward.copy() for _ in range(4)]
    np.testing.assert_array_equal(rewards, np.repeat([[-0.25], [-0.25], [-0.25], [0.75]], 8, axis=1))


@pytest.mark.parametrize("env", NAMES)
def test_render_gives_a_changing_picture_of_each_environment(env: str) -> None:
    play = Play(env, 3)
    before = play.group.render()
    for _ in range(3):
        play.step(np.zeros(3))
    after = play.group.render()
    assert len(after) == 3
    for old, new in zip(before, after, strict=True):
        assert (new.dtype, new.ndim, new.shape[2]) == (np.uint8, 3, 3)
        assert (old != new).any()


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (EnvRequest("sfactory/Cartpole", {}), "did you mean sfactory/CartPole"),
        (EnvRequest("sfactory/CartPole", {"gravity": 3}), "takes max_episode_steps"),
        (EnvRequest("sfactory/CartPole", {"max_episode_steps": 0}), "at least 1"),
        (EnvRequest("sfactory/MemoryGrid", {"length": 0}), "length is 0"),
        (EnvRequest("sfactory/CartPole", {}, backend="gymnasium"), "env_backend auto"),
    ],
)
def test_what_cannot_be_made_is_a_config_error_that_helps(request_: EnvRequest, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        envs.probe(request_)
