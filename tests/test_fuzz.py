"""Whatever a user gives: success or one clear error, never a hang or a raw traceback from inside.

Examples are the same in every run; SFACTORY_FUZZ=N tries N times as many, other ones each time.
"""

from __future__ import annotations

import dataclasses
import os
import tempfile
import typing
from collections.abc import Callable, Sequence
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import yaml
from faults import Panic
from gymnasium import spaces
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from sfactory import Config, train
from sfactory.config import LogConfig, from_dict, merged, resolve, to_dict
from sfactory.config.command_line import from_command_line
from sfactory.envs import fault_recovery
from sfactory.errors import SfactoryError
from sfactory.runtime.plan import Plan
from sfactory.runtime.planning import make_plan

TIMES = int(os.environ.get("SFACTORY_FUZZ", "0"))
pytestmark = pytest.mark.timeout(0 if TIMES else 180)


def fuzz(examples: int):
    """Settings for a test of so many examples."""
    return settings(
        max_examples=examples * max(1, TIMES), derandomize=not TIMES, deadline=None, database=None,
        suppress_health_check=list(HealthCheck), print_blob=False,
    )  # fmt: skip


def result_of(call: Callable[[], Any]) -> Any:
    """What a call returns, or sfactory's own error, or the exit status of the flags' parser. All else that it raises is
    a mistake."""
    try:
        return call()
    except SfactoryError as error:
        return error
    except SystemExit as end:
        return end.code


def is_clear(error: Any) -> bool:
    """Whether it is an error with something to say."""
    return isinstance(error, SfactoryError) and bool(str(error)) and all(getattr(error, "problems", (str(error),)))


# Configurations

SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 130), st.integers(), st.floats(), st.floats(0, 1), st.text(max_size=5),
    st.sampled_from(["auto", "none", "1e-3", "1e400", "nan", "tanh", "gru", "nowhere:Thing", "<lambda>", "cuda:", "cpu",
    10**400]),
)  # fmt: skip
ANYTHING = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3) | st.integers(), inner, max_size=3),
    max_leaves=4,
)
ENVS = st.sampled_from(
    [
        "CartPole-v1",
        "CartPole-v1",
        "Pendulum-v1",
        "sfactory/CartPole",
        "",
        "NoSuch-v0",
        "nowhere:Id-v0",
        "sfactory/",
        ":",
        "a/b/c",
        7,
        None,
    ]
)


def plausible(hint: Any) -> st.SearchStrategy:
    """Values of a field's type, more often than not."""
    if typing.get_origin(hint) is typing.Literal:
        return st.sampled_from(typing.get_args(hint)) | ANYTHING
    kinds = (hint, *typing.get_args(hint))
    if bool in kinds:
        return st.booleans() | ANYTHING
    if int in kinds:
        return st.sampled_from([0, 1, 2, 3, 4, 8, 16, 64, 2**31, 2**63, -1]) | ANYTHING
    if float in kinds:
        return st.floats(0, 2) | st.floats() | ANYTHING
    return ANYTHING


def fields_of(kind: type, path: tuple[str, ...] = ()) -> dict[tuple[str, ...], st.SearchStrategy]:
    """Strategies for every field and group of a config class, by their paths."""
    found = {}
    for name, hint in typing.get_type_hints(kind).items():
        if dataclasses.is_dataclass(hint):
            found |= fields_of(hint, (*path, name)) | {(*path, name): ANYTHING, (*path, name, "other"): ANYTHING}
        elif name not in ("run", "env"):
            found[*path, name] = plausible(hint)
    return found


FIELDS = fields_of(Config)


