from __future__ import annotations

import builtins
import errno
import json
import os
import shutil
import signal
import sys
import weakref
from collections import Counter
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import yaml
from environments import MODES, Counting, Lives, vector_of
from gymnasium import spaces
from short_runs import favour, short_run

from sfactory import evaluate
from sfactory.config import LogConfig
from sfactory.envs import env_seed
from sfactory.errors import ConfigError, EnvironmentFault
from sfactory.eval import main
from sfactory.files import move_whole
from sfactory.player import Evaluation
from sfactory.runs.report_page import write_page


@pytest.fixture(scope="module")
def counting(tmp_path_factory):
    """A run whose policy always takes action 2, and only a little more often than not if it is sampled."""
    run = short_run(tmp_path_factory.mktemp("eval") / "run", Counting)
    favour(run, category=2, by=1.0)
    return run


@pytest.fixture(scope="module")
def cartpole(tmp_path_factory):
    return short_run(tmp_path_factory.mktemp("eval") / "run", "CartPole-v1")


def counted_episode(value: float, length: int) -> float:
    """Which episode of its Counting environment gave this return."""
    return (value - length * (length + 1) / 2) / (100 * length)


@pytest.mark.parametrize(
    "make", [Counting, *(vector_of(Counting, mode) for mode in MODES)], ids=["single", *(mode.name for mode in MODES)]
)
def test_every_environment_plays_its_share_and_returns_are_exact(counting, make):
    result = evaluate(counting, 10, env=make, parallel=4)
    assert result.episodes == len(result.returns) == 10
    played = Counter(counted_episode(*episode) for episode in zip(result.returns, result.lengths, strict=True))
    assert played == {0: 4, 1: 4, 2: 2}
    assert result.return_mean == pytest.approx(np.mean(result.returns))
    assert result.return_std == pytest.approx(np.std(result.returns))
    assert (result.return_min, result.return_max) == (min(result.returns), max(result.returns))
    assert result.length_mean == pytest.approx(np.mean(result.lengths))
    assert result.extras["last"] == pytest.approx(np.mean(result.lengths))


@pytest.mark.parametrize(
    "make", [Lives, *(vector_of(Lives, mode) for mode in MODES)], ids=["single", *(mode.name for mode in MODES)]
)
def test_a_game_that_goes_on_after_lost_lives_is_one_episode(tmp_path, make):
    run = short_run(tmp_path / "run", make)
    result = evaluate(run, 5, env=make, parallel=2)
    assert result.returns == (9.0,) * 5
    assert result.lengths == (9,) * 5
    assert result.extras == {"games": (1 + 1 + 2 + 2 + 3) / 5}


def test_episodes_do_not_depend_on_how_they_are_grouped(counting):
    together, apart = (
        evaluate(counting, 6, env=Counting, parallel=6),
        evaluate(counting, 6, env=Counting, parallel=6, max_steps=100),
    )
    assert sorted(together.returns) == sorted(apart.returns)
    assert sorted(evaluate(counting, 6, env=Counting, parallel=2, max_steps=100).returns) == sorted(together.returns)


LOOKED_AT = None, 0, env_seed(0, 0)
"""Seeds of an environment that is only looked at."""


class Paid(gym.Env):
    """Pays the action, for four env steps; notes the seeds that it is reset with."""

    observation_space = spaces.Box(-1, 1, (1,))
    action_space = spaces.Discrete(3)
    seeds: list[int | None] = []  # noqa: RUF012  shared on purpose

    def __init__(self, end=4):
        self.end = end

    def reset(self, *, seed=None, options=None):
        Paid.seeds.append(seed)
        super().reset(seed=seed)
        self.count = 0
        return self.np_random.uniform(-1, 1, 1).astype(np.float32), {}

    def step(self, action):
        self.count += 1
        return np.zeros(1, np.float32), float(action), self.count == self.end, False, {}


def test_the_mode_is_played_unless_draws_are_asked_for(tmp_path):
    run = short_run(tmp_path / "run", Paid)
    favour(run, category=2, by=1.0)
    assert evaluate(run, 20, env=Paid).returns == (8.0,) * 20
    sampled = evaluate(run, 200, env=Paid, deterministic=False)
    weight = np.exp(1.0)
    assert sampled.return_mean == pytest.approx(4 * (1 + 2 * weight) / (2 + weight), abs=0.5)
    assert sampled == evaluate(run, 200, env=Paid, deterministic=False)
    assert sampled.returns != evaluate(run, 200, env=Paid, deterministic=False, seed=9).returns


