"""Single environments in a group: episodes, seeds, what is written where, and what a user is told about a mistake."""

from __future__ import annotations

import signal
import sys
import types
import warnings
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from counting import OBSERVATION, Counting, episodes_by_hand, episodes_of, extras_of
from environments import Careless
from faults import Panic
from gymnasium import spaces

from sfactory.envs import EnvRequest, Outcome, env_seed, general, make_group, probe, register_env, registry, resolve_env
from sfactory.envs.factory import make_environments
from sfactory.envs.interface import EnvSpec, Group
from sfactory.envs.observations import ObservationWriter, new_step_buffers
from sfactory.errors import ConfigError, EnvironmentFault
from sfactory.runtime.interrupts import handling
from sfactory.spaces import Reading


def request(env: Any, **kwargs: Any) -> EnvRequest:
    return EnvRequest(env, kwargs)


def group_of(env: Any, count: int = 1, first_index: int = 0, seed: int = 3, **kwargs: Any) -> tuple[EnvSpec, Group]:
    spec = general.probe(request(env, **kwargs))
    return spec, general.make_group(request(env, **kwargs), spec, count, first_index, seed)


class Scripted(gymnasium.Env):
    """Returns what it is told to: `results` are its step results, `first` its reset result."""

    def __init__(
        self,
        results: list[Any] | None = None,
        first: Any = None,
        observation_space: Any = OBSERVATION,
        action_space: Any = None,
    ) -> None:
        self.observation_space = observation_space
        self.action_space = action_space or spaces.Discrete(2)
        self.results = list(results or [])
        self.first = (np.zeros(4, np.float32), {}) if first is None else first
        self.actions: list[Any] = []
        self.closed = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return self.first

    def step(self, action: Any) -> Any:
        self.actions.append(action)
        result = self.results.pop(0)
        if isinstance(result, Exception):
            raise result
        return result

    def close(self) -> None:
        self.closed += 1


def step(group: Group, spec: EnvSpec, categorical: Any = None, continuous: Any = None) -> tuple[Any, Outcome]:
    rows = group.rows
    outcome = Outcome(np.full(rows, 9, np.float32), np.ones(rows, bool), np.ones(rows, bool))
    after = new_step_buffers(spec, rows)
    sizes = len(spec.action.sizes)
    group.step(
        np.zeros((rows, sizes), np.int32) if categorical is None else np.array(categorical, np.int32),
        np.zeros((rows, spec.action.continuous), np.float32)
        if continuous is None
        else np.array(continuous, np.float32),
        outcome,
        after,
    )
    return after, outcome


def fault(first: Any = None, results: list[Any] | None = None, **kwargs: Any) -> str:
    """The message of the fault that a scripted environment brings about in its first step."""
    spec, group = group_of(Scripted, first_index=4, results=results, first=first, **kwargs)
    group.reset(new_step_buffers(spec, 1))
    with pytest.raises(EnvironmentFault) as caught:
        step(group, spec)
    return str(caught.value)


def test_group_plays_the_episodes_of_the_environment_alone():
    spec, group = group_of(Counting, count=6)
    for row, episodes in enumerate(episodes_of(group, spec, 80)):
        assert len(episodes) > 12
        assert any(e.terminated for e in episodes)
        assert not all(e.terminated for e in episodes)
        assert episodes == episodes_by_hand(Counting(), env_seed(3, row), len(episodes))


def test_truncated_row_rests_once_and_terminated_row_does_not():
    ob = [np.full(4, value, np.float32) for value in range(5)]
    results = [(ob[1], 1.0, False, False, {}), (ob[2], 1.0, False, True, {}), (ob[3], 1.0, True, True, {})]
    spec, group = group_of(Scripted, results=results)
    group.reset(new_step_buffers(spec, 1))
    seen = []
    for _ in range(4):
        after, outcome = step(group, spec)
        seen.append(
            (
                after.obs[0][0, 0],
                *(bool(x[0]) for x in (after.first, after.active, outcome.terminated, outcome.truncated)),
            )
        )
    # observation, first, active, terminated, truncated
    assert seen == [
        (1.0, False, True, False, False),
        (2.0, False, False, False, True),  # final observation
        (0.0, True, True, False, False),  # the rest: a reset in place of a step
        (0.0, True, True, True, False),  # both flags: a termination
    ]


