"""Environments that share one simulation play as Gymnasium's do, each by itself."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
from playing import Play

from sfactory import envs
from sfactory.envs.interface import EnvRequest
from sfactory.errors import ConfigError

pytest.importorskip("mujoco")

from sfactory.envs.families.mujoco import SharedSimulation
from sfactory.envs.families.mujoco_tasks import TASKS

NAMES = (
    *(
        "Ant-v5",
        "HalfCheetah-v5",
        "Hopper-v5",
        "Humanoid-v5",
        "HumanoidStandup-v5",
        "InvertedDoublePendulum-v5",
        "InvertedPendulum-v5",
    ),
    *("Pusher-v5", "Reacher-v5", "Swimmer-v5", "Walker2d-v5"),
)
OTHER_ARGUMENTS: list[tuple[str, dict[str, Any]]] = [
    (
        "Ant-v5",
        {
            "include_cfrc_ext_in_observation": False,
            "main_body": "torso",
            "contact_cost_weight": 0.1,
            "healthy_z_range": (0.5, 0.8),
        },
    ),
    (
        "HalfCheetah-v5",
        {"exclude_current_positions_from_observation": False, "frame_skip": 2, "forward_reward_weight": 3.0},
    ),
    ("Hopper-v5", {"healthy_state_range": (-1.0, 1.0), "healthy_reward": 2.0, "reset_noise_scale": 0.1}),
    (
        "Humanoid-v5",
        {"include_cvel_in_observation": False, "contact_cost_range": (-1.0, 1e-3), "healthy_z_range": (1.2, 2.0)},
    ),
    ("HumanoidStandup-v5", {"impact_cost_range": (0.0, 1e-6), "exclude_current_positions_from_observation": False}),
    ("InvertedDoublePendulum-v5", {"healthy_reward": 3.0}),
    ("Pusher-v5", {"reward_near_weight": 2.0, "frame_skip": 3}),
    ("Reacher-v5", {"reward_control_weight": 0.3}),
    ("Swimmer-v5", {"exclude_current_positions_from_observation": False, "ctrl_cost_weight": 0.5}),
    ("Walker2d-v5", {"terminate_when_unhealthy": False, "reset_noise_scale": 0.2}),
]


@pytest.mark.parametrize(("name", "kwargs"), [*((name, {}) for name in NAMES), *OTHER_ARGUMENTS])
def test_each_environment_plays_as_gymnasiums_does(name: str, kwargs: dict[str, Any]) -> None:
    rows, limit = 3, 40
    singles = [gymnasium.make(name, max_episode_steps=limit, **kwargs) for _ in range(rows)]
    shared = SharedSimulation(gymnasium.make(name, max_episode_steps=limit, **kwargs), rows)
    seen, _ = shared.reset(seed=[5, 6, 7])
    np.testing.assert_array_equal(seen, [env.reset(seed=5 + row)[0] for row, env in enumerate(singles)])
    random = np.random.default_rng(1)
    ends = 0
    for _ in range(3 * limit):
        actions = random.uniform(-1, 1, shared.action_space.shape).astype(np.float32)
        seen, rewards, terminated, truncated, info = shared.step(actions)
        results = [env.step(action) for env, action in zip(singles, actions, strict=True)]
        np.testing.assert_allclose(rewards, [result[1] for result in results], rtol=1e-14)
        np.testing.assert_array_equal(np.transpose([terminated, truncated]), [result[2:4] for result in results])
        ended = terminated | truncated
        for row in np.flatnonzero(ended):
            observation, *_, quantities = results[row]
            np.testing.assert_array_equal(info["final_obs"][row], observation)
            numbers = {key: value for key, value in quantities.items() if np.ndim(value) == 0}
            assert {key: values[row] for key, values in info["final_info"].items()} == pytest.approx(numbers, rel=1e-14)
            results[row] = singles[row].reset()
            ends += 1
        np.testing.assert_array_equal(seen, [result[0] for result in results])
    assert ends >= 3 * rows
    for env in (*singles, shared):
        env.close()


def test_every_task_is_tested_and_is_one_that_gymnasium_has() -> None:
    assert {gymnasium.spec(name).entry_point for name in NAMES} == set(TASKS)


def play_both(name: str, rows: int, kwargs: dict[str, Any], steps: int) -> None:
    """Compare a group with one of single environments, up to the first truncation."""
    with Play(name, rows, kwargs) as shared, Play(name, rows, kwargs, backend="gymnasium") as single:
        assert (shared.spec.observation, shared.spec.action, shared.spec.frameskip) == (
            single.spec.observation,
            single.spec.action,
            1,
        )
        for angle in range(steps):
            for each in (shared, single):
                each.step(np.sin(angle + np.arange(rows)))
            for ours, theirs in zip((*shared.outcome, shared.obs), (*single.outcome, single.obs), strict=True):
                np.testing.assert_array_equal(ours, theirs)


def test_a_group_is_seeded_and_squashed_as_one_of_single_environments() -> None:
    play_both("HalfCheetah-v5", 4, {}, 30)


def test_a_simulation_that_explodes_is_begun_anew_by_mujoco_and_leaves_the_others_alone() -> None:
    with pytest.warns(UserWarning, match="Nan, Inf or huge value"):
        play_both("HalfCheetah-v5", 3, {"reset_noise_scale": 1e3}, 100)


def test_truncated_rows_hand_over_their_final_observations() -> None:
    with Play("Swimmer-v5", 2, {"max_episode_steps": 5}) as play:
        for _ in range(4):
            play.step(np.ones(2))
            assert play.group.finals is None
        last = play.obs.copy()
        play.step(np.ones(2))
        assert play.outcome.truncated.all()
        assert play.buffers.first.all()
        assert play.buffers.active.all()
        assert play.group.finals.rows.tolist() == [0, 1]
        assert 0 < np.abs(play.group.finals.obs[0] - last).max() < 5
        assert len(play.group.extras) == 2


def test_groups_of_one_run_do_not_depend_on_where_they_are_cut() -> None:
    with Play("Hopper-v5", 4) as whole, Play("Hopper-v5", 2, first_index=2) as part:
        for _ in range(30):
            whole.step(np.arange(4.0))
            part.step(np.arange(2.0, 4.0))
            np.testing.assert_array_equal(whole.obs[2:], part.obs)


@pytest.mark.parametrize("options", [{"backend": "gymnasium"}, {"render_mode": "rgb_array"}])
def test_single_environments_can_be_had(options: dict[str, Any]) -> None:
    with Play("Reacher-v5", 2, **options) as play:
        assert len({id(env.unwrapped.data) for env in play.group.envs}) == 2


def test_an_own_id_with_the_same_class_shares_its_simulation_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gymnasium.envs.registration, "registry", dict(gymnasium.registry))
    monkeypatch.setattr(gymnasium, "registry", gymnasium.envs.registration.registry)
    gymnasium.register(
        "Slow-v0", "gymnasium.envs.mujoco.hopper_v5:HopperEnv", kwargs={"frame_skip": 8}, max_episode_steps=3
    )
    with Play("Slow-v0", 2) as play:
        assert isinstance(play.group.env, SharedSimulation)
        for _ in range(3):
            play.step(np.zeros(2))
        assert play.outcome.truncated.all()


def test_arguments_that_do_not_fit_are_named() -> None:
    with pytest.raises(ConfigError, match="bogus"):
        envs.probe(EnvRequest("HalfCheetah-v5", {"bogus": 1}))