def test_it_plays_episodes_that_training_has_not_seen(tmp_path):
    def seeds_of(action):
        Paid.seeds.clear()
        action()
        return set(Paid.seeds).difference(LOOKED_AT)

    run = tmp_path / "run"
    trained = seeds_of(lambda: short_run(run, Paid, seed=3))
    default = seeds_of(lambda: evaluate(run, 4, env=Paid))
    other = seeds_of(lambda: evaluate(run, 4, env=Paid, seed=4))
    assert len(trained) == len(default) == len(other) == 4
    assert default == seeds_of(lambda: evaluate(run, 4, env=Paid, seed=3))
    assert not trained & default
    assert not default & other


def test_episodes_without_an_end_are_counted_as_they_stand(tmp_path):
    run = short_run(tmp_path / "run", Paid)
    favour(run, category=1)
    result = evaluate(run, 5, env=Paid, env_kwargs={"end": 10**9}, parallel=2, max_steps=7)
    assert result.lengths == (7,) * 5
    assert result.returns == (7.0,) * 5
    assert evaluate(run, 5, env=Paid, parallel=2, max_steps=7).lengths == (4,) * 5


class Uneven:
    """Two agents: the first lives for two env steps, the second for five and is then truncated. Pays each 1 and 10 a
    step."""

    possible_agents = ["short", "long"]  # noqa: RUF012

    def observation_space(self, agent):
        return spaces.Box(-1, 1, (2,))

    def action_space(self, agent):
        return spaces.Discrete(2)

    def reset(self, seed=None, options=None):
        self.agents, self.count = list(self.possible_agents), 0
        return self._all(np.zeros(2, np.float32)), self._all({})

    def step(self, actions):
        assert set(actions) == set(self.agents)
        self.count += 1
        results = (
            self._all(np.zeros(2, np.float32)),
            {agent: 1.0 if agent == "short" else 10.0 for agent in self.agents},
            {agent: agent == "short" and self.count == 2 for agent in self.agents},
            {agent: agent == "long" and self.count == 5 for agent in self.agents},
            self._all({"count": self.count}),
        )
        self.agents = [agent for agent in self.agents if self.count < (2 if agent == "short" else 5)]
        return results

    def close(self):
        pass

    def _all(self, value):
        return dict.fromkeys(self.agents, value)


@pytest.mark.parametrize("max_steps", [None, 30])
def test_every_agent_of_an_environment_counts_equally(tmp_path, max_steps):
    run = short_run(tmp_path / "run", Uneven, envs_per_worker=2, batch_size=32)
    result = evaluate(run, 5, env=Uneven, parallel=2, max_steps=max_steps)
    assert Counter(zip(result.returns, result.lengths, strict=True)) == {(2.0, 2): 3, (50.0, 5): 3}
    assert result.extras == {"count": 3.5}


class Returning(Uneven):
    """The long agent dies in the step in which the short one comes back, which then plays to the end."""

    def step(self, actions):
        assert set(actions) == set(self.agents)
        self.count += 1
        dies = {3: "short", 5: "long", 10: "short"}.get(self.count)
        shown = [*self.agents, "short"] if self.count == 5 else list(self.agents)
        self.agents = [agent for agent in shown if agent != dies]
        observations = dict.fromkeys(shown, np.zeros(2, np.float32))
        ends = ({agent: agent == dies for agent in shown}, dict.fromkeys(shown, False))
        return observations, dict.fromkeys(actions, 1.0), *ends, {agent: {} for agent in shown}


@pytest.mark.parametrize("parallel", [1, 2, 4])
def test_an_agent_that_comes_back_alone_begins_no_new_game(tmp_path, parallel):
    run = short_run(tmp_path / "run", Returning, envs_per_worker=2, batch_size=32)
    result = evaluate(run, 8, env=Returning, parallel=parallel)
    assert Counter(result.lengths) == {3: 4, 5: 8}, "three lives in each of four games"
    assert Counter(result.returns) == {3.0: 4, 5.0: 8}


class HalfAlive(Uneven):
    """Of its two agents only one lives in a game, by turns."""

    def reset(self, seed=None, options=None):
        self.games = getattr(self, "games", 0) + 1
        observations, infos = super().reset(seed, options)
        self.agents = [self.possible_agents[self.games % 2]]
        return {agent: observations[agent] for agent in self.agents}, {agent: infos[agent] for agent in self.agents}