def test_time_limit_of_a_registered_id_truncates():
    spec, group = group_of("CartPole-v1", max_episode_steps=3)
    group.reset(new_step_buffers(spec, 1))
    outcomes = [step(group, spec, [[number % 2]])[1] for number in range(3)]
    assert [bool(o.truncated[0]) for o in outcomes] == [False, False, True]
    assert not any(o.terminated[0] for o in outcomes)


def test_episodes_do_not_depend_on_how_environments_are_grouped():
    spec, whole = group_of(Counting, count=5)
    _, head = group_of(Counting, count=2)
    _, tail = group_of(Counting, count=3, first_index=2)
    assert episodes_of(whole, spec, 40) == episodes_of(head, spec, 40) + episodes_of(tail, spec, 40)


def test_seeds_are_unique_in_a_run_and_differ_between_runs():
    seeds = [env_seed(7, index) for index in range(5000)]
    assert len(set(seeds)) == 5000
    assert all(0 <= s < 2**31 for s in seeds)
    assert not set(seeds) & {env_seed(8, index) for index in range(5000)}


def test_reset_again_replays_the_same_episodes():
    spec, group = group_of(Counting, count=3)
    assert episodes_of(group, spec, 30) == episodes_of(group, spec, 30)


def test_nested_observations_land_in_their_leaves():
    space = spaces.Dict(
        {
            "screen": spaces.Box(0, 255, (8, 8, 3), np.uint8),
            "inner": spaces.Tuple((spaces.Discrete(3, start=5), spaces.MultiDiscrete([4, 4], start=[1, 0]))),
            "bits": spaces.MultiBinary(3),
            "height": spaces.Box(0, 1, (), np.float64),
            "mission": spaces.Text(5),
        }
    )

    def value(number: int) -> dict[str, Any]:
        return {
            "screen": np.full((8, 8, 3), 200 + number, np.uint8),
            "inner": (5 + number, np.array([2, number])),
            "bits": np.array([1, 0, number % 2], np.int8),
            "height": np.float64(number / 4),
            "mission": "go",
        }

    results = [(value(1), 0.0, False, False, {}), (value(2), 0.0, False, True, {})]
    spec, group = group_of(Scripted, count=3, first=(value(0), {}), results=results, observation_space=space)
    frame = new_step_buffers(spec, 3)
    group.reset(frame)
    for number, got in enumerate([frame, step(group, spec)[0], step(group, spec)[0]]):
        leaves = {leaf.name: array for leaf, array in zip(spec.observation.leaves, got.obs, strict=True)}
        assert set(leaves) == {"obs/screen", "obs/inner/0", "obs/inner/1", "obs/bits", "obs/height"}
        assert (leaves["obs/screen"] == 200 + number).all()
        assert leaves["obs/screen"].dtype == np.uint8
        assert leaves["obs/inner/0"].tolist() == [number] * 3
        assert leaves["obs/inner/1"].tolist() == [[1, number]] * 3
        assert leaves["obs/bits"].tolist() == [[1, 0, number % 2]] * 3
        assert leaves["obs/height"].tolist() == [number / 4] * 3


def test_writes_into_views_of_a_slot_only():
    spec, group = group_of(Counting, count=2)
    slot = np.full((3, 2, 4), -5, np.float32)
    frame = new_step_buffers(spec, 2)._replace(obs=(slot[1],))
    group.reset(frame)
    assert (slot[0] == -5).all()
    assert (slot[2] == -5).all()
    assert (slot[1, :, 2] == 0).all()


def test_actions_arrive_in_the_form_of_the_space():
    still = (np.zeros(4, np.float32), 0.0, False, False, {})
    spec, group = group_of(Scripted, results=[still], action_space=spaces.Discrete(3, start=-1))
    group.reset(new_step_buffers(spec, 1))
    step(group, spec, [[2]])
    assert group._envs[0].actions == [1]
    assert type(group._envs[0].actions[0]) is int

    pair = spaces.Tuple((spaces.Discrete(2), spaces.Box(-2, 4, (2,))))
    spec, group = group_of(Scripted, results=[still], action_space=pair)
    group.reset(new_step_buffers(spec, 1))
    step(group, spec, [[1]], [[0.0, 9.0]])
    category, box = group._envs[0].actions[0]
    assert category == 1
    assert box.tolist() == [1.0, 4.0]
    assert pair.contains((int(category), box))