@st.composite
def mappings(draw) -> dict[Any, Any]:
    """Nested values for a few fields of a config, some of which do not exist."""
    values: dict[Any, Any] = (
        draw(st.dictionaries(st.text(max_size=4) | st.integers(), SCALARS, max_size=1))
        if not draw(st.integers(0, 9))
        else {}
    )
    for path in draw(st.lists(st.sampled_from(sorted(FIELDS)), max_size=4)):
        group = values
        for name in path[:-1]:
            group = group[name] = group.get(name) if isinstance(group.get(name), dict) else {}
        group[path[-1]] = draw(FIELDS[path])
    return values


@fuzz(250)
@given(mappings(), ENVS, st.booleans())
def test_any_mapping_makes_a_plan_or_a_clear_error(values, env, small):
    base = {"env": env, "serial": True, "device": "cpu"} | (
        {"preset": "none", "rollout": 8, "envs_per_worker": 4} if small else {}
    )
    plan = result_of(lambda: make_plan(dataclasses.replace(resolve(merged(Config(), base | values)), run="nowhere")))
    if isinstance(plan, Plan):
        assert from_dict(yaml.safe_load(yaml.safe_dump(to_dict(plan.config)))) == plan.config
    else:
        assert is_clear(plan)


@fuzz(60)
@given(mappings(), ENVS)
def test_any_yaml_file_makes_a_plan_or_a_clear_error(values, env):
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "run.yaml"
        file.write_text(yaml.safe_dump(values | {"env": env}))
        flags = ["--config", str(file), "--serial", "--device", "cpu", "--run", "nowhere"]
        plan = result_of(lambda: make_plan(from_command_line(flags, "test")))
    assert isinstance(plan, Plan) or plan == 2 or is_clear(plan)


@fuzz(60)
@given(st.text(max_size=60) | st.binary(max_size=60))
@example("a: &a [*a]")
@example("env: 2020-99-99")
@example("? [1]\n: 2")
def test_any_file_is_a_config_or_a_clear_error(content):
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "run.yaml"
        file.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8", "surrogatepass"))
        config = result_of(lambda: from_command_line(["--config", str(file)], "test"))
    assert isinstance(config, Config) or is_clear(config)


FLAGS = ["--env", "--steps", "--seed", "--algo", "--model.hidden", "--optim.betas", "--loss.max-lag", "--env-kwargs",
         "--serial",
         "--no-serial", "--config", "--preset", "--log.display", "--optim.lr=1", "--runtime", "--model.kwargs", "-1",
         "--"]  # fmt: skip


@fuzz(60)
@given(
    st.lists(
        st.sampled_from(FLAGS) | st.sampled_from(["1", "CartPole-v1", "{a: 1}", "none"]) | st.text(max_size=4),
        max_size=6,
    )
)
def test_any_flags_make_a_config_or_end_with_status_2(flags):
    config = result_of(lambda: from_command_line(flags, "test"))
    assert (
        isinstance(config, Config) or config == 2 or is_clear(config) or (config == 0 and {"-h", "--help"} & {*flags})
    )


# Spaces

DTYPES = ["float32", "float64", "uint8", "int8", "int32", "int64", "bool", "float16", "uint32"]


@st.composite
def boxes(draw, dtypes: Sequence[str] = DTYPES) -> spaces.Box:
    shape = tuple(
        draw(st.lists(st.integers(1, 4), max_size=3))
        if draw(st.integers(0, 5))
        else draw(st.sampled_from([(3, 12, 12), (40, 40, 1), (7, 7, 3), (0,), (2, 0)]))
    )
    dtype = draw(st.sampled_from(dtypes))
    if dtype == "bool":
        return spaces.Box(0, 1, shape, np.bool_)
    if np.issubdtype(dtype, np.floating):
        low, high = draw(st.sampled_from([(-1, 1), (-np.inf, np.inf), (0, np.inf), (-3e4, 3e4), (0, 0), (-1e-7, 1e-7)]))
    else:
        information = np.iinfo(dtype)
        low, high = draw(st.sampled_from([(0, 1), (information.min, information.max), (0, information.max), (3, 3)]))
    return spaces.Box(low, high, shape, dtype)


