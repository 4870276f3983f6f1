from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
from environments import Busy
from gymnasium import spaces
from short_runs import favour, short_run

from sfactory import LossConfig, ModelConfig, load_policy
from sfactory.errors import CheckpointError, ConfigError
from sfactory.model import build_model
from sfactory.runs.checkpoint import CheckpointStore


@pytest.fixture(scope="module")
def cartpole(tmp_path_factory):
    return short_run(tmp_path_factory.mktemp("policy") / "run", "CartPole-v1", steps=1024)


@pytest.fixture(scope="module")
def busy(tmp_path_factory):
    """A run with everything at once, and memory."""
    model = ModelConfig(core="lstm", core_size=8, encoder="mlp", features=16, normalize_obs=True)
    return short_run(tmp_path_factory.mktemp("policy") / "run", Busy, model=model)


def edit_model(run, **model):
    described = json.loads((run / "spaces.json").read_text())
    described["model"] |= model
    (run / "spaces.json").write_text(json.dumps(described))


def batch_of(observations):
    """Observations as a vector environment would give them."""
    return {
        "image": np.stack([o["image"] for o in observations]),
        "inner": tuple(np.stack([o["inner"][i] for o in observations]) for i in range(2)),
        "action_mask": np.stack([o["action_mask"] for o in observations]),
    }


def test_it_chooses_what_the_trained_weights_prefer(cartpole):
    policy = load_policy(cartpole)
    weights = CheckpointStore(cartpole / "checkpoints").load_latest().model
    model = build_model(policy.spec.observation, policy.spec.action, ModelConfig())
    model.load_state_dict(weights)
    obs = np.random.default_rng(0).normal(size=(64, 4)).astype(np.float32)
    with torch.no_grad():
        preferred = model((torch.from_numpy(obs),), None)[0].argmax(-1)
    actions, state = policy.act_batch(obs)
    assert actions.tolist() == preferred.tolist()
    assert 0 < sum(actions) < 64
    assert state is None
    assert [policy.act(o)[0] for o in obs] == preferred.tolist()


def test_it_plays_a_plain_loop_without_its_environment(busy):
    policy = load_policy(busy)
    env = Busy()
    obs, _ = env.reset(seed=3)
    state = None
    for _ in range(20):
        action, state = policy.act(obs, state, deterministic=False)
        assert env.action_space.contains(action)
        obs, _, terminated, truncated, _ = env.step(action)  # asserts that the mask is kept
        if terminated or truncated:
            obs, _ = env.reset()
            state = None