@pytest.mark.parametrize("where", ["info", "observation"])
def test_action_masks_of_info_and_of_observations(where: str):
    allowed = [np.array(bits, np.int8) for bits in ([1, 0, 0], [0, 1, 1], [0, 0, 0], [1, 1, 0])]

    def seen(number: int) -> tuple[Any, dict[str, Any]]:
        obs = np.full(4, number, np.float32)
        return (
            (obs, {"action_mask": allowed[number]})
            if where == "info"
            else ({"x": obs, "action_mask": allowed[number]}, {})
        )

    space = OBSERVATION if where == "info" else spaces.Dict({"x": OBSERVATION, "action_mask": spaces.MultiBinary(3)})
    ends = [(1, False, False), (2, False, True), (3, False, False)]
    results = [(seen(n)[0], 0.0, term, trunc, seen(n)[1]) for n, term, trunc in ends]
    spec, group = group_of(
        Scripted, results=results, first=seen(0), observation_space=space, action_space=spaces.Discrete(3)
    )
    assert spec.masked
    assert len(spec.observation.leaves) == 1
    frame = new_step_buffers(spec, 1)
    group.reset(frame)
    masks = [frame.mask[0].tolist(), *(step(group, spec)[0].mask[0].tolist() for _ in range(4))]
    resting = [True] * 3  # a finished game allows nothing; the resting row must not break the softmax
    assert masks == [[True, False, False], [False, True, True], resting, [True, False, False], [True, True, False]]


def test_numbers_in_the_last_info_become_extras():
    spec, group = group_of(Counting, count=2)
    done = episodes_of(group, spec, 20)
    assert sorted(group.extras, key=lambda extra: extra["score"]) == extras_of(done)


def test_close_closes_every_environment_once():
    _spec, group = group_of(Scripted, count=2)
    envs = list(group._envs)
    group.close()
    group.close()
    assert [env.closed for env in envs] == [1, 1]


class Raises(Counting):
    """Raises something when it is stepped or closed."""

    def __init__(self, error: BaseException, close: bool = False) -> None:
        super().__init__()
        self.error, self.closes = error, not close

    def step(self, action: Any) -> Any:
        raise self.error

    def close(self) -> None:
        if not self.closes:
            raise self.error


@pytest.mark.parametrize("error", [Panic(), GeneratorExit(), SystemExit(), KeyboardInterrupt()], ids=repr)
def test_what_is_no_exception_is_a_fault_too_and_ctrl_c_is_none(error: BaseException):
    spec, group = group_of(Raises, error=error)
    group.reset(new_step_buffers(spec, 1))
    with handling({signal.SIGINT: signal.SIG_IGN}), pytest.raises(EnvironmentFault, match=r"raised .* in step"):
        episodes_of(group, spec, 1)
    expected = type(error) if isinstance(error, KeyboardInterrupt) else EnvironmentFault
    with handling({signal.SIGINT: signal.default_int_handler}), pytest.raises(expected):
        episodes_of(group, spec, 1)


def test_an_environment_is_closed_whatever_it_raises_but_for_ctrl_c():
    probe(request(Raises, error=Panic(), close=True))
    with handling({signal.SIGINT: signal.SIG_IGN}):
        probe(request(Raises, error=KeyboardInterrupt(), close=True))
    with handling({signal.SIGINT: signal.default_int_handler}), pytest.raises(KeyboardInterrupt):
        probe(request(Raises, error=KeyboardInterrupt(), close=True))


def test_render_gives_one_frame_per_environment():
    pytest.importorskip("pygame")
    wanted = EnvRequest("CartPole-v1", {}, render_mode="rgb_array")
    group = general.make_group(wanted, general.probe(wanted), 2, 0, 0)
    group.reset(new_step_buffers(general.probe(wanted), 2))
    frames = group.render()
    assert len(frames) == 2
    assert frames[0].dtype == np.uint8
    assert frames[0].ndim == 3
    group.close()


GOOD = np.zeros(4, np.float32)