DISCRETE = st.one_of(
    st.builds(lambda n, start: spaces.Discrete(n, start=start), st.integers(1, 9), st.integers(-5, 5)),
    st.builds(spaces.MultiDiscrete, st.lists(st.integers(1, 4), min_size=1, max_size=3) | st.just([[2, 3], [1, 2]])),
    st.builds(spaces.MultiBinary, st.integers(1, 4) | st.just([2, 2])),
)
UNSUPPORTED = st.sampled_from(
    [spaces.Text(4), spaces.Graph(spaces.Box(0, 1, (2,)), None), spaces.Sequence(spaces.Discrete(2))]
)


def nested(leaves: st.SearchStrategy) -> st.SearchStrategy:
    """Tuples and Dicts of spaces; now and then with one that is not supported."""

    def deeper(inner: st.SearchStrategy) -> st.SearchStrategy:
        keys = st.text(max_size=3) | st.just("action_mask")
        tuples = st.builds(spaces.Tuple, st.lists(inner, min_size=1, max_size=3))
        return tuples | st.builds(spaces.Dict, st.dictionaries(keys, inner, min_size=1, max_size=3))

    good, bad = (
        st.recursive(leaves, deeper, max_leaves=4),
        st.recursive(leaves | boxes() | UNSUPPORTED, deeper, max_leaves=4),
    )
    return st.integers(0, 5).flatmap(lambda number: bad if number == 0 else good)


OBSERVATIONS = nested(boxes() | DISCRETE | st.just(spaces.Discrete(70_000)))
ACTIONS = nested(boxes(["float32", "float64", "float16"]) | DISCRETE)


class Sampled(gym.Env):
    """Observes samples of its space, whatever it is asked to do; checks the actions."""

    def __init__(self, observation: spaces.Space, action: spaces.Space):
        self.observation_space, self.action_space = observation, action

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if seed is not None:
            self.observation_space.seed(seed)
        return self.observation_space.sample(), {}

    def step(self, action):
        assert self.action_space.contains(action), (self.action_space, action)
        ended = self.np_random.random() < 0.2
        return (
            self.observation_space.sample(),
            float(self.np_random.normal()),
            bool(ended),
            bool(self.np_random.random() < 0.1),
            {"n": 1},
        )


def tiny_run(env: Any, **changes: Any) -> str:
    """Train serially for some env steps; the status, or the name of sfactory's own error. Every other exception is a
    mistake."""
    with tempfile.TemporaryDirectory() as folder:
        settings = {
            "steps": 128,
            "workers": 1,
            "envs_per_worker": 4,
            "rollout": 8,
            "batch_size": 32,
            "serial": True,
            "preset": "none",
        }
        log = LogConfig(display="none", tensorboard=False)
        result = result_of(
            lambda: train(Config(env=env, run=f"{folder}/run", device="cpu", log=log, **settings | changes))
        )
        return type(result).__name__ if is_clear(result) else result.status


@fuzz(60)
@given(OBSERVATIONS, ACTIONS)
def test_any_spaces_are_trained_on_or_refused(observation, action):
    def make():
        return Sampled(observation, action)

    assert tiny_run(make) in ("completed", "ConfigError")


# Outputs


class Wicked(Exception):
    def __str__(self):
        raise ValueError("no text")


class Unspeakable:
    def __repr__(self):
        raise ValueError("no text")

    def __array__(self, *args, **kwargs):
        raise RuntimeError("no array")

    def __len__(self):
        raise RuntimeError("no length")


def endless() -> list:
    inner: list = []
    inner.append(inner)
    return inner