@pytest.mark.parametrize("parallel", [1, 3, None])
def test_as_many_episodes_are_played_as_asked_for_where_not_all_agents_live(tmp_path, parallel):
    run = short_run(tmp_path / "run", HalfAlive, envs_per_worker=2, batch_size=32)
    assert evaluate(run, 7, env=HalfAlive, parallel=parallel).episodes == 7


class Drawn(Paid):
    """Shows its count as a shade of grey, in an odd size."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 12}  # noqa: RUF012

    def __init__(self, end=4, render_mode=None):
        super().__init__(end)
        self.render_mode = render_mode

    def render(self):
        return np.full((33, 47, 3), 60 * self.count, np.uint8)


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    return short_run(tmp_path_factory.mktemp("eval") / "run", Drawn)


def test_a_video_shows_each_episode_to_its_last_picture(drawn, tmp_path, caplog):
    iio = pytest.importorskip("imageio.v3")
    pytest.importorskip("imageio_ffmpeg")
    with_video = evaluate(drawn, 2, env=Drawn, video=tmp_path / "videos")
    assert with_video.returns == evaluate(drawn, 2, env=Drawn, parallel=1).returns
    assert caplog.text == "", "an odd size is nothing to warn of"
    files = sorted((tmp_path / "videos").iterdir())
    assert [file.name for file in files] == ["episode_000.mp4", "episode_001.mp4"]
    for file in files:
        assert iio.imread(file).shape[1:] == (34, 48, 3)
        shades = iio.imread(file).mean(axis=(1, 2, 3))
        np.testing.assert_allclose(shades, [0, 60, 120, 180, 240], atol=6)
        assert iio.immeta(file)["fps"] == 12


def test_environments_that_have_been_drawn_are_gone_before_the_next_one_is(drawn, tmp_path):
    """A simulation of MuJoCo that is collected later takes what the next one draws with."""
    pytest.importorskip("imageio_ffmpeg")
    shown: list[weakref.ref[gym.Env]] = []

    class InACircle(Drawn):
        def render(self):
            self.itself = self
            if all(other() is not self for other in shown):
                assert all(other() is None for other in shown)
                shown.append(weakref.ref(self))
            return super().render()

    evaluate(drawn, 3, env=InACircle, video=tmp_path / "videos", max_steps=2)
    assert len(shown) == 3


def test_a_video_stays_in_its_folder_wherever_the_environment_goes(drawn, tmp_path, monkeypatch):
    pytest.importorskip("imageio_ffmpeg")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()

    class Wandering(Drawn):
        def step(self, action):
            os.chdir(elsewhere)
            return super().step(action)

    monkeypatch.chdir(tmp_path)
    evaluate(drawn, 2, env=Wandering, video="videos")
    assert Path.cwd() == tmp_path
    assert not list(elsewhere.iterdir())
    assert len(list((tmp_path / "videos").iterdir())) == 2


def test_a_vector_environment_that_cannot_render_does_not_keep_a_video_from_being_made(tmp_path):
    iio = pytest.importorskip("imageio.v3")
    pytest.importorskip("imageio_ffmpeg")
    gym.register(
        "Drawn-v0", entry_point=Drawn, vector_entry_point=lambda num_envs: gym.vector.SyncVectorEnv([Drawn] * num_envs)
    )
    try:
        run = short_run(tmp_path / "run", "Drawn-v0", env_backend="vector")
        evaluate(run, 1, video=tmp_path / "videos")
    finally:
        gym.registry.pop("Drawn-v0")
    assert len(iio.imread(tmp_path / "videos" / "episode_000.mp4")) == 5


def test_what_a_video_needs_is_named(drawn, tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="render_mode"):
        evaluate(drawn, 1, env=Paid, video=tmp_path)
    with pytest.raises(ConfigError, match="parallel is 4"):
        evaluate(drawn, 4, env=Drawn, video=tmp_path, parallel=4)
    monkeypatch.setattr(Drawn, "render", lambda self: None)
    with pytest.raises(EnvironmentFault, match=r"render\(\) returned None"):
        evaluate(drawn, 1, env=Drawn, video=tmp_path)
    monkeypatch.setitem(sys.modules, "imageio_ffmpeg", None)
    with pytest.raises(ConfigError, match=r"\[video\]"):
        evaluate(drawn, 1, env=Drawn, video=tmp_path)


def test_a_missing_ffmpeg_is_told_before_anything_is_played(drawn, tmp_path, monkeypatch):
    imageio_ffmpeg = pytest.importorskip("imageio_ffmpeg")

    def find():
        raise RuntimeError("No ffmpeg exe could be found. Install ffmpeg on your system")

    monkeypatch.setattr(imageio_ffmpeg, "get_ffmpeg_exe", find)
    with pytest.raises(ConfigError, match="a video needs ffmpeg: No ffmpeg exe could be found"):
        evaluate(drawn, 1, env=Drawn, video=tmp_path / "videos")
    assert not (tmp_path / "videos").exists()


def test_nothing_is_left_of_a_video_for_which_the_disk_has_no_room(tmp_path, monkeypatch):
    made, place = tmp_path / "made.mp4", tmp_path / "videos" / "1.mp4"
    made.write_bytes(b"whole")
    place.parent.mkdir()

    def move(source, target):
        Path(target).write_bytes(b"who")
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "move", move)
        with pytest.raises(OSError, match="No space left"):
            move_whole(made, place)
    assert not list(place.parent.iterdir())
    move_whole(made, place)
    assert place.read_bytes() == b"whole" and not made.exists()


def test_the_run_must_fit_the_environment(counting):
    with pytest.raises(ConfigError, match=r"<Counting>.*env="):
        evaluate(counting, 1)
    with pytest.raises(ConfigError, match="observation space"):
        evaluate(counting, 1, env="CartPole-v1")
    for bad in ({"episodes": 0}, {"parallel": 0}, {"max_steps": 0}, {"seed": -1}):
        with pytest.raises(ConfigError, match=f"{next(iter(bad))} is"):
            evaluate(counting, env=Counting, **bad)


FOREIGN = """
import gymnasium
entry_point = "gymnasium.envs.classic_control.cartpole:CartPoleEnv"
gymnasium.register("Foreign-v0", entry_point=entry_point, max_episode_steps=20)
"""


def test_a_strangers_environment_is_not_imported_unasked(tmp_path, monkeypatch, capsys):
    (tmp_path / "foreign_games.py").write_text(FOREIGN)
    monkeypatch.syspath_prepend(tmp_path)
    run = str(short_run(tmp_path / "run", "foreign_games:Foreign-v0"))
    sys.modules.pop("foreign_games")
    gym.registry.pop("Foreign-v0")
    assert main(["--run", run, "--episodes", "2"]) == 2
    message = capsys.readouterr().err
    assert "--env foreign_games:Foreign-v0" in message
    assert "--trust" in message
    assert "foreign_games" not in sys.modules
    assert main(["--run", run, "--episodes", "2", "--trust"]) == 0
    assert main(["--run", run, "--episodes", "2", "--env", "foreign_games:Foreign-v0"]) == 0


def test_the_json_line_is_the_contract(cartpole, capsys):
    assert main(["--run", str(cartpole), "--episodes", "3", "--json", "--seed", "1"]) == 0
    line = capsys.readouterr().out.splitlines()[-1]
    result, sampled = evaluate(cartpole, 3, seed=1), evaluate(cartpole, 1, seed=1, deterministic=False)
    assert list(json.loads(line).items()) == [
        ("episodes", 3), ("return_mean", result.return_mean), ("return_std", result.return_std), ("length_mean",
        result.length_mean),
        ("sampled_return_mean", sampled.return_mean), ("sampled_return_std", sampled.return_std),
    ]  # fmt: skip


def test_sampled_returns_stand_beside_the_modes(tmp_path, capsys):
    def printed(*flags):
        assert main(["--run", run, "--env", "test_eval:Paid", *flags]) == 0
        return capsys.readouterr().out

    run = str(short_run(tmp_path / "run", Paid))
    favour(tmp_path / "run", category=2, by=0.5)
    values = json.loads(printed("--episodes", "400", "--json"))
    weight = np.exp(0.5)
    assert values["return_mean"] == 8.0
    assert values["sampled_return_mean"] == pytest.approx(4 * (1 + 2 * weight) / (2 + weight), abs=0.5)
    assert values["sampled_return_std"] > 1
    table = printed("--episodes", "21")
    assert "21 episodes" in table
    assert "return, sampled (10 episodes)" in table
    for flags in (["--episodes", "1", "--json"], ["--episodes", "4", "--sampled", "--json"]):
        assert list(json.loads(printed(*flags))) == ["episodes", "return_mean", "return_std", "length_mean"]


class Patient(gym.Env):
    """Ends at once with the last of fifty actions, and otherwise only after very long; pays 1 a step."""

    observation_space = spaces.Box(-1, 1, (1,))
    action_space = spaces.Discrete(50)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.count = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.count += 1
        return np.zeros(1, np.float32), 1.0, action == 49, self.count == 10**6, {}


def test_sampled_episodes_that_do_not_end_are_cut_off(tmp_path, capsys):
    run = short_run(tmp_path / "run", Patient)
    favour(run, category=49, by=0.1)
    assert main(["--run", str(run), "--env", "test_eval:Patient", "--episodes", "40", "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["return_mean"] == 1
    assert 5 < values["sampled_return_mean"] <= 10


class Interrupted(Paid):
    """Gets a signal in one of its env steps or, with 0, in a reset before them, and may raise there, as when a program
    of its own has got it, too.

    Args:
        end: Env steps of an episode.
        at: Its env steps until then, over all episodes of all environments.
    """

    steps = 0

    def __init__(self, end=4, at=9, number=signal.SIGINT, raises=""):
        super().__init__(end)
        self.at, self.number, self.raises = at, number, raises

    def reset(self, *, seed=None, options=None):
        if self.at == 0 and seed not in LOOKED_AT:
            signal.raise_signal(self.number)
        return super().reset(seed=seed, options=options)

    def step(self, action):
        Interrupted.steps += 1
        if Interrupted.steps == self.at:
            signal.raise_signal(self.number)
            if self.raises:
                raise getattr(builtins, self.raises)
        return super().step(1)


@pytest.fixture
def interrupted(tmp_path, capsys, monkeypatch):
    """Evaluates episodes in which a signal comes; gives the exit status, what is printed as JSON, and what is said."""
    run = short_run(tmp_path / "run", Paid)
    capsys.readouterr()

    def evaluate_until(*flags, **kwargs):
        monkeypatch.setattr(Interrupted, "steps", 0)
        flags = ("--env", "test_eval:Interrupted", "--env-kwargs", json.dumps(kwargs), "--json", *flags)
        status = main(["--run", str(run), *flags])
        out, said = capsys.readouterr()
        return status, json.loads(out) if out else {}, said

    return evaluate_until


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_evaluation_tells_of_the_episodes_that_had_ended(interrupted, number):
    before = signal.getsignal(number)
    status, values, said = interrupted("--parallel", "1", number=number)
    assert (status, values["episodes"], values["length_mean"], values["return_mean"]) == (128 + number, 2, 4, 4)
    assert "sampled_return_mean" not in values
    assert said == "interrupted: the episodes that had ended count\n"
    assert signal.getsignal(number) == before


@pytest.mark.parametrize("flags", [(), ("--max-steps", "1000")])
def test_where_none_had_ended_an_interrupted_evaluation_counts_episodes_as_they_stood(interrupted, flags):
    status, values, said = interrupted("--episodes", "3", *flags, end=10**9, at=21)
    assert (status, values["episodes"], values["length_mean"], values["return_mean"]) == (130, 3, 7, 7)
    assert said == "interrupted before an episode had ended: those that went on count as they stood\n"


def test_an_interrupt_among_sampled_episodes_leaves_the_others(interrupted):
    status, values, _ = interrupted("--episodes", "4", "--parallel", "1", at=4 * 4 + 5)
    assert (status, values["episodes"], values["sampled_return_mean"]) == (130, 4, 4)


def test_an_evaluation_that_is_interrupted_before_its_first_step_shows_no_figures(interrupted):
    assert interrupted("--episodes", "1", at=0) == (130, {}, "interrupted before the first env step\n")


@pytest.mark.parametrize("error", ["RuntimeError", "KeyboardInterrupt"])
def test_what_an_interrupt_does_to_an_environment_is_no_fault_of_it(interrupted, error):
    """Gymnasium's AsyncVectorEnv raises what its workers do."""
    assert interrupted("--parallel", "1", raises=error) == interrupted("--parallel", "1")