@pytest.mark.parametrize(
    ("result", "parts"),
    [
        (ZeroDivisionError("oh"), ["step(0)", "ZeroDivisionError: oh", "in step"]),
        ((GOOD, 0.0, False, {}), ["tuple of 4", "observation, reward, terminated, truncated, info"]),
        (None, ["returned None"]),
        ((np.zeros(1, np.float32), 0.0, False, False, {}), ["shape (1,)", "(4,)"]),
        ((np.zeros((4, 1), np.float32), 0.0, False, False, {}), ["shape (4, 1)", "(4,)"]),
        ((np.array([0, np.nan, 0, 0]), 0.0, False, False, {}), ["nan at [1]", "finite"]),
        ((np.array([0, 0, -np.inf, 0]), 0.0, False, False, {}), ["-inf at [2]"]),
        ((np.array(["a"] * 4), 0.0, False, False, {}), ["dtype <U1", "float32"]),
        ((GOOD, float("nan"), False, False, {}), ["reward is nan"]),
        ((GOOD, np.zeros(2), False, False, {}), ["as reward", "one number"]),
        ((GOOD, None, False, False, {}), ["returned None as reward", "one number"]),
        ((GOOD, 0.0, False, False, {"action_mask": np.ones(2)}), ["info has an action_mask", "give it at reset() too"]),
    ],
)
def test_faults_of_step_name_the_environment_and_the_value(result: Any, parts: list[str]):
    message = fault(results=[result])
    for part in ["environment 4 (Scripted)", *parts]:
        assert part in message


def test_fault_in_a_later_reset_names_the_environment():
    class Once(Scripted):
        resets = 0

        def reset(self, **kwargs: Any) -> Any:
            self.resets += 1
            if self.resets > 1:
                raise RuntimeError("only once")
            return super().reset(**kwargs)

    envs = [Once([(GOOD, 0.0, row == 1, False, {})]) for row in range(2)]
    spec = general.probe(request(Scripted))
    group = general.make_group(request(lambda: envs.pop(0)), spec, 2, 8, 0)
    group.reset(new_step_buffers(spec, 2))
    with pytest.raises(EnvironmentFault, match=r"environment 9 .*reset\(\).*only once"):
        step(group, spec)


def test_the_second_environment_is_named_when_it_alone_is_wrong():
    envs = [Scripted([(GOOD, 0.0, False, False, {})]), Scripted([(np.zeros(3, np.float32), 0.0, False, False, {})])]
    spec = general.probe(request(Scripted))
    group = general.make_group(request(lambda: envs.pop(0)), spec, 2, 0, 0)
    group.reset(new_step_buffers(spec, 2))
    with pytest.raises(EnvironmentFault, match=r"environment 1 .*shape \(3,\)"):
        step(group, spec)


def test_float_image_for_a_byte_space_is_a_fault():
    image = spaces.Box(0, 255, (8, 8, 3), np.uint8)
    bad = (np.full((8, 8, 3), 0.5, np.float32), 0.0, False, False, {})
    assert "dtype float32" in fault(first=(np.zeros((8, 8, 3), np.uint8), {}), results=[bad], observation_space=image)


def test_category_outside_its_space_is_a_fault():
    message = fault(first=(2, {}), results=[(5, 0.0, False, False, {})], observation_space=spaces.Discrete(3, start=2))
    assert "obs is 5" in message


@pytest.mark.parametrize(
    "space",
    [spaces.Box(0, 255, (4,), np.uint8), spaces.Box(0, 3, (4,), np.uint8), spaces.Box(0, 255, (2, 2), np.uint8)],
    ids=str,
)
def test_each_environment_may_return_a_dtype_of_its_own(space: spaces.Box):
    values = [np.arange(4).reshape(space.shape).astype(dtype) for dtype in (np.uint8, np.int64, np.int32, bool)]
    spec, _ = group_of(Scripted, observation_space=space, first=(values[0], {}))
    (leaf,) = spec.observation.leaves
    out = np.zeros((4, *leaf.shape), leaf.dtype)
    ObservationWriter(spec, str, validate=True, compiled=False).write(values, (out,))
    assert out.reshape(4, 4).tolist() == [[0, 1, 2, 3]] * 3 + [[0, 1, 1, 1]]