VALUES = [
    None, True, 0, -1, 1e300, 10**400, np.nan, np.inf, -np.inf, "text", "", b"bytes", [], (), {}, [1.0, 2.0, 3.0], (1.0,
    2.0), {"a": 1},
    np.zeros(3, np.float32), np.zeros(4), np.zeros((3, 1)), np.full(3, np.nan), np.zeros(3, complex), np.array(["a",
    "b", "c"]),
    np.array([None, 1, 2]), np.zeros(0), np.float32(1), np.array(1), np.array([True]), 1j, Decimal("1.5"), Fraction(1,
    3), {1, 2}, object(),
    [[1], [2, 3]], np.full(3, 1e300), np.ma.masked_array([1.0, 2.0, 3.0], [0, 1, 0]), int, lambda: 0, range(3),
    Unspeakable(), endless(),
    np.datetime64("2020"), np.zeros(3, [("a", int)]), memoryview(b"abc"), np.full((2, 3), np.nan), np.array([np.nan,
    1]),
    np.array([None, 1]), np.array(["a", "b"]), np.zeros((2, 3), complex), np.array([1e300, 1]), [None, None], [1, 2],
    np.ones((2, 3), bool),
    np.zeros((2, 2)), [Unspeakable(), Unspeakable()], np.ma.masked_array([1.0, 2.0], [0, 1]),
]  # fmt: skip
RAISED = [
    ValueError("x"), KeyError("x"), StopIteration(), AssertionError(), MemoryError(), RecursionError(), OSError(5, "x"),
    Wicked(),
    UnicodeDecodeError("utf-8", b"x", 0, 1, "x"),
    TimeoutError(), Warning("x"), NotImplementedError(), ZeroDivisionError(), StopAsyncIteration(), SystemExit(3),
    ExceptionGroup("several", [ValueError("x"), KeyError("y")]), GeneratorExit(), Panic(),
]  # fmt: skip
INFOS = [*VALUES, {1: 2}, {None: 1.0}, {"x": np.nan}, {"x": 10**400}, {"x": Unspeakable()}, {"final_obs": 1},
{"action_mask": 5},
         {"action_mask": None}, {"action_mask": np.zeros(2)}, {"action_mask": np.zeros((2, 2))},
         {"action_mask": [Unspeakable()] * 2},
         {"action_mask": np.array([None, [1, 1]], object)}, {"action_mask": ["a", "b"], "_action_mask": [True, "x"]},
         {"action_mask": np.ones((2, 2)), "_action_mask": 5}, {"x": [1], "_x": [True] * 9},
         {"final_info": 3, "_final_info": None}]  # fmt: skip
PLACES = ("obs", "reward", "terminated", "truncated", "info", "all", "raise")


def pool_of(place: str) -> list[Any]:
    return {"raise": RAISED, "info": INFOS}.get(place, VALUES)


@dataclasses.dataclass
class Garbage:
    """What is wrong, and when.

    Attributes:
        place: What is replaced.
        index: Of what takes its place; or is raised, for the place `raise`.
        first: The first call, of reset() and step() together, that goes wrong.
        every: And every so many calls after it.
    """

    place: str
    index: int
    first: int
    every: int

    @property
    def value(self) -> Any:
        pool = pool_of(self.place)
        return pool[self.index % len(pool)]

    def spoils(self, call: int) -> bool:
        return call >= self.first and (call - self.first) % self.every == 0


class Garbler:
    """Spoils what an environment returns; calls are counted over all instances of a run."""

    def __init__(self, garbage: list[Garbage], counter: list[int], masked: bool):
        self.garbage, self.counter, self.masked = garbage, counter, masked

    def info(self, *rows: int) -> dict[str, Any]:
        """An info, with masks of so many rows where the environment has masks."""
        return {"action_mask": np.ones((*rows, 2), np.int8)} if self.masked else {}

    def spoilt(self, result: dict[str, Any]) -> Any:
        self.counter[0] += 1
        for garbage in self.garbage:
            if garbage.spoils(self.counter[0]):
                if garbage.place == "raise":
                    raise garbage.value
                if garbage.place == "all":
                    return garbage.value
                if garbage.place in result:
                    result[garbage.place] = self.placed(result[garbage.place], garbage)
        return tuple(result.values())

    def placed(self, good: Any, garbage: Garbage) -> Any:
        """Garbage in the place of something good."""
        return garbage.value


