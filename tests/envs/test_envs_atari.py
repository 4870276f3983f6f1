from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from playing import Play

from perf import plain
from sfactory import envs
from sfactory.envs.families import atari
from sfactory.envs.families.vector import VectorGroup
from sfactory.envs.interface import EnvRequest
from sfactory.envs.kernels.resampling import Resampler
from sfactory.envs.kernels.screens import ScreenStacks
from sfactory.errors import ConfigError

pytest.importorskip("ale_py")
pytest.importorskip("cv2")

BACKENDS = ["auto", "vector", "gymnasium"]


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(params=[*BACKENDS, "envpool"])
def backend_or_envpool(request: pytest.FixtureRequest) -> str:
    if request.param == "envpool":
        pytest.importorskip("envpool")
    return request.param


def test_the_backends_have_the_same_spec() -> None:
    specs = [envs.probe(EnvRequest("ALE/Pong-v5", {}, backend=backend)) for backend in BACKENDS]
    assert specs[0] == specs[1] == specs[2]
    (leaf,) = specs[0].observation.leaves
    assert (leaf.shape, leaf.dtype, specs[0].action.sizes) == ((4, 84, 84), np.uint8, (6,))
    assert (specs[0].family, specs[0].frameskip) == ("atari", 4)


@pytest.mark.parametrize("game", ["Pong", "Breakout", "SpaceInvaders"])
@pytest.mark.parametrize(
    "kwargs", [{}, {"frameskip": 1}, {"frameskip": 3}, {"episodic_life": True}, {"max_num_frames_per_episode": 1000}]
)
def test_games_play_as_in_gymnasiums_wrappers_pixel_by_pixel(game: str, kwargs: dict[str, Any]) -> None:
    """Without the random frames at the start, sticky actions, and FIRE, which Gymnasium's counts towards the limit; at
    which its picture is that of the env step before, pooled with the last screen but one.
    """
    kwargs = {"noop_max": 0, "use_fire_reset": False, "repeat_action_probability": 0.0, **kwargs}
    with Play(f"ALE/{game}-v5", 1, kwargs) as play, Play(f"ALE/{game}-v5", 1, kwargs, backend="gymnasium") as single:
        assert not play.obs[0, :3].any()
        ends = 0
        for action in np.random.default_rng(0).integers(0, play.spec.action.sizes[0], 1200):
            mine, theirs = ((*each.outcome, each.buffers.first, each.buffers.active) for each in (play, single))
            assert mine == theirs
            if not play.outcome.truncated[0]:
                np.testing.assert_array_equal(play.obs, single.obs)
            play.step(action), single.step(action)
            ends += int(play.outcome.terminated[0] + play.outcome.truncated[0])
    assert ends >= (1200 // 251 if "max_num_frames_per_episode" in kwargs else game == "Breakout")


@pytest.mark.parametrize("kwargs", [{}, {"episodic_life": True, "use_fire_reset": False}])
@pytest.mark.parametrize("game", ["Breakout", "AirRaid"])
def test_games_play_as_in_ales_vector_environment_but_for_roundings(game: str, kwargs: dict[str, Any]) -> None:
    """Over several episodes, with FIRE and sticky actions, in groups of three; OpenCV rounds a few pixels otherwise."""
    kwargs = {"noop_max": 0, **kwargs}
    with Play(f"ALE/{game}-v5", 3, kwargs) as play, Play(f"ALE/{game}-v5", 3, kwargs, backend="vector") as of_ale:
        different = ends = 0
        for action in np.random.default_rng(0).integers(0, play.spec.action.sizes[0], (600, 3)):
            for mine, theirs in zip(play.step(action), of_ale.step(action), strict=True):
                np.testing.assert_array_equal(mine, theirs)
            gap = np.abs(play.obs.astype(int) - of_ale.obs)
            assert gap.max() <= 1
            different += np.count_nonzero(gap)
            ends += np.count_nonzero(play.outcome.terminated)
    assert ends > 0
    assert different < 0.01 * 600 * play.obs.size


@pytest.mark.parametrize("changing", [0.05, 0.5, 1.0])
@pytest.mark.parametrize("sides", [(210, 160), (250, 160), (84, 88)])
def test_pictures_of_what_has_changed_are_whole_pictures(sides: tuple[int, int], changing: float) -> None:
    """Of three consoles in turn, the first screens of which are black; each begins again now and then."""
    consoles = [plain.RecordedConsole(120, sides, changing, seed) for seed in range(3)]
    for console in consoles:
        console.greys = consoles[0].greys
    stacks, resample = ScreenStacks(consoles, 3, (84, 84)), Resampler((*sides, 1), (84, 84))
    expected, out = np.zeros((3, 3, 1, 84, 84), np.uint8), np.empty((3, 84, 84), np.uint8)
    rng = np.random.default_rng(0)
    for step in range(300):
        row = step % 3
        console, pictures = consoles[row], expected[row]
        if step < 3 or rng.random() < 0.05:
            stacks.clear(row, out)
            pictures[:-1] = 0
            screens = [console.getScreenGrayscale()] * 2
        else:
            pictures[:-1] = pictures[1:]
            screens = []
            for which in range(2):
                console.show(console.shown + 1)
                stacks.look(row, which)
                screens.append(console.getScreenGrayscale())
            stacks.push(row, out)
        resample(np.maximum(*screens)[..., None], pictures[-1])
        np.testing.assert_array_equal(out, pictures[:, 0])


@pytest.mark.parametrize(("kwargs", "threads"), [({"img_height": 42}, 1), ({"grayscale": False}, 1), ({}, 2)])
def test_what_only_ale_can_do_is_left_to_its_vector_environment(kwargs: dict[str, Any], threads: int) -> None:
    with Play("ALE/Pong-v5", 2, kwargs, threads=threads) as play:
        assert isinstance(play.group, VectorGroup)
        play.step(np.ones(2))
    with Play("ALE/Pong-v5", 2) as play:
        assert not isinstance(play.group, VectorGroup)


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
            assert (play.buffers.first == (step % 5 == 0)).all()
            assert play.buffers.active.all()
            if step % 5:
                assert play.group.finals is None
            else:
                finals = play.group.finals
                np.testing.assert_array_equal(finals.rows, [0, 1])
                np.testing.assert_array_equal(finals.obs[0][:, :3], before[:, 1:])
                assert not play.obs[:, :3].any()


@pytest.mark.parametrize("backend", ["auto", "gymnasium"])
def test_single_games_rest_after_a_truncation(backend: str) -> None:
    with Play("ALE/Pong-v5", 1, {"max_num_frames_per_episode": 20, "noop_max": 0}, backend=backend) as play:
        steps = 1
        while not play.step(np.ones(1)).truncated[0]:
            steps += 1
        assert 3 <= steps <= 5
        assert not play.outcome.terminated[0]
        assert not play.buffers.active[0]
        assert play.obs[0, :3].any()
        play.step(np.ones(1))
        assert play.buffers.first[0]
        assert not play.obs[0, :3].any()
        assert play.group.extras == []


def play_breakout(play: Play, games: int) -> tuple[list[int], list[bool]]:
    """Do nothing but press FIRE now and then, so that a life is lost about every 25 env steps.

    Returns:
        For each termination how many active env steps there were since the last, and whether its game went on.
    """
    ends, went_on, steps = [], [], 0
    while went_on.count(False) < games:
        was_active = play.buffers.active[0]
        terminated = play.step(np.array([steps % 2])).terminated[0]
        steps += int(was_active)
        assert was_active or not terminated
        if terminated:
            assert steps < 400
            assert not play.outcome.truncated[0]
            ends.append(steps)
            went_on.append(play.group.goes_on is not None and bool(play.group.goes_on[0]))
            assert play.buffers.first[0] == play.buffers.active[0]
            steps = 0
    return ends, went_on


def test_a_lost_life_ends_an_episode_and_the_game_goes_on_to_its_last_life(backend_or_envpool: str) -> None:
    with Play("BreakoutNoFrameskip-v4", 1, backend=backend_or_envpool) as play:
        ends, went_on = play_breakout(play, games=2)
        assert went_on == [True, True, True, True, False] * 2
        assert all(12 < steps < 60 for steps in ends)
        assert play.group.extras == []


def test_by_the_v5_protocol_an_episode_is_a_game(backend_or_envpool: str) -> None:
    with Play("ALE/Breakout-v5", 1, backend=backend_or_envpool) as play:
        ends, went_on = play_breakout(play, games=1)
        assert went_on == [False]
        assert 60 < ends[0] < 400


@pytest.mark.parametrize("backend", ["vector", "gymnasium"])
def test_lives_end_in_the_same_env_steps_with_the_same_rewards_in_all_backends(backend: str) -> None:
    """Without FIRE, which ALE's vector environment presses in place of an action."""
    kwargs = {"noop_max": 0, "use_fire_reset": False}
    with (
        Play("SpaceInvadersNoFrameskip-v4", 2, kwargs) as play,
        Play("SpaceInvadersNoFrameskip-v4", 2, kwargs, backend=backend) as other,
    ):
        lives = games = 0
        for action in np.random.default_rng(0).integers(0, play.spec.action.sizes[0], (1200, 2)):
            for mine, theirs in zip(play.step(action), other.step(action), strict=True):
                np.testing.assert_array_equal(mine, theirs)
            assert (play.buffers.first == other.buffers.first).all()
            assert np.abs(play.obs.astype(int) - other.obs).max() <= (backend == "vector")
            if play.outcome.terminated.any():
                np.testing.assert_array_equal(play.group.goes_on, other.group.goes_on)
                lives += np.count_nonzero(play.outcome.terminated)
                games += np.count_nonzero(play.outcome.terminated & ~play.group.goes_on)
    assert games > 0
    assert lives >= 3 * games


def test_fire_begins_every_life(backend: str) -> None:
    """Doing nothing, Breakout would otherwise wait for ever."""
    with Play("BreakoutNoFrameskip-v4", 1, backend=backend) as play:
        ends = sum(bool(play.step(np.zeros(1)).terminated[0]) for _ in range(400))
    assert ends > 5


def test_a_game_that_is_begun_anew_is_left_with_its_lives() -> None:
    env = atari.make_single(EnvRequest("BreakoutNoFrameskip-v4", {}))
    env.reset(seed=1)
    while not env.step(0)[2]:
        pass
    assert env.reset()[0][:3].any(), "the next life"
    env.reset(seed=1)
    assert not env.reset()[0][:3].any(), "the next game"
    env.close()


@pytest.mark.parametrize("backend", ["auto", "gymnasium"])
def test_fire_is_pressed_after_the_frames_without_action(backend: str) -> None:
    """The first ball of Breakout falls as long after 29 or 30 of them, which seeds 5 and 12 draw, as after none."""
    lengths = set()
    for seed, noop_max in ((5, 0), (5, 30), (12, 30)):
        with Play("BreakoutNoFrameskip-v4", 1, {"noop_max": noop_max}, seed=seed, backend=backend) as play:
            steps = 1
            while not play.step(np.zeros(1)).terminated[0]:
                steps += 1
        lengths.add(steps)
    assert max(lengths) - min(lengths) <= 1


@pytest.mark.parametrize(
    ("env", "kwargs", "protocol"),
    [
        ("ALE/Pong-v5", {}, "v5 (actions stick with probability 0.25, lost lives end nothing)"),
        ("PongNoFrameskip-v0", {"mode": 0}, "own (actions stick with probability 0.25, lost lives end nothing)"),
        ("PongNoFrameskip-v4", {}, "classic (no sticky actions, a lost life ends an episode of the learner)"),
        ("PongNoFrameskip-v4", {"episodic_life": False}, "own (no sticky actions, lost lives end nothing)"),
    ],
)
def test_the_id_chooses_a_protocol_and_its_spec_names_it(env: str, kwargs: dict[str, Any], protocol: str) -> None:
    assert envs.probe(EnvRequest(env, kwargs)).protocol == protocol


@pytest.mark.parametrize(("env", "versioned"), [("ALE/Pong", "ALE/Pong-v5"), ("PongNoFrameskip", "PongNoFrameskip-v4")])
def test_an_id_without_a_version_is_played_as_its_latest_one(env: str, versioned: str) -> None:
    assert envs.probe(EnvRequest(env, {})) == envs.probe(EnvRequest(versioned, {}))


def test_lives_need_ales_vector_environment_to_begin_anew_in_the_same_step() -> None:
    with pytest.raises(ConfigError, match=r"autoreset_mode .* leave it out"):
        envs.probe(EnvRequest("PongNoFrameskip-v4", {"autoreset_mode": "NextStep"}))


def test_games_differ_by_their_index_in_the_run_and_not_by_their_group(backend: str) -> None:
    whole = Play("ALE/Pong-v5", 4, backend=backend)
    parts = [
        Play("ALE/Pong-v5", 1, first_index=0, backend=backend),
        Play("ALE/Pong-v5", 3, first_index=1, backend=backend),
    ]
    for action in np.random.default_rng(0).integers(0, 6, 25):
        whole.step(np.full(4, action))
        for part in parts:
            part.step(np.full(part.group.rows, action))
        np.testing.assert_array_equal(np.concatenate([part.obs for part in parts]), whole.obs)
    assert len({row.tobytes() for row in whole.obs}) == 4


@pytest.mark.parametrize(
    ("env", "probability"),
    [("ALE/Pong-v5", 0.25), ("ale_py:ALE/Pong-v5", 0.25), ("PongNoFrameskip-v0", 0.25), ("PongNoFrameskip-v4", 0.0)],
)
def test_actions_stick_as_registered_for_the_id(backend: str, env: str, probability: float) -> None:
    with Play(env, 3, {"noop_max": 0}, backend=backend) as play:
        for action in np.random.default_rng(0).integers(0, 6, 30):
            play.step(np.full(3, action))
        assert (len({row.tobytes() for row in play.obs}) > 1) == (probability > 0)


def test_games_have_modes_and_can_be_filmed(backend: str) -> None:
    with Play("ALE/Breakout-v5", 1, {"mode": 4, "difficulty": 1}, render_mode="rgb_array", backend=backend) as play:
        (picture,) = play.group.render()
    assert picture.shape == (210, 160, 3)
    if backend != "vector":
        settings = {"noop_max": 0, "repeat_action_probability": 0.0}
        plays = [
            Play("ALE/SpaceInvaders-v5", 1, {**settings, **chosen}, backend=backend) for chosen in ({}, {"mode": 9})
        ]
        assert plays[0].spec == plays[1].spec
        for play in plays:
            for action in range(6):
                play.step(np.full(1, action))
        assert (plays[0].obs != plays[1].obs).any()


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (EnvRequest("ALE/Pongg-v5", {}), "did you mean .*ALE/Pong-v5"),
        (EnvRequest("Pong-v5", {}), "did you mean ALE/Pong-v5 or "),
        (EnvRequest("pong", {}), "did you mean ALE/Pong-v5 or "),
        (EnvRequest("PongNoFrameSkip-v4", {}), "did you mean PongNoFrameskip-v4 or "),
        (EnvRequest("ALE/Pong-v5", {"noops": 3}), "env_kwargs .* do not fit"),
        (EnvRequest("ALE/Pong-v5", {"frame_skip": 2}), "env_kwargs {'frame_skip': 2} do not .* mean frameskip"),
        (EnvRequest("ALE/Pong-v5", {"max_episode_steps": 9}), "'max_episode_steps': 9} .* max_num_frames_per_episode"),
        (EnvRequest("ALE/Pong-v5", {"render_mode": "rgb_array"}), "env_kwargs {'render_mode': 'rgb_array'} do not fit"),
        (EnvRequest("ALE/Pong-v5", {"noops": 3}, backend="gymnasium"), "env_kwargs .* do not fit"),
        (EnvRequest("ALE/Pong-v5", {"mode": 3}, backend="vector"), "'mode' .* env_backend auto"),
        (EnvRequest("ALE/Pong-v5", {"grayscale": False}, render_mode="rgb_array"), "env_kwargs .* do not fit"),
        (EnvRequest("ALE/Pong-v5", {"mode": 3}), "env_kwargs mode is 3; pong has 0, 1"),
        (EnvRequest("ALE/Pong-v5", {"difficulty": 7}), "env_kwargs difficulty is 7; pong has 0, 1, 2, 3"),
        (EnvRequest("ALE/Pong-v5", {"frameskip": (2, 5)}), "frameskip is"),
        (EnvRequest("ALE/Pong-v5", {"noop_max": -1}), "noop_max is -1; .* at least 0"),
        (EnvRequest("ALE/Pong-v5", {"episodic_life": 1}), "episodic_life is 1; .* true or false"),
        (
            EnvRequest("ALE/Pong-v5", {"repeat_action_probability": 25}),
            "repeat_action_probability is 25; .* from 0 to 1",
        ),
    ],
)
def test_what_cannot_be_made_is_a_config_error_that_helps(request_: EnvRequest, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        envs.probe(request_)


def test_the_families_import_their_packages_only_when_asked_and_name_the_extra_where_one_is_missing() -> None:
    script = """
import sys
from sfactory import envs
from sfactory.envs.families import atari
from sfactory.envs.families import envpool
from sfactory.envs.families import vizdoom
from sfactory.envs import native
from sfactory.envs.interface import EnvRequest
from sfactory.errors import ConfigError
assert not {"ale_py", "vizdoom", "envpool", "numba", "cv2"} & set(sys.modules), "imported too early"
sys.modules |= {"ale_py": None, "vizdoom": None, "envpool": None}
cases = [("ALE/Pong-v5", "auto", "atari"), ("PongNoFrameskip-v4", "gymnasium", "atari")]
cases += [("VizdoomBasic-v1", "auto", "vizdoom"), ("CartPole-v1", "envpool", "envpool")]
for env, backend, extra in cases:
    try:
        envs.probe(EnvRequest(env, {}, backend=backend))
    except ConfigError as error:
        assert f'pip install -e ".[{extra}]"' in str(error), error
    else:
        raise AssertionError(env)
"""
    subprocess.run([sys.executable, "-c", script], check=True)