@pytest.mark.parametrize("dtype", [np.int64, np.int16, np.uint16, np.int32])
@pytest.mark.parametrize("bad", [300, -1])
@pytest.mark.parametrize("rows", [1, 2])
def test_integers_beyond_a_byte_are_faults_and_not_other_numbers(dtype: Any, bad: int, rows: int):
    spec, _ = group_of(
        Scripted, observation_space=spaces.Box(0, 255, (3,), np.uint8), first=(np.zeros(3, np.uint8), {})
    )
    writer = ObservationWriter(spec, "environment {}".format, validate=True, compiled=False)
    value, out = np.array([0, bad, 255]).astype(dtype), np.zeros((rows, 3), np.uint8)
    for values in ([*[np.zeros(3, np.uint8)] * (rows - 1), value], [*[np.zeros(3, dtype)] * (rows - 1), value]):
        with pytest.raises(EnvironmentFault, match=f"environment {rows - 1}: .* none outside 0 to 255"):
            writer.write(values, (out,))
    with pytest.raises(EnvironmentFault, match="none outside 0 to 255"):
        writer.write_batch(np.stack([value] * rows), (out,))
    writer.write([np.array([0, 7, 255]).astype(dtype)] * rows, (out,))
    assert out.tolist() == [[0, 7, 255]] * rows


@pytest.mark.parametrize("space", [spaces.Box(0, 1, (3,), np.int64), spaces.MultiBinary(3)])
def test_integers_beyond_a_bit_are_faults(space: spaces.Space):
    spec, _ = group_of(Scripted, observation_space=space, first=(np.zeros(3, int), {}))
    writer = ObservationWriter(spec, "environment {}".format, validate=True, compiled=False)
    for write, values in ((writer.write, [np.array([0, 7, 1])]), (writer.write_batch, np.array([[0, 7, 1]]))):
        with pytest.raises(EnvironmentFault, match=r"environment 0: .* none outside 0 to 1"):
            write(values, (np.zeros((1, 3), np.uint8),))


def test_a_mask_of_actions_without_categories_is_told_before_the_start():
    first = (np.zeros(4, np.float32), {"action_mask": np.ones(2)})
    text = problem(Scripted, first=first, action_space=spaces.Box(-1, 1, (2,)))
    assert "action_mask forbids categories" in text


def test_observations_and_masks_of_wrong_lengths_are_faults_also_where_their_sum_is_right():
    spec, _ = group_of(Scripted, first=(GOOD, {"action_mask": np.ones(2)}))
    writer = ObservationWriter(spec, "environment {}".format, validate=True, compiled=False)
    with pytest.raises(EnvironmentFault, match=r"environment 1: .* has shape \(3,\)"):
        writer.write([GOOD, GOOD[:3], np.append(GOOD, 1)], (np.zeros((3, 4), np.float32),))
    with pytest.raises(EnvironmentFault, match="environment 0: the action mask has 1 entries"):
        writer.write_masks([np.ones(1), np.ones(3)], np.zeros((2, 2), bool))


def test_mask_faults():
    def masked(mask: Any) -> str:
        info = {} if mask is None else {"action_mask": mask}
        return fault(first=(GOOD, {"action_mask": np.ones(2)}), results=[(GOOD, 0.0, False, False, info)])

    assert "info has no action_mask" in masked(None)
    assert "3 entries" in masked(np.ones(3))
    assert "allows no action" in masked(np.zeros(2))


def test_validation_of_values_can_be_turned_off():
    wanted = EnvRequest(Scripted, {"results": [(np.full(4, np.inf), 0.0, False, False, {})]}, validate=False)
    spec = general.probe(wanted)
    group = general.make_group(wanted, spec, 1, 0, 0)
    group.reset(new_step_buffers(spec, 1))
    assert np.isinf(step(group, spec)[0].obs[0]).all()


