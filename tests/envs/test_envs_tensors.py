"""Environments on the device: the same episodes as through the host, and actions, spaces and faults of their own."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from faults import Panic
from gymnasium import spaces
from tensor_environments import Schedules

from sfactory.envs import make_group, make_tensor_group, probe, resolve_env
from sfactory.envs.families.tensors import to_host
from sfactory.envs.interface import EnvRequest, EnvSpec, Outcome, whole_ends
from sfactory.envs.observations import new_step_buffers
from sfactory.envs.tensors.cartpole import CartPole
from sfactory.envs.tensors.group import TensorOutcome, TensorStep
from sfactory.envs.tensors.memory_grid import MemoryGrid
from sfactory.errors import ConfigError, EnvironmentFault
from sfactory.spaces import ActionSpec
from sfactory.spaces.tensors import action_parts

CPU = torch.device("cpu")
MODES = ["NextStep", "SameStep", "Disabled"]


def tensor_step(spec: EnvSpec, rows: int) -> TensorStep:
    buffers = new_step_buffers(spec, rows)
    mask = None if buffers.mask is None else torch.from_numpy(buffers.mask)
    obs = tuple(map(torch.from_numpy, buffers.obs))
    return TensorStep(obs, mask, torch.from_numpy(buffers.first), torch.from_numpy(buffers.active))


def tensor_outcome(spec: EnvSpec, rows: int) -> TensorOutcome:
    flags = (torch.zeros(rows, dtype=torch.bool) for _ in range(2))
    return TensorOutcome(torch.zeros(rows), *flags, tensor_step(spec, rows).obs)


def request_of(env: Any = Schedules, **kwargs: Any) -> EnvRequest:
    return EnvRequest(env, kwargs)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    ("mode", "final"), [*((mode, "final_obs") for mode in MODES), ("SameStep", "final_observation")]
)
def test_a_group_on_the_device_tells_what_the_group_on_the_host_does(mode: str, final: str, masked: bool) -> None:
    request, rows = request_of(mode=mode, masked=masked, told=True, final=final), 7
    spec = probe(request)
    assert spec.family == "tensors" and spec.masked == masked
    here, there = make_tensor_group(request, spec, rows, CPU), make_group(request, spec, rows, 0, 0)
    after, host = tensor_step(spec, rows), new_step_buffers(spec, rows)
    here.reset(0, after)
    there.reset(host)
    for number in range(30):
        for ours, theirs in zip(
            (*after.obs, after.first, after.active), (*host.obs, host.first, host.active), strict=True
        ):
            assert np.array_equal(ours, theirs), number
        assert not masked or np.array_equal(after.mask, host.mask)
        actions, none = torch.randint(0, 2, (rows, 1), dtype=torch.int32), torch.zeros(rows, 0)
        told = tensor_outcome(spec, rows)
        host_told = Outcome(np.empty(rows, np.float32), np.empty(rows, bool), np.empty(rows, bool))
        here.step(actions, none, told, after)
        there.step(actions.numpy(), none.numpy(), host_told, host)
        for ours, theirs in zip(told[:3], host_told, strict=True):
            assert np.array_equal(ours, theirs)
        nobody = np.zeros(rows, bool)
        assert np.array_equal(nobody if there.goes_on is None else there.goes_on, here.goes_on)
        over = whole_ends(told, here.goes_on)
        assert [entry["number"] for entry in there.extras] == here.extras["number"][over].tolist()
        assert set(here.extras) == {"number"}
        there.extras.clear()
        if there.finals is not None:
            for ours, theirs in zip(told.finals, there.finals.obs, strict=True):
                assert np.array_equal(ours[there.finals.rows], theirs)
        assert (there.finals is not None) == (not here.rests and bool(told.truncated.any()))
    assert not here.faulty.any()


ACTION_SPACES = [
    spaces.Discrete(3, start=2),
    spaces.MultiDiscrete([[2, 3], [4, 5]], start=[[1, 0], [0, -2]]),
    spaces.MultiBinary(3),
    spaces.Box(np.array([-2, -np.inf, 0], np.float32), np.array([4, 1, np.inf], np.float32)),
    spaces.Dict({"a": spaces.Tuple((spaces.Discrete(2), spaces.Box(-1, 3, (2, 2)))), "b": spaces.MultiBinary((1, 2))}),
]


@pytest.mark.parametrize("squash", ["clip", "tanh"])
@pytest.mark.parametrize("space", ACTION_SPACES, ids=str)
def test_actions_on_the_device_are_those_on_the_host(space: gymnasium.Space, squash: Any) -> None:
    spec, rng = ActionSpec.from_space(space, squash), np.random.default_rng(3)
    categorical = np.stack([rng.integers(0, n, 6) for n in spec.sizes], 1) if spec.sizes else np.zeros((6, 0))
    categorical, continuous = categorical.astype(np.int32), 2 * rng.standard_normal((6, spec.continuous), np.float32)
    given = torch.from_numpy(categorical), torch.from_numpy(continuous)
    ours = spec.nested({part.path: make(*given) for part, make in zip(spec.parts, action_parts(spec), strict=True)})
    compare(ours, spec.batch(categorical, continuous))


def compare(ours: Any, theirs: Any) -> None:
    if isinstance(theirs, dict):
        assert ours.keys() == theirs.keys()
        for key, value in theirs.items():
            compare(ours[key], value)
    elif isinstance(theirs, tuple):
        for one, other in zip(ours, theirs, strict=True):
            compare(one, other)
    else:
        assert ours.shape == theirs.shape and ours.dtype.is_floating_point == (theirs.dtype.kind == "f")
        np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-6)


def test_the_cart_pole_moves_as_gymnasiums_does() -> None:
    ours, theirs = CartPole(3), gymnasium.make("CartPole-v1").unwrapped
    ours.reset(seed=1)
    theirs.reset(seed=1)
    actions = np.random.default_rng(0).integers(0, 2, 60)
    theirs.state = tuple(ours._state[0].double().tolist())
    for action in actions:
        obs, reward, terminated, truncated, info = ours.step(torch.tensor([int(action), 0, 1]))
        expected, paid, over, _, _ = theirs.step(int(action))
        np.testing.assert_allclose(info["final_obs"][0], expected, rtol=2e-4, atol=2e-5)
        assert (float(reward[0]), bool(terminated[0]), bool(truncated[0])) == (paid, over, False)
        if over:
            break
    else:
        pytest.fail("the pole has not fallen")
    assert (obs[0].abs() <= 0.05).all()


def test_the_cart_pole_has_a_time_limit_of_its_own() -> None:
    env = CartPole(1, max_episode_steps=3)
    env.reset(seed=0)
    truncated = [bool(env.step(torch.tensor([step % 2]))[3]) for step in range(6)]
    assert truncated == [False, False, True, False, False, True]
    with pytest.raises(ConfigError, match="max_episode_steps is 0"):
        CartPole(1, max_episode_steps=0)


def test_the_memory_grid_shows_its_cue_once_and_pays_for_it() -> None:
    env, rows = MemoryGrid(64, length=4), torch.arange(64)
    first, _ = env.reset(seed=3)
    cue = env._cue.clone()
    assert 0 < cue.sum() < 64
    later = torch.stack([env.step(torch.zeros(64, dtype=torch.int64))[0] for _ in range(5)])
    assert (later == later[:, :1]).all(), "beyond the first observation nothing tells the cue"
    assert (first[cue == 0] == first[cue == 0][0]).all() and not torch.equal(first[cue == 0][0], first[cue == 1][0])
    _, reward, terminated, truncated, _ = env.step(torch.where(rows < 32, cue, 1 - cue))
    assert terminated.all() and not truncated.any()
    assert (reward[:32] == 1).all() and (reward[32:] == -1).all()
    again, reward, terminated, _, _ = env.step(torch.zeros(64, dtype=torch.int64))
    assert not terminated.any() and not reward.any() and torch.equal(again[env._cue == 0][0], first[cue == 0][0])


def test_a_row_with_bad_values_is_left_out_and_marked() -> None:
    request = request_of(bad=3)
    spec = probe(request_of())
    group, after = make_tensor_group(request, spec, 4, CPU), tensor_step(spec, 4)
    group.reset(0, after)
    for _ in range(3):
        group.step(torch.zeros(4, 1, dtype=torch.int32), torch.zeros(4, 0), tensor_outcome(spec, 4), after)
    assert after.active.tolist() == [True, False, True, True]
    assert group.faulty.tolist() == [False, True, False, False]
    assert all(leaf.float().isfinite().all() for leaf in after.obs)


class Wide(Schedules):
    """Images are int64, with 300 in row 2 from the first step on; the mask of row 1 allows nothing then."""

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple:
        observation, info = super().reset(seed=seed, options=options)
        return observation | {"eye": observation["eye"].long()}, info

    def step(self, actions: Any) -> tuple:
        observation, *result, info = super().step(actions)
        eye, mask = observation["eye"].long(), info["action_mask"].clone()
        eye[2, 0, 0, 0], mask[1] = 300, False
        return observation | {"eye": eye}, *result, info | {"action_mask": mask}


@pytest.mark.parametrize("validate", [True, False])
def test_a_byte_beyond_255_and_a_mask_that_allows_nothing_are_bad_values(validate: bool) -> None:
    spec = probe(request_of(masked=True))
    request = EnvRequest(Wide, {"masked": True}, validate=validate)
    group, after = make_tensor_group(request, spec, 4, CPU), tensor_step(spec, 4)
    group.reset(0, after)
    assert not group.faulty.any()
    group.step(torch.zeros(4, 1, dtype=torch.int32), torch.zeros(4, 0), tensor_outcome(spec, 4), after)
    bad = [False, validate, validate, False]
    assert group.faulty.tolist() == bad and after.active.tolist() == [not each for each in bad]
    assert after.mask is not None
    assert after.mask.any(1).tolist() == [True, validate, True, True]


def short(self: Any, actions: Any) -> tuple:
    observation, reward, terminated, truncated, info = Schedules.step(self, actions)
    return observation, reward[:-1], terminated, truncated, info


def arrays(self: Any, actions: Any) -> tuple:
    observation, *result = Schedules.step(self, actions)
    return ({name: value.numpy() for name, value in observation.items()}, *result)


def panics(self: Any, actions: Any) -> tuple:
    raise Panic("index out of bounds")


def bright(self: Any, actions: Any) -> tuple:
    observation, *result = Schedules.step(self, actions)
    return (observation | {"eye": observation["eye"] / 255}, *result)


def untold(self: Any, actions: Any) -> tuple:
    return (*Schedules.step(self, actions)[:4], None)


def late_mask(self: Any, actions: Any) -> tuple:
    *result, info = Schedules.step(self, actions)
    return (*result, info | {"action_mask": torch.ones(self.num_envs, 2, dtype=torch.bool)})


class Learned(Schedules):
    """What is seen comes out of a network, in half of the bits."""

    def _observation(self) -> dict[str, Any]:
        seen = super()._observation()
        weight = torch.nn.Parameter(torch.ones(()))
        return seen | {"count": (seen["count"] * weight).bfloat16()}


def test_what_a_network_computes_is_seen_from_the_host() -> None:
    spec = probe(request_of(Learned))
    group, after = make_group(request_of(Learned), spec, 3, 0, 0), new_step_buffers(spec, 3)
    group.reset(after)
    outcome = Outcome(np.empty(3, np.float32), np.empty(3, bool), np.empty(3, bool))
    group.step(np.zeros((3, 1), np.int32), np.zeros((3, 0), np.float32), outcome, after)
    assert after.obs[0].tolist() == [[0, 0, 1], [1, 0, 1], [2, 0, 1]]
    there = to_host({"x": torch.ones(2, requires_grad=True), "y": torch.ones(2, dtype=torch.bfloat16)})
    assert there["x"].tolist() == [1, 1] and there["y"].dtype == np.float32


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("step", "words"),
    [
        (untold, r"step\(\) returned None as info; it must be a dict"),
        (late_mask, r"info has an action_mask, though the first reset\(\) gave none.*; give it at reset\(\) too"),
    ],
)
def test_a_bad_info_is_told_on_the_device_and_on_the_host(step: Any, words: str, mode: str) -> None:
    request, spec = request_of(type("Wrong", (Schedules,), {"step": step}), mode=mode), probe(request_of(mode=mode))
    group, after = make_tensor_group(request, spec, 4, CPU), tensor_step(spec, 4)
    group.reset(0, after)
    with pytest.raises(EnvironmentFault, match=f"^environment 0 .*{words}"):
        group.step(torch.zeros(4, 1, dtype=torch.int32), torch.zeros(4, 0), tensor_outcome(spec, 4), after)
    there, host = make_group(request, spec, 4, 0, 0), new_step_buffers(spec, 4)
    there.reset(host)
    outcome = Outcome(np.empty(4, np.float32), np.empty(4, bool), np.empty(4, bool))
    with pytest.raises(EnvironmentFault, match=f"^vector environment 0 to 3 .*{words}"):
        there.step(np.zeros((4, 1), np.int32), np.zeros((4, 0), np.float32), outcome, host)


@pytest.mark.parametrize(
    ("step", "words"),
    [
        (bright, r"obs/eye is torch.float32; its space says integers; return those, or change the observation space"),
        (short, r"reward has shape \(3,\) on cpu; it must be a tensor of shape \(4,\) on cpu"),
        (arrays, "obs/count is array"),
        (lambda self, actions: 1, "step\\(\\) returned 1; it must return observation, reward"),
        (lambda self, actions: 1 / 0, "raised ZeroDivisionError in step\\(\\): division by zero"),
        (panics, "raised Panic in step\\(\\): index out of bounds"),
    ],
)
def test_what_an_environment_does_wrong_is_said(step: Any, words: str) -> None:
    made = type("Wrong", (Schedules,), {"step": step})
    spec = probe(request_of())
    group, after = make_tensor_group(request_of(made), spec, 4, CPU), tensor_step(spec, 4)
    group.reset(0, after)
    with pytest.raises(EnvironmentFault, match=words):
        group.step(torch.zeros(4, 1, dtype=torch.int32), torch.zeros(4, 0), tensor_outcome(spec, 4), after)


class Sparing(Schedules):
    """Has final observations in its info only at steps that end an episode, as ManiSkill's vector environment does; or
    at steps that end one by termination alone."""

    def __init__(self, num_envs: int = 1, device: str = "cpu", forgetful: bool = False) -> None:
        super().__init__(num_envs, device)
        self._forgetful = forgetful

    def step(self, actions: Any) -> tuple:
        observation, reward, terminated, truncated, info = super().step(actions)
        if not (terminated | truncated).any() or (self._forgetful and truncated.any()):
            info = {name: value for name, value in info.items() if not name.startswith("final")}
        return observation, reward, terminated, truncated, info


def test_final_observations_may_be_missing_where_no_row_is_truncated() -> None:
    spec, rows = probe(request_of()), 4
    always, sparing = (make_tensor_group(request_of(env), spec, rows, CPU) for env in (Schedules, Sparing))
    after, again = tensor_step(spec, rows), tensor_step(spec, rows)
    always.reset(0, after)
    sparing.reset(0, again)
    truncated = 0
    for _ in range(20):
        told, said = tensor_outcome(spec, rows), tensor_outcome(spec, rows)
        for group, outcome, step in ((always, told, after), (sparing, said, again)):
            group.step(torch.zeros(rows, 1, dtype=torch.int32), torch.zeros(rows, 0), outcome, step)
        ours, theirs = ((*each[:3], *(leaf[told.truncated] for leaf in each.finals)) for each in (told, said))
        assert all(map(torch.equal, ours, theirs))
        assert all(map(torch.equal, (*after.obs, after.first, after.active), (*again.obs, again.first, again.active)))
        truncated += int(told.truncated.sum())
    assert truncated and not sparing.faulty.any()


def test_final_observations_that_are_missing_where_a_row_is_truncated_are_a_fault() -> None:
    spec = probe(request_of())
    group, after = make_tensor_group(request_of(Sparing, forgetful=True), spec, 4, CPU), tensor_step(spec, 4)
    group.reset(0, after)
    words = r"info has no final_obs, and row 0 was truncated; an environment on the device with autoreset SAME_STEP"
    actions = torch.zeros(4, 1, dtype=torch.int32), torch.zeros(4, 0)
    for _ in range(3):
        group.step(*actions, tensor_outcome(spec, 4), after)
    with pytest.raises(EnvironmentFault, match=words):  # row 0's second episode ends
        group.step(*actions, tensor_outcome(spec, 4), after)


class Bits(Schedules):
    """The image is one of bits, as wide integers; row 2 has a 3 from the first step on, row 1 a -1."""

    def __init__(self, num_envs: int = 1, device: str = "cpu") -> None:
        super().__init__(num_envs, device)
        self.single_observation_space = spaces.Dict(
            dict(self.single_observation_space.items()) | {"eye": spaces.MultiBinary((3, 8, 8))}
        )

    def _observation(self) -> dict[str, Any]:
        eye = torch.ones(self.num_envs, 3, 8, 8, dtype=torch.int64)
        if self._steps:
            eye[1:3, 0, 0, 0] = torch.tensor([-1, 3])
        return super()._observation() | {"eye": eye}


def test_a_bit_outside_its_space_is_a_bad_value() -> None:
    spec = probe(request_of(Bits))
    group, after = make_tensor_group(request_of(Bits), spec, 4, CPU), tensor_step(spec, 4)
    group.reset(0, after)
    assert not group.faulty.any()
    group.step(torch.zeros(4, 1, dtype=torch.int32), torch.zeros(4, 0), tensor_outcome(spec, 4), after)
    assert group.faulty.tolist() == [False, True, True, False]
    assert after.active.tolist() == [True, False, False, True]


def single(num_envs: int = 1, device: str = "cpu") -> gymnasium.Env:
    return gymnasium.make("CartPole-v1")


def test_an_id_is_the_class_that_it_names() -> None:
    assert resolve_env("sfactory/TensorCartPole") is CartPole
    assert resolve_env("sfactory/TensorMemoryGrid") is MemoryGrid


def test_a_callable_that_makes_something_else_is_refused() -> None:
    with pytest.raises(ConfigError, match="takes num_envs and device, as an environment on the device does, but made"):
        probe(request_of(single))
    with pytest.raises(ConfigError, match="leave num_envs out of env_kwargs; --envs-per-worker sets it"):
        probe(request_of(num_envs=8))
    with pytest.raises(
        ConfigError, match=r"'lenght': 3.* do not fit MemoryGrid: .*; it takes num_envs, device, length"
    ):
        probe(request_of("sfactory/TensorMemoryGrid", lenght=3))
