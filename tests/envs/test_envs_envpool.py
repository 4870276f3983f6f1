from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
from playing import Play

from sfactory import envs
from sfactory.envs.interface import EnvRequest
from sfactory.errors import ConfigError

pytest.importorskip("envpool")


def play(env: str, rows: int, kwargs: dict[str, Any] | None = None, **options: Any) -> Play:
    return Play(env, rows, kwargs, backend="envpool", **options)


def test_a_truncated_row_shows_its_final_observation_and_rests_one_step() -> None:
    with play("Pendulum-v1", 3, {"max_episode_steps": 4}) as pool:
        for _ in range(2):
            for step in range(1, 5):
                before = pool.obs.copy()
                outcome = pool.step(np.zeros(3))
                assert (outcome.truncated == (step == 4)).all()
                assert not outcome.terminated.any()
                assert (pool.buffers.active == (step < 4)).all()
                assert not pool.buffers.first.any()
                assert (np.abs(pool.obs - before)[:, :2] < 0.5).all(), "not the same episode"
            outcome = pool.step(np.ones(3))
            assert not outcome.reward.any()
            assert not outcome.truncated.any()
            assert pool.buffers.first.all()
            assert pool.buffers.active.all()
            assert (np.abs(pool.obs[:, 2]) <= 1).all()


def test_a_terminated_row_rests_one_step_alone() -> None:
    with play("CartPole-v1", 4) as pool:
        actions = np.array([1, 1, 0, 0])
        rested = np.zeros(4, bool)
        for _ in range(40):
            resting = ~pool.buffers.active
            outcome = pool.step(actions)
            assert (pool.buffers.first == resting).all()
            assert (outcome.reward == ~resting).all()
            assert (pool.buffers.active == ~outcome.terminated).all()
            assert (np.abs(pool.obs[pool.buffers.first]) <= 0.05).all()
            rested |= resting
        assert rested.all()


def test_rows_are_seeded_by_their_index_in_the_run() -> None:
    with (
        play("CartPole-v1", 4) as whole,
        play("CartPole-v1", 3, first_index=1) as part,
        play("CartPole-v1", 4, seed=2) as other,
    ):
        np.testing.assert_array_equal(whole.obs[1:], part.obs)
        assert len(np.unique(whole.obs, axis=0)) == 4
        assert (whole.obs != other.obs).any(1).all()


def test_an_atari_id_means_the_same_game_as_elsewhere() -> None:
    pytest.importorskip("ale_py")
    for env in ("ALE/Pong-v5", "PongNoFrameskip-v4"):
        with play(env, 3, {"noop_max": 1}) as pool:
            other = envs.probe(EnvRequest(env, {}))
            assert (pool.spec.observation, pool.spec.action, pool.spec.frameskip) == (
                other.observation,
                other.action,
                4,
            )
            assert pool.spec.render_fps == other.render_fps
            for action in np.random.default_rng(0).integers(0, 6, 30):
                pool.step(np.full(3, action))
            sticks = len({row.tobytes() for row in pool.obs}) > 1
            assert sticks == (env == "ALE/Pong-v5")


def test_mujocos_doubles_are_stored_as_floats_and_actions_are_squashed_to_its_bounds() -> None:
    with play("HalfCheetah-v5", 2, {"max_episode_steps": 3}) as pool:
        assert (pool.obs.shape, pool.obs.dtype, pool.spec.frameskip) == ((2, 17), np.float32, 1)
        for _ in range(3):
            outcome = pool.step(np.full(2, 7.0))
        assert outcome.truncated.all()
        # six torques of 1 cost 0.1 each
        np.testing.assert_allclose([extras["reward_ctrl"] for extras in pool.group.extras], -0.6, atol=1e-6)
        assert "env_id" not in pool.group.extras[0]


def test_render_gives_a_picture_of_each_environment() -> None:
    with play("CartPole-v1", 2, render_mode="rgb_array") as pool:
        pictures = pool.group.render()
    assert [(picture.ndim, picture.shape[2], picture.dtype) for picture in pictures] == [(3, 3, np.uint8)] * 2


def test_what_cannot_be_made_is_a_config_error_that_helps() -> None:
    with pytest.raises(ConfigError, match="did you mean CartPole-v1"):
        envs.probe(EnvRequest("CartPoel-v1", {}, backend="envpool"))
    with pytest.raises(ConfigError, match="bogus"):
        envs.probe(EnvRequest("CartPole-v1", {"bogus": 1}, backend="envpool"))
    with pytest.raises(ConfigError, match="takes ids only"):
        envs.probe(EnvRequest(lambda: gymnasium.make("CartPole-v1"), {}, backend="envpool"))