def problem(env: Any, backend: str = "auto", **kwargs: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        general.probe(EnvRequest(env, kwargs, backend=backend))
    return str(caught.value)


class Raising(Scripted):
    def __init__(self) -> None:
        raise OSError("no such level")


class Deep(Scripted):
    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        raise KeyError("lives")


GAME = types.ModuleType("game_v1")
GAME.parallel_env = Counting


class DeepMind:
    """An environment of dm_env's kind, as dm_control's are."""

    def reset(self) -> Any:
        return (None, None, None, {})

    def step(self, action: Any) -> Any:
        return self.reset()

    def action_spec(self) -> None: ...

    def observation_spec(self) -> None: ...


@pytest.mark.parametrize(
    ("env", "kwargs", "parts"),
    [
        ("CartPol-v1", {}, ["'CartPol-v1'", "did you mean CartPole-v1", "? An id that", "module:CartPol-v1"]),
        ("CartPole-v9", {}, ["did you mean", "CartPole-v1"]),
        ("CARTPOLE", {}, ["did you mean CartPole-v1 or "]),
        ("LunarLander-v1", {}, ["did you mean LunarLander-v3 or "]),
        ("HalfCheetah-v3", {}, ["use HalfCheetah-v5, or install what it needs"]),
        (
            "qqqqqq",
            {},
            [
                "no environment is called 'qqqqqq'; no known id is like it. An id that a package registers",
                "module:qqqqqq",
            ],
        ),
        ("environments:nope", {}, ["the module environments has no nope, and registers no such id; correct its name"]),
        ("environments:Countin", {}, ["has no Countin", "did you mean environments:Counting"]),
        ("environments:CartPol-v1", {}, ["has no CartPol-v1", "did you mean CartPole-v1"]),
        ("environments:MODES", {}, ["MODES of the module environments is [", "which cannot be called"]),
        ("environments", {}, ["the name of a module", "environments:name_of_a_class_or_function"]),
        (
            "pettingzoo.sisl.multiwalker_v9",
            {},
            ["the name of a module", "in it, too: pettingzoo.sisl.multiwalker_v9:parallel_env"],
        ),
        ("json", {}, ["the name of a module", "json:name_of_a_class_or_function"]),
        (GAME, {}, ["pass what makes the environment in it, game_v1.parallel_env"]),
        (
            DeepMind,
            {},
            ["gymnasium.Env", "shimmy.dm_control_compatibility.DmControlCompatibilityV0", "pip install shimmy"],
        ),
        ("no_such_module_x:Thing-v0", {}, ["no_such_module_x", "install"]),
        ("CartPole-v1", {"gravty": 3}, ["env_kwargs", "gravty", "sutton_barto_reward"]),
        (
            "CartPole-v1",
            {"render_mode": "human"},
            ["render_mode is human", "no display", "leave it out", "sfactory play"],
        ),
        (
            "LunarLander-v3",
            {"continous": True},
            ["env_kwargs {'continous': True} do", "; it takes render_mode, cont", "; did you mean continuous?"],
        ),
        (Counting, {"speed": 1}, ["env_kwargs", "speed", "Counting", "takes nothing"]),
        (Raising, {}, ["Raising", "OSError: no such level", "Traceback"]),
        (lambda: 5, {}, ["returned 5", "gymnasium.Env"]),
        (lambda: None, {}, ["returned None"]),
        (Counting(), {}, ["pass a callable"]),
        (7, {}, ["env is 7", "Gymnasium id"]),
        (Scripted, {"first": GOOD}, ["reset() returned", "observation, info"]),
        (Scripted, {"first": (np.zeros(1, np.float32), {})}, ["shape (1,)", "(4,)"]),
        (Scripted, {"first": (np.full(4, np.nan), {})}, ["nan at [0]", "finite"]),
        (Scripted, {"first": (None, {})}, ["obs", "(4,)"]),
        (Scripted, {"observation_space": spaces.Graph(OBSERVATION, None)}, ["Scripted", "not supported"]),
        (Scripted, {"observation_space": None}, ["observation_space is None"]),
        (Scripted, {"action_space": spaces.Box(0, 4, (2,), np.int32)}, ["action space", "not supported"]),
        (Deep, {}, ["environment 0 (Deep)", "KeyError", "reset()"]),
    ],
)
def test_mistakes_are_told_before_anything_starts(
    env: Any, kwargs: dict[str, Any], parts: list[str], monkeypatch: pytest.MonkeyPatch
):
    for display in ("DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(display, raising=False)
    message = problem(env, **kwargs)
    for part in parts:
        assert part in message


def test_the_vector_backend_wants_a_vector_environment():
    assert "no vector environment of its own" in problem("MountainCarContinuous-v0", backend="vector")
    assert "env_backend auto" in problem(Counting, backend="vector")


def test_a_video_of_a_callable_without_render_mode_is_refused():
    with pytest.raises(ConfigError, match="does not take render_mode"):
        general.probe(EnvRequest(Counting, {}, render_mode="rgb_array"))


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_callable_that_returns_one_environment_again_is_refused(wrapped):
    env = Counting()
    with pytest.raises(ConfigError, match="same environment twice"):
        group_of(lambda: gymnasium.wrappers.TimeLimit(env, 100) if wrapped else env, count=2)


class WithoutSpaces(gymnasium.Env):
    def reset(self, *, seed=None, options=None):
        return 0, {}


class WithRaisingSpace(WithoutSpaces):
    @property
    def observation_space(self):
        raise KeyError("sensors")


def test_spaces_that_are_missing_or_raise_are_told_in_a_sentence():
    assert "WithoutSpaces: observation_space is None; it must be a gymnasium.spaces.Space" in problem(WithoutSpaces)
    assert "observation_space raised KeyError: 'sensors'" in problem(WithRaisingSpace)


def test_a_mask_that_first_comes_with_a_step_is_a_fault_when_an_episode_ends():
    class Late(Counting):
        def step(self, action):
            return (*super().step(action)[:4], {"action_mask": np.ones(3, bool)})

    spec, group = group_of(Late)
    after, outcome = new_step_buffers(spec, 1), Outcome(np.zeros(1, np.float32), np.zeros(1, bool), np.zeros(1, bool))
    group.reset(after)

    def play() -> None:
        for _ in range(12):
            group.step(np.zeros((1, 1), np.int32), np.zeros((1, 0), np.float32), outcome, after)

    with pytest.raises(EnvironmentFault, match="info has an action_mask, though"):
        play()


def test_environments_are_closed_where_a_later_one_cannot_be_made():
    made, closed = [], []

    class Costly(Counting):
        def __init__(self):
            super().__init__()
            if len(made) == 2:
                raise RuntimeError("out of memory")
            made.append(self)

        def close(self):
            closed.append(self)
            raise OSError("nobody hears of this")

    with pytest.raises(ConfigError, match="RuntimeError: out of memory"):
        make_environments(EnvRequest(Costly, {}), 3)
    assert closed == made and len(made) == 2


@pytest.mark.parametrize(
    ("entry_point", "package", "extra"),
    [
        ("gymnasium.envs.box2d:LunarLander", "Box2D", "box2d"),
        ("gymnasium.envs.mujoco.ant_v5:AntEnv", "mujoco", "mujoco"),
    ],
)
def test_a_missing_package_names_its_extra(monkeypatch: pytest.MonkeyPatch, entry_point: str, package: str, extra: str):
    import importlib.util

    def absent(*args: Any, **kwargs: Any) -> None:
        raise gymnasium.error.DependencyNotInstalled(f"{package} is not installed")

    found = importlib.util.find_spec
    monkeypatch.setattr(gymnasium, "make", absent)
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == package else found(name, *rest)
    )
    gymnasium.register("Absent-v0", entry_point=entry_point)
    try:
        assert f'pip install -e ".[{extra}]"' in problem("Absent-v0")
    finally:
        del gymnasium.registry["Absent-v0"]


def test_ids_of_packages_that_nothing_has_imported_are_suggested_too(tmp_path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "late_games.py").write_text(
        "import gymnasium\n"
        "for name in ('Late/Bouncing-v1', 'Late/Bouncing-v2', 'Rolling-v3'):\n"
        "    gymnasium.register(name, entry_point='late_games:Game')\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(registry._ID_PACKAGES, "Late/", "late_games")
    before = dict(gymnasium.registry)
    try:
        assert "did you mean Late/Bouncing-v2" in problem("bouncing-v1")
        for name in gymnasium.registry.keys() - before.keys():
            del gymnasium.registry[name]
        monkeypatch.delitem(sys.modules, "late_games")
        assert "did you mean late_games:Rolling-v3" in problem("Rolling-v0")
    finally:
        for name in gymnasium.registry.keys() - before.keys():
            del gymnasium.registry[name]


def test_a_missing_package_that_is_of_no_extra_is_named():
    gymnasium.register("Absent-v0", entry_point="no_such_package_x.games:Game")
    try:
        assert "pip install no_such_package_x" in problem("Absent-v0")
    finally:
        del gymnasium.registry["Absent-v0"]


def test_names_of_modules_and_registered_factories(monkeypatch: pytest.MonkeyPatch):
    module = types.ModuleType("counting_games")
    module.make_counting = Counting
    monkeypatch.setitem(sys.modules, "counting_games", module)
    assert resolve_env("counting_games:make_counting") is Counting
    register_env("my-counting", Counting)
    assert resolve_env("my-counting") is Counting
    assert probe(request("my-counting")).observation == probe(request("counting_games:make_counting")).observation
    assert "did you mean my-counting" in problem("my-countin")
    assert resolve_env("CartPole-v1") == "CartPole-v1"
    assert resolve_env("CartPole") == "CartPole-v1"
    assert resolve_env("counting_games:CartPole") == "counting_games:CartPole-v1"
    assert resolve_env("CartPoel") == "CartPoel"
    with pytest.raises(ConfigError, match="callable"):
        register_env("x", "CartPole-v1")


def test_specs_of_registered_ids():
    spec = probe(request("CartPole-v1"))
    assert (spec.agents, spec.frameskip, spec.masked, spec.action.sizes) == (1, 1, False, (2,))
    assert make_group(request("CartPole-v1"), spec, 3, 0, 0).rows == 3
    assert probe(request("CartPole")).observation == spec.observation  # the latest version


def test_a_probe_leaves_what_is_its_callers(tmp_path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path.parent)
    errors = np.geterr()
    probe(request(Careless, folder=str(tmp_path)))
    assert Path.cwd() == tmp_path.parent
    assert np.geterr() == errors != dict.fromkeys(errors, "raise")
    assert torch.is_grad_enabled()


def test_minigrid_needs_no_import():
    pytest.importorskip("minigrid")
    spec = general.probe(request("MiniGrid-Empty-5x5-v0"))
    assert {leaf.name for leaf in spec.observation.leaves} == {"obs/image", "obs/direction"}
    assert spec.observation.ignored == ("mission",)


def test_frameskip_is_read_but_not_that_of_mujoco():
    class Skipping(Counting):
        frame_skip = 4

    assert general.probe(request(Skipping)).frameskip == 4
    Skipping.__module__ = "gymnasium.envs.mujoco.ant_v5"
    assert general.probe(request(Skipping)).frameskip == 1


class Repeating(gymnasium.Wrapper):
    frame_skip = 3


@pytest.mark.parametrize(
    ("wrap", "frames"),
    [
        (Repeating, 3),
        (lambda env: gymnasium.wrappers.TimeLimit(Repeating(gymnasium.wrappers.MaxAndSkipObservation(env, 2)), 9), 6),
        (lambda env: gymnasium.wrappers.TimeLimit(env, 9), 1),
    ],
)
def test_the_frameskip_of_wrappers_counts(wrap, frames):
    def repeats_itself(frame_skip=1):
        env = Counting()
        env.frame_skip = frame_skip
        return wrap(env)

    assert general.probe(request(repeats_itself)).frameskip == frames
    assert general.probe(request(repeats_itself, frame_skip=5)).frameskip == 5 * frames


def test_frames_of_gymnasiums_own_atari_preprocessing_count():
    pytest.importorskip("ale_py")

    def preprocessed():
        return gymnasium.wrappers.AtariPreprocessing(gymnasium.make("ALE/Pong-v5", frameskip=1), frame_skip=4)

    assert general.probe(request(preprocessed)).frameskip == 4


def test_mujoco_tells_a_warning_once_and_writes_no_file(tmp_path, monkeypatch, capfd):
    pytest.importorskip("mujoco")
    monkeypatch.chdir(tmp_path)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("default")
        _, group = group_of("HalfCheetah-v5", count=3)
    group.close()
    assert len([warning for warning in told if "MuJoCo" in str(warning.message)]) <= 1
    assert "WARNING" not in "".join(capfd.readouterr())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("dtype", "low"), [(np.int64, -2), (np.int8, -2), (np.uint8, 3)])
def test_categories_of_a_box_count_from_its_lowest_value(dtype: Any, low: int) -> None:
    space = spaces.Box(low, low + 4, (2, 3), dtype)
    value = np.arange(6, dtype=dtype).reshape(2, 3) % 5 + dtype(low)
    spec, group = group_of(lambda: Scripted(first=(value, {}), observation_space=space))
    buffers = new_step_buffers(spec, 1)
    group.reset(buffers)
    assert buffers.obs[0].tolist() == [[[0, 1, 2], [3, 4, 0]]]


def test_a_value_that_is_no_category_names_the_field_that_decides() -> None:
    grid = spaces.Box(0, 255, (7, 7, 3), np.uint8)

    def make() -> Scripted:
        return Scripted(first=(np.full((7, 7, 3), 200, np.uint8), {}), observation_space=grid)

    assert general.probe(request(make)).observation.leaves[0].sizes == ()
    with pytest.raises(ConfigError, match=r"is 200 at \[0, 0, 0\]; its space has 11 categories.*model.categories"):
        general.probe(EnvRequest(make, {}, reading=Reading(categories=11)))
