"""Vector environments: the same episodes in every autoreset mode, seeds, masks, extras, and mistakes."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import gymnasium
import numpy as np
import pytest
from counting import OBSERVATION, Counting, episodes_by_hand, episodes_of, extras_of
from gymnasium import spaces
from gymnasium.envs.classic_control import CartPoleEnv
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv
from gymnasium.vector.utils import batch_space
from playing import Play

from sfactory import Config, evaluate, train
from sfactory.config import resolve
from sfactory.envs import EnvRequest, Finals, Outcome, StepBuffers, env_seed, general
from sfactory.envs.factory import make_environments
from sfactory.envs.families.vector import VectorGroup
from sfactory.envs.interface import EnvSpec, Group
from sfactory.envs.observations import new_step_buffers
from sfactory.errors import ConfigError, EnvironmentFault
from sfactory.runtime.planning import make_plan

MODES = list(AutoresetMode)


def counting_vector(num_envs: int, mode: AutoresetMode) -> SyncVectorEnv:
    return SyncVectorEnv([Counting] * num_envs, autoreset_mode=mode)


def group_of(env: Any, count: int, first_index: int = 0, **kwargs: Any) -> tuple[EnvSpec, Group]:
    wanted = EnvRequest(env, kwargs)
    spec = general.probe(wanted)
    return spec, general.make_group(wanted, spec, count, first_index, seed=3)


@pytest.mark.parametrize("mode", MODES)
def test_every_autoreset_mode_plays_the_episodes_of_the_environment_alone(mode: AutoresetMode):
    spec, group = group_of(counting_vector, 6, mode=mode)
    for row, episodes in enumerate(episodes_of(group, spec, 80)):
        assert len(episodes) > 12
        assert any(e.terminated for e in episodes)
        assert not all(e.terminated for e in episodes)
        assert episodes == episodes_by_hand(Counting(), env_seed(3, row), len(episodes))


@pytest.mark.parametrize("mode", MODES)
def test_episodes_do_not_depend_on_how_environments_are_grouped(mode: AutoresetMode):
    spec, whole = group_of(counting_vector, 4, mode=mode)
    _, head = group_of(counting_vector, 1, mode=mode)
    _, tail = group_of(counting_vector, 3, first_index=1, mode=mode)
    assert episodes_of(whole, spec, 30) == episodes_of(head, spec, 30) + episodes_of(tail, spec, 30)


@pytest.mark.parametrize("mode", MODES)
def test_numbers_in_the_last_info_become_extras(mode: AutoresetMode):
    spec, group = group_of(counting_vector, 3, mode=mode)
    done = episodes_of(group, spec, 20)
    assert sorted(group.extras, key=lambda extra: extra["score"]) == extras_of(done)


class Nested(gymnasium.Env):
    """Dict and Tuple observations with a mask; each episode is truncated after two or three steps, by the seed."""

    observation_space = spaces.Dict(
        {"a": spaces.Box(-9, 9, (2,)), "b": spaces.Tuple((spaces.Discrete(9, start=3),)), "text": spaces.Text(3)}
    )
    action_space = spaces.MultiDiscrete([2, 3])

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        self.length = self.length if seed is None else 2 + seed % 2
        self.count = 0
        return self._see()

    def step(self, action: np.ndarray) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert self.action_space.contains(action)
        self.count += 1
        obs, info = self._see()
        return obs, 1.0, False, self.count == self.length, info

    def _see(self) -> tuple[Any, dict[str, Any]]:
        mask = np.array([1, 1, self.count == 0, self.count == 1, self.count == 2], np.int8)
        return {"a": np.full(2, self.count, np.float32), "b": (3 + self.count,), "text": "hi"}, {"action_mask": mask}


def nested_vector(num_envs: int, mode: AutoresetMode) -> SyncVectorEnv:
    return SyncVectorEnv([Nested] * num_envs, autoreset_mode=mode)


def play(spec: EnvSpec, group: Group, steps: int) -> list[tuple[StepBuffers, Finals | None]]:
    frames = [new_step_buffers(spec, group.rows) for _ in range(steps + 1)]
    outcome = Outcome(np.zeros(group.rows, np.float32), np.zeros(group.rows, bool), np.zeros(group.rows, bool))
    group.reset(frames[0])
    finals = []
    for frame in frames[1:]:
        group.step(
            np.zeros((group.rows, len(spec.action.sizes)), np.int32),
            np.zeros((group.rows, 0), np.float32),
            outcome,
            frame,
        )
        finals.append(group.finals)
    return list(zip(frames, [None, *finals], strict=True))


@pytest.mark.parametrize("mode", MODES)
def test_nested_observations_and_masks(mode: AutoresetMode):
    spec, group = group_of(nested_vector, 2, mode=mode)
    assert spec.masked
    assert [leaf.name for leaf in spec.observation.leaves] == ["obs/a", "obs/b/0"]
    lengths = [2 + env_seed(3, row) % 2 for row in range(2)]
    assert sorted(lengths) == [2, 3]
    rests = mode is AutoresetMode.NEXT_STEP
    for number, (frame, finals) in enumerate(play(spec, group, 8)):
        ending = [length for length in lengths if number and not rests and number % length == 0]
        for row, length in enumerate(lengths):
            shown = number % (length + 1 if rests else length)
            assert frame.obs[0][row].tolist() == [shown] * 2
            assert frame.obs[1][row] == shown
            allowed = [True, True, shown == 0, shown == 1, shown == 2]
            assert frame.mask[row].tolist() == (allowed if shown < length else [True] * 5)
        if ending:
            assert finals.rows.tolist() == [row for row, length in enumerate(lengths) if length in ending]
            assert finals.obs[0][:, 0].tolist() == finals.obs[1].tolist() == [lengths[row] for row in finals.rows]
        else:
            assert finals is None


class Arrays(VectorEnv):
    """Written in NumPy: one random stream, infos without presence masks, batched final observations."""

    metadata: ClassVar[dict[str, Any]] = {"autoreset_mode": AutoresetMode.SAME_STEP}

    def __init__(self, num_envs: int = 1, bad: str = "") -> None:
        self.num_envs, self.bad = num_envs, bad
        self.single_observation_space, self.single_action_space = OBSERVATION, spaces.Discrete(2)
        self.seeds: list[Any] = []

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        super().reset(seed=seed)  # refuses a list
        self.seeds.append(seed)
        self.count = np.zeros(self.num_envs)
        return self._see(), {}

    def step(self, actions: np.ndarray) -> Any:
        if self.bad == "raise":
            raise ValueError("nothing goes")
        self.count += 1
        over = self.count == 2 + np.arange(self.num_envs)
        info = (
            {"final_obs": np.where(over[:, None], self._see(), np.nan), "final_info": {"score": self.count.copy()}}
            if over.any()
            else {}
        )
        if self.bad == "dicts" and over.any():
            told = [{"score": n, "at": np.ones(2)} if n > 1 else None for n in self.count]
            info["final_info"] = np.array(told, object)
        self.count[over] = 0
        terminated = over & (np.arange(self.num_envs) == 0)
        reward = np.ones(3 if self.bad == "reward" else self.num_envs)
        if self.bad == "final":
            info.pop("final_obs", None)
        obs = self._see()
        if self.bad == "nan":
            obs[1, 2] = np.nan
        if self.bad == "four":
            return obs, reward, terminated, info
        return (obs[:, :1] if self.bad == "shape" else obs), reward, terminated, over, info

    def _see(self) -> np.ndarray:
        return np.repeat(self.count[:, None], 4, axis=1)


@pytest.mark.parametrize("bad", ["", "dicts"])
def test_last_infos_come_batched_or_as_one_dict_for_each_row(bad: str):
    spec, group = group_of(Arrays, 3, bad=bad)
    play(spec, group, 4)
    assert group.extras == [{"score": 2.0}, {"score": 3.0}, {"score": 2.0}, {"score": 4.0}]


def test_a_vector_environment_with_one_random_stream_gets_one_seed():
    _, group = group_of(Arrays, 3, first_index=5)
    group.reset(new_step_buffers(general.probe(EnvRequest(Arrays, {})), 3))
    assert group._env.seeds == [env_seed(3, 5)]


def test_batched_finals_are_those_of_truncated_rows_only():
    spec, group = group_of(Arrays, 3)
    seen = play(spec, group, 4)
    assert [None if finals is None else finals.rows.tolist() for _, finals in seen] == [None, None, None, [1], [2]]
    assert seen[3][1].obs[0].tolist() == [[3.0] * 4]
    assert group.extras == [{"score": 2.0}, {"score": 3.0}, {"score": 2.0}, {"score": 4.0}]


@pytest.mark.parametrize(
    ("bad", "parts"),
    [
        ("raise", ["vector environment 10 to 12 (Arrays)", "step()", "nothing goes", "Traceback"]),
        ("reward", ["vector environment 10 to 12", "arrays of 3 entries"]),
        ("four", ["vector environment 10 to 12 (Arrays): step() returned (array", "it must return the five values"]),
        ("final", ["environment 11", "final_obs"]),
        ("nan", ["environment 11", "nan at [2]"]),
        ("shape", ["(3, 1)", "(3, 4)"]),
    ],
)
def test_faults_name_the_environment_and_the_value(bad: str, parts: list[str]):
    spec, group = group_of(Arrays, 4 if bad == "reward" else 3, first_index=10, bad=bad)
    with pytest.raises(EnvironmentFault) as caught:
        play(spec, group, 4)
    for part in parts:
        assert part.replace("10 to 12", "10 to 13" if bad == "reward" else "10 to 12").replace("of 3", "of 4") in str(
            caught.value
        )


def test_what_the_step_of_an_autoreset_returns_does_not_count():
    class Noisy(Arrays):
        metadata: ClassVar[dict[str, Any]] = {"autoreset_mode": AutoresetMode.NEXT_STEP}

        def step(self, actions: np.ndarray) -> Any:
            self.count += 1
            flags = np.ones(self.num_envs, bool)
            return self._see(), np.full(self.num_envs, 7.0), flags, ~flags, {}

    spec, group = group_of(Noisy, 2)
    play(spec, group, 1)
    outcome = Outcome(np.ones(2, np.float32), np.ones(2, bool), np.ones(2, bool))
    group.step(np.zeros((2, 1), np.int32), np.zeros((2, 0), np.float32), outcome, new_step_buffers(spec, 2))
    assert not any(array.any() for array in outcome)


def test_a_fixed_number_of_environments_must_be_that_of_a_group():
    _spec, group = group_of(lambda: Arrays(4), 4)
    assert group.rows == 4
    with pytest.raises(ConfigError, match="num_envs 4, but a group has 3"):
        group_of(lambda: Arrays(4), 3)


def test_an_unknown_autoreset_mode_is_refused():
    class Unsaid(Arrays):
        metadata: ClassVar[dict[str, Any]] = {}

    with pytest.raises(ConfigError, match=r"autoreset_mode.*AutoresetMode\.NEXT_STEP"):
        general.probe(EnvRequest(Unsaid, {}))


def test_a_vector_environment_without_the_spaces_of_one_environment_is_told_which_is_missing():
    class Batched(Arrays):
        def __init__(self, num_envs: int = 1) -> None:
            super().__init__(num_envs)
            self.observation_space = spaces.Box(-np.inf, np.inf, (num_envs, 4))
            del self.single_observation_space

    with pytest.raises(ConfigError, match="Batched: single_observation_space is None; it must be"):
        general.probe(EnvRequest(Batched, {}))


def numbered(num_envs: int = 1) -> SyncVectorEnv:
    return counting_vector(num_envs, AutoresetMode.SAME_STEP)


@pytest.mark.parametrize(
    ("env", "told"), [("CartPole-v1", "out, and set envs_per_worker"), (numbered, "leave it out of env_kwargs")]
)
def test_a_number_of_environments_in_env_kwargs_is_told(env: Any, told: str):
    with pytest.raises(ConfigError, match=told):
        make_environments(EnvRequest(env, {"num_envs": 3}), 2)


def test_an_environment_that_takes_a_device_and_speaks_numpy_is_given_numpys_actions():
    class Simulator(Arrays):
        def __init__(self, num_envs: int = 1, device: str = "cuda") -> None:
            super().__init__(num_envs)
            self.observation_space = batch_space(self.single_observation_space, num_envs)
            self.action_space = batch_space(self.single_action_space, num_envs)

        def step(self, actions: np.ndarray) -> Any:
            assert isinstance(actions, np.ndarray)
            return super().step(actions)

    with Play(Simulator, 3) as playing:
        assert playing.spec.family == "vector"
        assert playing.step(np.zeros(3)).reward.tolist() == [1.0] * 3


def test_the_own_vector_environment_of_an_id():
    wanted = EnvRequest("CartPole-v1", {}, backend="vector")
    spec = general.probe(wanted)
    group = general.make_group(wanted, spec, 5, 0, 0)
    assert group.rows == 5
    assert isinstance(group._env.unwrapped, VectorEnv)
    frames = play(spec, group, 60)
    assert any(not frame.active.all() for frame, _ in frames)
    with pytest.raises(ConfigError, match="gravty"):
        general.probe(EnvRequest("CartPole-v1", {"gravty": 1}, backend="vector"))


@pytest.mark.parametrize("backend", ["auto", "vector"])
def test_a_vector_environment_knows_gymnasiums_word_for_no_limit(backend: str):
    with Play("CartPole-v1", 2, {"max_episode_steps": -1}, backend=backend) as playing:
        assert isinstance(playing.group, VectorGroup)
        assert not playing.step(np.zeros(2)).truncated.any()


@pytest.mark.parametrize(
    ("env", "kwargs", "render_mode", "backend", "vector"),
    [
        ("CartPole-v1", {}, None, "auto", True),
        ("CartPole-v1", {"sutton_barto_reward": True}, None, "auto", True),
        ("CartPole-v1", {"max_episode_steps": 7}, None, "auto", True),
        ("CartPole-v1", {}, None, "gymnasium", False),
        ("CartPole-v1", {}, "rgb_array", "auto", False),
        ("sfactory-tests/Unlimited-v0", {}, None, "auto", False),
        ("Pendulum-v1", {}, None, "auto", False),
    ],
)
def test_auto_takes_an_ids_own_vector_environment_where_it_serves(env, kwargs, render_mode, backend, vector):
    gymnasium.register(
        "sfactory-tests/Unlimited-v0", CartPoleEnv, max_episode_steps=9, vector_entry_point=lambda num_envs: None
    )
    try:
        made = make_environments(EnvRequest(env, kwargs, render_mode=render_mode, backend=backend), 3)
    finally:
        del gymnasium.registry["sfactory-tests/Unlimited-v0"]
    assert isinstance(made[0], VectorEnv) == vector
    assert len(made) == (1 if vector else 3)
    assert not vector or made[0].num_envs == 3
    for one in made:
        one.close()


def seven() -> SyncVectorEnv:
    return numbered(7)


def usually_forty(num_envs: int = 40) -> SyncVectorEnv:
    return numbered(num_envs)


@pytest.mark.parametrize(
    ("env", "kwargs", "rows"),
    [
        (seven, {}, 7),
        (partial(numbered, 7), {}, 7),
        (partial(usually_forty, num_envs=7), {}, None),
        (usually_forty, {}, 40),
        (numbered, {"num_envs": 7}, 7),
        (numbered, {}, None),
        ("CartPole-v1", {}, None),
    ],
)
def test_a_vector_environment_says_how_many_environments_it_has_by_itself(env: Any, kwargs: dict, rows: int | None):
    assert general.probe(EnvRequest(env, kwargs)).own_rows == rows


@pytest.mark.parametrize("cores", [2, 16])
def test_a_run_has_as_many_environments_in_a_group_as_a_vector_environment_has(cores: int, monkeypatch):
    monkeypatch.setattr("sfactory.config.devices.cores", lambda: cores)
    config = make_plan(resolve(Config(env=seven))).config
    assert config.envs_per_worker == 14 and config.batch_size % (7 * config.rollout) == 0
    assert config.workers == (1 if cores == 2 else 2)  # near the preset's 32 environments
    assert make_plan(resolve(Config(env=usually_forty))).config.envs_per_worker == 80
    assert make_plan(resolve(Config(env=usually_forty, envs_per_worker=6))).config.envs_per_worker == 6
    assert make_plan(resolve(Config(env=seven, workers=3))).config.workers == 3


def test_every_worker_has_as_many_environments_as_somebody_gives_it(monkeypatch):
    monkeypatch.setattr("sfactory.config.devices.cores", lambda: 16)
    for env in (usually_forty, numbered):
        assert make_plan(resolve(Config(env=env, envs_per_worker=6))).config.workers == 14


@pytest.mark.parametrize(
    ("env", "kwargs", "remedy"),
    [(seven, {}, "let the callable take num_envs"), (numbered, {"num_envs": 7}, "leave it out of env_kwargs")],
)
def test_another_number_than_a_vector_environment_always_has_is_told_before_the_start(env: Any, kwargs: dict, remedy):
    with pytest.raises(ConfigError, match=f"num_envs 7, but a group has 12 .*{remedy}"):
        make_plan(resolve(Config(env=env, env_kwargs=kwargs, envs_per_worker=24)))
    assert make_plan(resolve(Config(env=env, env_kwargs=kwargs, envs_per_worker=14))).config.envs_per_group == 7


@pytest.mark.parametrize("parallel", [None, 2, 16])
def test_what_a_vector_environment_has_by_itself_is_trained_and_evaluated(parallel: int | None, tmp_path: Path):
    config = Config(env=seven, steps=2000, run=str(tmp_path / "run"), serial=True)
    assert train(config).status == "completed"
    assert evaluate(tmp_path / "run", 5, env=seven, parallel=parallel).episodes == 5
    assert evaluate(tmp_path / "run", 16, env=seven, parallel=parallel, max_steps=2).episodes == 16