class Single(gym.Env, Garbler):
    observation_space: spaces.Space = spaces.Box(-1, 1, (3,), np.float32)
    action_space: spaces.Space = spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        return self.spoilt({"obs": np.zeros(3, np.float32), "info": self.info()})

    def step(self, action):
        ended = self.counter[0] % 7 == 0
        return self.spoilt(
            {
                "obs": np.zeros(3, np.float32),
                "reward": 1.0,
                "terminated": ended,
                "truncated": False,
                "info": self.info(),
            }
        )


class Vector(gym.vector.VectorEnv, Garbler):
    metadata = {"autoreset_mode": gym.vector.AutoresetMode.SAME_STEP}  # noqa: RUF012

    def __init__(self, num_envs: int, *args: Any):
        Garbler.__init__(self, *args)
        self.num_envs = num_envs
        self.single_observation_space, self.single_action_space = Single.observation_space, Single.action_space
        self.observation_space = gym.vector.utils.batch_space(self.single_observation_space, num_envs)
        self.action_space = gym.vector.utils.batch_space(self.single_action_space, num_envs)

    def reset(self, *, seed=None, options=None):
        return self.spoilt({"obs": np.zeros((self.num_envs, 3), np.float32), "info": self.info(self.num_envs)})

    def step(self, actions):
        ended = np.arange(self.num_envs) == self.counter[0] % 7
        result = {
            "obs": np.zeros((self.num_envs, 3), np.float32),
            "reward": np.ones(self.num_envs),
            "terminated": ended,
        }
        return self.spoilt(result | {"truncated": np.zeros(self.num_envs, bool), "info": self.info(self.num_envs)})


class Parallel(Garbler):
    possible_agents = ("a", "b")

    def observation_space(self, agent):
        return Single.observation_space

    def action_space(self, agent):
        return Single.action_space

    def reset(self, seed=None, options=None):
        self.agents = list(self.possible_agents)
        return self.spoilt({"obs": self._all(np.zeros(3, np.float32)), "info": self._all(self.info())})

    def step(self, actions):
        ended = self.counter[0] % 7 == 0
        result = {"obs": self._all(np.zeros(3, np.float32)), "reward": self._all(1.0), "terminated": self._all(ended)}
        self.agents = [] if ended else self.agents
        acted = list(result["reward"])
        return self.spoilt(
            result | {"truncated": dict.fromkeys(acted, False), "info": {agent: self.info() for agent in acted}}
        )

    def placed(self, good, garbage):
        return {**good, "a": garbage.value} if garbage.every % 2 else garbage.value

    def close(self):
        pass

    def _all(self, value):
        return dict.fromkeys(self.agents, value)


def garbages() -> st.SearchStrategy[Garbage]:
    return st.builds(
        Garbage, st.sampled_from(PLACES), st.integers(0, len(INFOS) - 1), st.integers(1, 60), st.integers(1, 40)
    )


@pytest.fixture(scope="module")
def impatient():
    """Without the pauses before an environment is made again."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fault_recovery, "PAUSE_S", 0.0)
        yield


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("kind", [Single, Vector, Parallel])
@fuzz(50)
@given(garbage=st.lists(garbages(), min_size=1, max_size=3), masked=st.booleans())
def test_any_outputs_of_an_environment_are_survived_or_told(kind, garbage, masked):
    counter = [0]

    def make_vector(num_envs: int):
        return Vector(num_envs, garbage, counter, masked)

    status = tiny_run(
        make_vector if kind is Vector else lambda: kind(garbage, counter, masked),
        envs_per_worker=4 if kind is not Parallel else 2,
    )
    assert status in ("completed", "ConfigError", "EnvironmentFault", "RunFailed")