def test_a_second_interrupt_ends_an_evaluation_that_hangs(interrupted, monkeypatch):
    def step(self, action):
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Interrupted, "step", step)
    assert interrupted()[:2] == (130, {})


def test_the_start_of_a_run_its_summary_and_evaluation_name_the_protocol(tmp_path, capsys):
    pytest.importorskip("ale_py")
    run = short_run(tmp_path / "run", "BreakoutNoFrameskip-v4", log=LogConfig(display="plain", tensorboard=False))
    protocol = "classic (no sticky actions, a lost life ends an episode of the learner)"
    assert f"protocol {protocol}" in capsys.readouterr().out
    assert json.loads((run / "summary.json").read_text())["protocol"] == protocol
    assert main(["--run", str(run), "--episodes", "1", "--max-steps", "5", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["protocol"] == protocol
    assert main(["--run", str(run), "--episodes", "1", "--max-steps", "5"]) == 0
    assert "protocol classic" in capsys.readouterr().out


def test_flags_reach_the_evaluation(tmp_path, capsys):
    def answer(*flags):
        assert main(["--run", run, "--episodes", "3", "--json", *flags]) == 0
        return json.loads(capsys.readouterr().out)

    run = str(short_run(tmp_path / "run", "CartPole-v1"))
    favour(tmp_path / "run", category=0, by=0.5, episode_return=2.0)
    favour(tmp_path / "run", category=1, by=0.1, episode_return=1.0)
    assert answer()["return_mean"] == evaluate(run, 3).return_mean
    assert answer("--best")["return_mean"] == evaluate(run, 3, checkpoint="best").return_mean != answer()["return_mean"]
    assert (
        answer("--sampled")["return_mean"]
        == evaluate(run, 3, deterministic=False).return_mean
        != answer()["return_mean"]
    )
    assert answer("--env-kwargs", "{max_episode_steps: 3}")["length_mean"] == 3
    assert answer("--parallel", "2", "--max-steps", "4")["length_mean"] == 4


def test_keyword_arguments_that_are_no_mapping_are_told_with_an_example(cartpole, capsys):
    with pytest.raises(SystemExit):
        main(["--run", str(cartpole), "--env-kwargs", "3"])
    said = " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert "--env-kwargs: '3' is not a mapping; write for example '{max_episode_steps: 100}' " in said


def test_a_kept_evaluation_is_json_also_where_a_number_is_none(tmp_path):
    short_run(tmp_path / "run", "CartPole-v1")
    infinite = Evaluation(2, np.inf, np.nan, 1.0, np.inf, 3.0, (1.0, np.inf), (3, 3), {"speed": np.nan, "fuel": 2.0})
    infinite.keep(tmp_path / "run", "latest", 64)

    def refuse(constant):
        raise ValueError(constant)

    text = (tmp_path / "run" / "evaluation.json").read_text()
    values = json.loads(text, parse_constant=refuse)
    assert values["return_mean"] is None and values["return_std"] is None and values["length_mean"] == 3.0
    assert values["returns"] == [1.0, None] and values["extras"] == {"speed": None, "fuel": 2.0}
    assert "from 1 to nan" in write_page(tmp_path / "run").read_text()


def test_people_get_a_table(cartpole, capsys):
    assert main(["--run", str(cartpole), "--episodes", "3"]) == 0
    table = capsys.readouterr().out
    assert "3 episodes" in table
    assert "return" in table


def test_exit_statuses_tell_a_wrong_folder_from_a_damaged_one(tmp_path, capsys):
    assert main(["--run", str(tmp_path / "nowhere")]) == 2
    assert "holds no run" in capsys.readouterr().err
    run = short_run(tmp_path / "run", "CartPole-v1")
    checkpoints = list((run / "checkpoints").glob("*.safetensors"))
    for path in checkpoints:
        path.write_bytes(b"torn")
    assert main(["--run", str(run)]) == 1
    assert "can be read" in capsys.readouterr().err
    for path in (run / "checkpoints").iterdir():
        path.unlink()
    assert main(["--run", str(run)]) == 2
    assert "no checkpoint" in capsys.readouterr().err
    values = yaml.safe_load((run / "config.yaml").read_text())
    (run / "config.yaml").write_text(yaml.safe_dump(values | {"colour": 1}))
    assert main(["--run", str(run)]) == 2
    assert "colour" in capsys.readouterr().err
    with pytest.raises(SystemExit) as stop:
        main(["--run", str(run), "--episode", "3"])
    assert stop.value.code == 2