def test_memory_in_a_batch_is_that_of_single_episodes(busy):
    policy = load_policy(busy)
    envs = [Busy() for _ in range(3)]
    observations = [env.reset(seed=i)[0] for i, env in enumerate(envs)]
    first, batch_state, states = np.zeros(3, bool), None, [None] * 3
    moved = []
    for t in range(6):
        if t == 3:  # an episode begins in one row only
            states[1], first = None, np.array([False, True, False])
        batch, batch_state = policy.act_batch(batch_of(observations), batch_state, first=first)
        first = np.zeros(3, bool)
        for i, obs in enumerate(observations):
            action, states[i] = policy.act(obs, states[i])
            np.testing.assert_array_equal(action["move"], batch["move"][i])
            np.testing.assert_allclose(action["turn"], batch["turn"][i], rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(states[i][0], batch_state[i])
        moved.append(batch_state)
        observations = [env._observation() for env in envs]
    assert not torch.allclose(moved[0], moved[1])


def test_sampled_actions_follow_the_distribution_and_the_seed(tmp_path):
    run = short_run(tmp_path / "run", "CartPole-v1")
    favour(run, category=1, by=1.0)
    obs = np.zeros((20_000, 4), np.float32)
    actions, _ = load_policy(run, seed=5).act_batch(obs, deterministic=False)
    assert actions.mean() == pytest.approx(1 / (1 + np.exp(-1)), abs=0.01)
    assert (load_policy(run, seed=5).act_batch(obs, deterministic=False)[0] == actions).all()
    assert (load_policy(run, seed=6).act_batch(obs, deterministic=False)[0] != actions).any()
    assert load_policy(run).act_batch(obs)[0].all()


def test_the_best_checkpoint_is_not_the_latest(tmp_path):
    run = short_run(tmp_path / "run", "CartPole-v1")
    favour(run, category=0, episode_return=5.0)
    favour(run, category=1, episode_return=1.0)
    obs = np.zeros((8, 4), np.float32)
    assert load_policy(run).act_batch(obs)[0].all()
    assert not load_policy(run, "best").act_batch(obs)[0].any()
    with pytest.raises(ConfigError, match="newest"):
        load_policy(run, "newest")


class Masked(gym.Env):
    """Gives its mask in the info."""

    observation_space = spaces.Box(-1, 1, (2,))
    action_space = spaces.Discrete(3, start=1)

    def reset(self, *, seed=None, options=None):
        return np.zeros(2, np.float32), {"action_mask": np.array([0, 1, 1])}

    def step(self, action):
        return np.zeros(2, np.float32), 0.0, True, False, {"action_mask": np.array([0, 1, 1])}


def test_a_mask_in_the_info_is_passed_by_hand_and_needed(tmp_path):
    run = short_run(tmp_path / "run", Masked)
    favour(run, category=0)
    policy, obs = load_policy(run), np.zeros(2, np.float32)
    with pytest.raises(ValueError, match=r'info\["action_mask"\]'):
        policy.act(obs)
    assert policy.act(obs, action_mask=np.array([1, 1, 1]))[0] == 1
    assert policy.act(obs, action_mask=np.array([0, 0, 1]))[0] == 3
    masks = np.array([[0, 0, 1], [0, 1, 0]])
    assert policy.act_batch(np.zeros((2, 2), np.float32), action_mask=masks)[0].tolist() == [3, 2]
    with pytest.raises(ValueError, match="2 entries"):
        policy.act(obs, action_mask=np.array([0, 1]))
    for mask in (masks.T, masks[0]):  # whose entries would fit in another order
        with pytest.raises(ValueError, match="leading dimension of 2"):
            policy.act_batch(np.zeros((2, 2), np.float32), action_mask=mask)


def test_masks_may_be_a_list_of_rows(tmp_path):
    class Four(Masked):
        action_space = spaces.Discrete(4)

        def reset(self, *, seed=None, options=None):
            return np.zeros(2, np.float32), {"action_mask": np.ones(4, bool)}

    policy, masks = load_policy(short_run(tmp_path / "run", Four)), np.eye(4, dtype=bool)[[1, 3, 0, 2]]
    for given in (masks, list(masks), masks.tolist()):
        assert policy.act_batch(np.zeros((4, 2), np.float32), action_mask=given)[0].tolist() == [1, 3, 0, 2]
    with pytest.raises(ValueError, match="3 action masks for 4 rows"):
        policy.act_batch(np.zeros((4, 2), np.float32), action_mask=list(masks[:3]))


def test_masks_of_a_tuple_may_be_as_gymnasiums_vector_environments_give_them(tmp_path):
    class Pair(gym.Env):
        observation_space = spaces.Box(-1, 1, (2,))
        action_space = spaces.Tuple((spaces.Discrete(2), spaces.Discrete(3)))

        def reset(self, *, seed=None, options=None):
            return np.zeros(2, np.float32), {"action_mask": (np.array([0, 1]), np.roll([1, 0, 0], seed or 0))}

        def step(self, action):
            return np.zeros(2, np.float32), 0.0, True, False, self.reset()[1]

    policy, envs = load_policy(short_run(tmp_path / "run", Pair)), gym.vector.SyncVectorEnv([Pair] * 3)
    observations, info = envs.reset(seed=0)
    actions, _ = policy.act_batch(observations, action_mask=info["action_mask"])
    assert [part.tolist() for part in actions] == [[1, 1, 1], [0, 1, 2]]


def test_a_mask_entry_that_is_missing_is_asked_for(busy):
    observation, _ = Busy().reset(seed=1)
    del observation["action_mask"]
    with pytest.raises(ValueError, match="their action_mask entry"):
        load_policy(busy).act(observation)


def test_a_state_of_other_rows_is_refused(busy):
    policy, env = load_policy(busy), Busy()
    one, batch = env.reset(seed=1)[0], batch_of([env.reset(seed=seed)[0] for seed in range(3)])
    _, state = policy.act(one)
    _, states = policy.act_batch(batch)
    for call, given in (
        (policy.act, states),
        (policy.act, state[:, :-1]),
        (policy.act, state[0]),
        (policy.act_batch, state),
        (policy.act_batch, states[:2]),
    ):
        with pytest.raises(ValueError, match=r"the state has shape .* None where"):
            call(one if call == policy.act else batch, given)
    torch.testing.assert_close(policy.act(one, state.numpy())[1], policy.act(one, state)[1])


def test_a_state_may_be_changed_in_place(busy):
    policy, batch = load_policy(busy), batch_of([Busy().reset(seed=seed)[0] for seed in range(3)])
    _, state = policy.act_batch(batch)
    state[np.array([True, False, True])] = 0
    assert state[1].any() and not state[0].any()
    policy.act_batch(batch, state)


def test_a_batch_without_rows_is_refused(cartpole):
    for bad in (3.0, np.zeros((0, 4), np.float32), np.float32(1), np.zeros(4, np.float32)):
        with pytest.raises(ValueError, match="no rows"):
            load_policy(cartpole).act_batch(bad)


def test_loading_leaves_the_random_state_of_its_caller(busy):
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    load_policy(busy)
    assert torch.equal(torch.rand(1), expected)


def test_observations_that_do_not_fit_are_refused(cartpole):
    policy = load_policy(cartpole)
    for bad in (np.zeros(3, np.float32), np.full(4, np.nan, np.float32), {"x": 1}):
        with pytest.raises(ValueError, match="observation") as told:
            policy.act(bad)
        assert "validate_observations" not in str(told.value), "which it does not heed"
    with pytest.raises(ValueError, match="observation"):
        policy.act_batch(np.zeros((2, 5), np.float32))


def test_it_is_told_in_which_environment_it_will_act(cartpole):
    load_policy(cartpole, env=gym.make("CartPole-v1"))
    load_policy(cartpole, env=gym.make_vec("CartPole-v1", num_envs=2))
    with pytest.raises(ConfigError, match="observation space"):
        load_policy(cartpole, env=gym.make("Acrobot-v1"))
    with pytest.raises(ConfigError, match="env is 'CartPole-v1'; pass an environment"):
        load_policy(cartpole, env="CartPole-v1")
    for device in ("cudaa", "xpu", "meta"):
        with pytest.raises(ConfigError, match=f"device is '{device}'; use auto"):
            load_policy(cartpole, device=device)


FOREIGN = """
import torch
from torch import nn

class Encoder(nn.Module):
    out_features = 4

    def __init__(self, leaf):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x):
        return x * self.scale
"""


def test_a_strangers_folder_imports_nothing_unasked(tmp_path, monkeypatch):
    (tmp_path / "foreign_networks.py").write_text(FOREIGN)
    monkeypatch.syspath_prepend(tmp_path)
    run = short_run(tmp_path / "run", "CartPole-v1", model=ModelConfig(encoder="foreign_networks:Encoder"))
    foreign = sys.modules.pop("foreign_networks")
    with pytest.raises(ConfigError, match=r"foreign_networks:Encoder.*model=ModelConfig.*--trust"):
        load_policy(run)
    assert "foreign_networks" not in sys.modules
    asked = load_policy(run, model=ModelConfig(encoder=foreign.Encoder))
    trusted = load_policy(run, trust=True)
    obs = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
    assert asked.act_batch(obs)[0].tolist() == trusted.act_batch(obs)[0].tolist()


def test_a_class_that_is_not_in_the_folder_is_asked_for(tmp_path, monkeypatch):
    (tmp_path / "foreign_networks.py").write_text(FOREIGN)
    monkeypatch.syspath_prepend(tmp_path)
    from foreign_networks import Encoder

    run = short_run(tmp_path / "run", "CartPole-v1", model=ModelConfig(encoder=Encoder))
    with pytest.raises(ConfigError, match=r"<Encoder>.*ModelConfig\(encoder=\.\.\.\)"):
        load_policy(run, trust=True)
    assert load_policy(run, model=ModelConfig(encoder=Encoder)).act(np.zeros(4, np.float32))[0] in (0, 1)


def test_a_checkpoint_of_an_earlier_sfactory_without_a_unit_of_values_is_loaded_and_resumed(tmp_path):
    loss = LossConfig(normalize_returns=True)
    run = short_run(tmp_path / "run", "CartPole-v1", loss=loss)
    store = CheckpointStore(run / "checkpoints")
    snapshot = store.load_latest()
    weights = {name: tensor for name, tensor in snapshot.model.items() if not name.startswith("unit.")}
    assert len(weights) == len(snapshot.model) - 2
    store.save(dataclasses.replace(snapshot, model=weights, env_steps=snapshot.env_steps + 1))
    unit = load_policy(run).model.unit
    assert float(unit.mean) == float(snapshot.model["unit.mean"]) != 0.0
    short_run(run, "CartPole-v1", steps=512, loss=loss)
    assert store.load_latest().env_steps >= 512


def test_fields_that_are_not_passed_stay_as_saved(tmp_path):
    run = short_run(tmp_path / "run", "CartPole-v1", model=ModelConfig(hidden=(8,), core="gru", core_size=4))
    assert load_policy(run, model=ModelConfig(encoder="mlp")).model.state_size == 4


def test_what_is_missing_or_damaged_is_said(tmp_path):
    with pytest.raises(ConfigError, match="holds no run"):
        load_policy(tmp_path / "nowhere")
    run = short_run(tmp_path / "run", "CartPole-v1")
    edit_model(run, hidden=[32])
    with pytest.raises(CheckpointError, match="do not fit"):
        load_policy(run)
    edit_model(run, hidden=[64, 64])
    (run / "spaces.json").unlink()
    with pytest.raises(ConfigError, match=r"spaces\.json is missing"):
        load_policy(run)
    short_run(tmp_path / "run", "CartPole-v1")  # which has nothing else to do
    load_policy(run)
    described = json.loads((run / "spaces.json").read_text())
    del described["model"]
    (run / "spaces.json").write_text(json.dumps(described))
    with pytest.raises(CheckpointError, match=r"written by an earlier sfactory .* training command again"):
        load_policy(run)
    short_run(tmp_path / "run", "CartPole-v1")
    load_policy(run)
    weights = next((run / "checkpoints").glob("*.safetensors"))
    for path in (run / "checkpoints").glob("*.safetensors"):
        path.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(CheckpointError, match="bytes"):
        load_policy(run)
    for path in (run / "checkpoints").iterdir():
        path.unlink()
    with pytest.raises(ConfigError, match="no checkpoint yet"):
        load_policy(run)


def test_a_run_is_not_continued_in_other_spaces(tmp_path):
    def wide(size):
        def make():
            env = gym.make("CartPole-v1")
            return gym.wrappers.TransformObservation(
                env, lambda obs: np.resize(obs, size), spaces.Box(-np.inf, np.inf, (size,))
            )

        make.__qualname__ = "make"
        return make

    run = short_run(tmp_path / "run", wide(4))
    with pytest.raises(ConfigError, match=r"observation space: .*\(4,\).*\(5,\)"):
        short_run(tmp_path / "run", wide(5), steps=256)
    assert load_policy(run).act(np.zeros(4, np.float32))[0] in (0, 1)


PLAIN_PROCESS = """
import sys

ALLOWED = {"sfactory", "torch", "torchgen", "functorch", "numpy", "typing_extensions"}
WITHOUT = {name.partition(".")[0] for name in sys.argv[3].split(",")} - ALLOWED


class Without:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in WITHOUT:
            raise ModuleNotFoundError(name)


sys.meta_path.insert(0, Without())
import numpy as np
from sfactory import load_policy

batch = dict(np.load(sys.argv[2]))
obs = {"image": batch["image"], "inner": (batch["0"], batch["1"]), "action_mask": batch["action_mask"]}
action, state = load_policy(sys.argv[1]).act_batch(obs)
assert not WITHOUT & {name.partition(".")[0] for name in sys.modules}
np.savez(sys.argv[2], move=action["move"], turn=action["turn"], state=state.numpy())
"""


def test_a_plain_process_plays_with_torch_and_numpy_alone(busy, tmp_path):
    project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]
    names = {re.split(r"[\[<>=]", text)[0] for text in project["dependencies"]}
    modules = {name.replace("-", "_") for name in names} | {
        "llvmlite",
        "farama_notifications",
        "docstring_parser",
        "yaml",
    }
    assert {"gymnasium", "numba", "faster_fifo", "tyro", "rich", "safetensors"} <= modules
    observations = [Busy().reset(seed=i)[0] for i in range(8)]
    batch = batch_of(observations)
    expected, state = load_policy(busy).act_batch(batch)
    inner = dict(zip("01", batch["inner"], strict=True))
    np.savez(tmp_path / "batch.npz", image=batch["image"], action_mask=batch["action_mask"], **inner)
    command = [sys.executable, "-c", PLAIN_PROCESS, str(busy), str(tmp_path / "batch.npz"), ",".join(sorted(modules))]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    subprocess.run(command, check=True, env=environment, timeout=120)
    found = np.load(tmp_path / "batch.npz")
    for name in ("move", "turn"):
        np.testing.assert_array_equal(found[name], expected[name])
    np.testing.assert_array_equal(found["state"], state.numpy())
