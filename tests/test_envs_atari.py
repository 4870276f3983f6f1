from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from playing import Play

from sfactory import envs
from sfactory.envs.group import EnvRequest
from sfactory.errors import ConfigError

pytest.importorskip("ale_py")
pytest.importorskip("cv2")

BACKENDS = ["vector", "gymnasium"]


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return request.param


def test_both_backends_have_the_same_spec() -> None:
    specs = [envs.probe(EnvRequest("ALE/Pong-v5", {}, backend=backend)) for backend in ("auto", *BACKENDS)]
    assert specs[0] == specs[1] == specs[2]
    (leaf,) = specs[0].observation.leaves
    assert (leaf.shape, leaf.dtype, specs[0].action.sizes) == ((4, 84, 84), np.uint8, (6,))
    assert (specs[0].family, specs[0].frameskip) == ("atari", 4)


def test_both_backends_play_the_same_game_pixel_by_pixel() -> None:
    """Without the random frames at the start and without sticky actions; Pong presses FIRE at a reset."""
    plays = [Play("PongNoFrameskip-v4", 1, {"noop_max": 0}, backend=backend) for backend in BACKENDS]
    assert not plays[0].obs[0, :3].any()
    rewards = []
    for action in np.random.default_rng(0).integers(0, 6, 250):
        np.testing.assert_array_equal(plays[0].obs, plays[1].obs)
        rewards.append([play.step(action).reward[0] for play in plays])
    assert np.any(rewards)
    np.testing.assert_array_equal(np.array(rewards)[:, 0], np.array(rewards)[:, 1])


@pytest.mark.parametrize("kwargs", [{"max_num_frames_per_episode": 120}, {"episodic_life": True}])
@pytest.mark.parametrize(("game", "height"), [("Breakout", 210), ("AirRaid", 250)])
def test_small_pictures_are_those_of_ale_but_for_roundings(game: str, height: int, kwargs: dict[str, Any]) -> None:
    """Over several episodes, truncated or terminated; told a size ALE shrinks and stacks by itself."""
    with Play(f"ALE/{game}-v5", 3, kwargs) as play, Play(f"ALE/{game}-v5", 3, {**kwargs, "img_height": 84}) as of_ale:
        assert play.group.env.env.single_observation_space.shape == (1, height, 160)
        assert play.spec == of_ale.spec
        different = terminated = truncated = 0
        for action in np.random.default_rng(0).integers(0, play.spec.action.sizes[0], (400, 3)):
            outcomes = play.step(action), of_ale.step(action)
            for mine, theirs in zip(*outcomes, strict=True):
                np.testing.assert_array_equal(mine, theirs)
            pairs = [(play.obs, of_ale.obs)]
            if play.group.finals is not None:
                np.testing.assert_array_equal(play.group.finals.rows, of_ale.group.finals.rows)
                pairs.append((play.group.finals.obs[0], of_ale.group.finals.obs[0]))
            for mine, theirs in pairs:
                gap = np.abs(mine.astype(int) - theirs)
                assert gap.max() <= 1
                different += np.count_nonzero(gap)
            terminated += np.count_nonzero(outcomes[0].terminated)
            truncated += np.count_nonzero(outcomes[0].truncated)
    assert (truncated > 10) if "max_num_frames_per_episode" in kwargs else (terminated > 0)
    assert different < 0.01 * 400 * of_ale.obs.size


def test_another_autoreset_mode_is_left_to_ale() -> None:
    with Play("ALE/Pong-v5", 1, {"autoreset_mode": "NextStep", "max_num_frames_per_episode": 40}) as play:
        ends = [bool(play.step(np.ones(1)).truncated[0]) for _ in range(25)]
    assert play.obs.shape == (1, 4, 84, 84)
    assert sum(ends) == 2


def test_rewards_are_not_clipped(backend: str) -> None:
    with Play("ALE/SpaceInvaders-v5", 2, backend=backend) as play:
        largest = max(play.step(action).reward.max() for action in np.random.default_rng(0).integers(0, 6, (150, 2)))
    assert largest >= 5


def test_the_vector_environment_hands_over_final_observations_of_truncated_episodes() -> None:
    with Play("ALE/Pong-v5", 2, {"max_num_frames_per_episode": 20}, backend="vector") as play:
        for step in range(1, 11):
            before = play.obs.copy()
            outcome = play.step(np.ones(2))
            assert (outcome.truncated == (step % 5 == 0)).all()
            assert not outcome.terminated.any()
            assert (play.frame.first == (step % 5 == 0)).all()
            assert play.frame.active.all()
            if step % 5:
                assert play.group.finals is None
            else:
                finals = play.group.finals
                np.testing.assert_array_equal(finals.rows, [0, 1])
                np.testing.assert_array_equal(finals.obs[0][:, :3], before[:, 1:])
                assert not play.obs[:, :3].any()


def test_single_games_rest_after_a_truncation() -> None:
    with Play("ALE/Pong-v5", 1, {"max_num_frames_per_episode": 20, "noop_max": 0}, backend="gymnasium") as play:
        steps = 1
        while not play.step(np.ones(1)).truncated[0]:
            steps += 1
        assert 3 <= steps <= 5
        assert not play.outcome.terminated[0]
        assert not play.frame.active[0]
        assert play.obs[0, :3].any()
        play.step(np.ones(1))
        assert play.frame.first[0]
        assert not play.obs[0, :3].any()
        assert play.group.extras == []


@pytest.mark.parametrize(("kwargs", "lives"), [({"episodic_life": True}, 1), ({}, 5)])
def test_an_episode_terminates_with_the_game_or_if_asked_with_a_life(backend: str, kwargs: dict[str, Any], lives: int) -> None:
    """Doing nothing but to begin, Breakout loses a life about every 25 env steps."""
    with Play("ALE/Breakout-v5", 1, kwargs, backend=backend) as play:
        steps = 1
        while not play.step(np.array([steps % 2])).terminated[0]:
            steps += 1
            assert steps < 400
        assert 12 * lives < steps
        assert (steps < 60) == (lives == 1)
        assert not play.outcome.truncated[0]
        assert play.frame.first[0]
        assert play.frame.active[0]
        assert not play.obs[0, :3].any()
        assert play.group.extras == []


def test_games_differ_by_their_index_in_the_run_and_not_by_their_group(backend: str) -> None:
    whole = Play("ALE/Pong-v5", 4, backend=backend)
    parts = [Play("ALE/Pong-v5", 1, first_index=0, backend=backend), Play("ALE/Pong-v5", 3, first_index=1, backend=backend)]
    for _ in range(25):
        whole.step(np.full(4, 3))
        for part in parts:
            part.step(np.full(part.group.rows, 3))
        np.testing.assert_array_equal(np.concatenate([part.obs for part in parts]), whole.obs)
    assert len({row.tobytes() for row in whole.obs}) == 4


@pytest.mark.parametrize(
    ("env", "probability"), [("ALE/Pong-v5", 0.25), ("ale_py:ALE/Pong-v5", 0.25), ("PongNoFrameskip-v0", 0.25), ("PongNoFrameskip-v4", 0.0)]
)
def test_actions_stick_as_registered_for_the_id(backend: str, env: str, probability: float) -> None:
    with Play(env, 3, {"noop_max": 0}, backend=backend) as play:
        for action in np.random.default_rng(0).integers(0, 6, 30):
            play.step(np.full(3, action))
        assert (len({row.tobytes() for row in play.obs}) > 1) == (probability > 0)


def test_games_with_a_mode_or_for_a_video_use_single_environments() -> None:
    with Play("ALE/Breakout-v5", 1, {"mode": 4, "difficulty": 1}, render_mode="rgb_array") as play:
        (picture,) = play.group.render()
    assert picture.shape == (210, 160, 3)
    with Play("ALE/Breakout-v5", 1) as plain, Play("ALE/Breakout-v5", 1, {"mode": 24}) as other:
        assert plain.spec == other.spec
        assert (plain.obs[0, 3] != other.obs[0, 3]).any()


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (EnvRequest("ALE/Pongg-v5", {}), "did you mean .*ALE/Pong-v5"),
        (EnvRequest("ALE/Pong-v5", {"noops": 3}), "env_kwargs .* do not fit"),
        (EnvRequest("ALE/Pong-v5", {"noops": 3}, backend="gymnasium"), "env_kwargs .* do not fit"),
        (EnvRequest("ALE/Pong-v5", {"mode": 3}, backend="vector"), "'mode' .* env_backend auto"),
        (EnvRequest("ALE/Pong-v5", {"frameskip": (2, 5)}), "frameskip is"),
    ],
)
def test_what_cannot_be_made_is_a_config_error_that_helps(request_: EnvRequest, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        envs.probe(request_)


def test_the_families_import_their_packages_only_when_asked_and_name_the_extra_where_one_is_missing() -> None:
    script = """
import sys
from sfactory import envs
from sfactory.envs import atari, envpool, native, vizdoom
from sfactory.envs.group import EnvRequest
assert not {"ale_py", "vizdoom", "envpool", "numba", "cv2"} & set(sys.modules), "imported too early"
sys.modules |= {"ale_py": None, "vizdoom": None, "envpool": None}
cases = [("ALE/Pong-v5", "auto", "atari"), ("PongNoFrameskip-v4", "gymnasium", "atari"), ("VizdoomBasic-v1", "auto", "vizdoom")]
for env, backend, extra in [*cases, ("CartPole-v1", "envpool", "envpool")]:
    try:
        envs.probe(EnvRequest(env, {}, backend=backend))
    except envs.making.ConfigError as error:
        assert f"pip install -e .[{extra}]" in str(error), error
    else:
        raise AssertionError(env)
"""
    subprocess.run([sys.executable, "-c", script], check=True)
