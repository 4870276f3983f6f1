"""What a run says of itself before it begins."""

from __future__ import annotations

import functools
import multiprocessing
import shutil
from pathlib import Path

import gymnasium
import numpy as np
import pytest
import torch
from environments import Pixels
from gymnasium import spaces
from small_tasks import Crowd
from torch import nn
from whole_runs import config_for

from sfactory import Config, train
from sfactory.config import LogConfig, LossConfig, ModelConfig, RuntimeConfig, devices, from_dict, resolve, to_dict
from sfactory.config.command_line import from_command_line
from sfactory.config.declaring import given_names
from sfactory.data.batch import Batch
from sfactory.distributions import ActionDistribution
from sfactory.errors import ConfigError
from sfactory.profiling import tune
from sfactory.runtime.planning import make_plan, notes_on


@pytest.fixture(autouse=True)
def compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder of numba's with one compiled kernel."""
    kept = tmp_path / "numba"
    (kept / "kernels").mkdir(parents=True)
    (kept / "kernels" / "dense.f-1.py311.1.nbi").touch()
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(kept))
    return kept


def test_the_first_run_says_that_kernels_are_compiled(compiled: Path):
    shutil.rmtree(compiled)
    plan = make_plan(resolve(Config(env="CartPole-v1", steps=200_000)))
    assert [note for note in notes_on(plan) if "kernels are compiled" in note]


def test_the_second_run_does_not_say_so_of_a_model_with_images_either(compiled: Path):
    for kernel in compiled.rglob("*.nbi"):
        kernel.rename(kernel.with_name("objective.f-1.py311.1.nbi"))
    plan = make_plan(resolve(Config(env="CartPole-v1", steps=200_000)))
    assert not [note for note in notes_on(plan) if "kernels are compiled" in note]


def test_a_batch_that_is_much_longer_than_the_run_is_refused():
    with pytest.raises(ConfigError, match="batch_size 11,264 is more than 10 times steps 1,000: "):
        make_plan(resolve(Config(env="CartPole-v1", steps=1000, batch_size=11 * 1024)))
    make_plan(resolve(Config(env="CartPole-v1", steps=10)))  # the preset's own


def test_a_run_of_few_updates_names_the_figures_and_the_flags():
    (note,) = notes_on(make_plan(resolve(Config(env="CartPole-v1", preset="default", steps=10_000, batch_size=1024))))
    assert "10,000 steps are only 320 updates (10 batches of 1,024 x 4 epochs x 8 minibatches)" in note
    for flag in ("--steps", "--epochs", "--optim.minibatches", "--batch-size"):
        assert flag in note
    assert notes_on(make_plan(resolve(Config(env="CartPole-v1", preset="default", steps=20_000)))) == []


def test_a_batch_that_is_not_the_presets_is_told_unless_it_was_asked_for():
    (note,) = notes_on(make_plan(resolve(Config(env=Crowd, workers=2))))
    for part in (
        "batch_size is 1,152, not the preset's 1,024",
        "rollout 32 x rows 9 = 288",
        "8 minibatches",
        "--envs-per-worker",
    ):
        assert part in note
    for flags in ([], ["--batch-size", "2048"]):
        assert notes_on(make_plan(from_command_line(["--env", "CartPole-v1", *flags], "test"))) == []
    assert notes_on(make_plan(resolve(Config(env=Crowd, batch_size=768)))) == []


@pytest.mark.parametrize(
    ("settings", "batches"),
    [
        ({"workers": 62, "model": ModelConfig(core="lstm")}, 0),  # 3.9
        ({"workers": 126, "model": ModelConfig(core="lstm")}, 8),
        ({"workers": 126, "model": ModelConfig(core="lstm"), "sync": True}, 0),
        ({"workers": 126, "model": ModelConfig(core="lstm"), "preset": "none"}, 0),  # as it was asked for
        ({"workers": 62}, 0),  # segments are shorter
    ],
)
def test_samples_that_are_many_batches_old_are_told_with_the_workers_that_have_younger_ones(
    settings: dict, batches: int
) -> None:
    plan = make_plan(resolve(Config(env="CartPole-v1", device="cpu", **settings)))
    notes = [note for note in notes_on(plan) if "under way" in note]
    assert len(notes) == bool(batches)
    if batches:
        assert f"{batches} batches of samples are under way at a time, in the segments of 126 workers" in notes[0]
        fewer = int(notes[0].partition("--workers ")[2].partition(" ")[0])
        younger = make_plan(resolve(Config(env="CartPole-v1", device="cpu", **settings | {"workers": fewer})))
        assert not [note for note in notes_on(younger) if "under way" in note]


class Picture(gymnasium.Env):
    action_space = spaces.Discrete(2)

    def __init__(self, *shape: int) -> None:
        self.observation_space = spaces.Box(0, 255, shape, np.uint8)

    def reset(self, **_):
        return self.observation_space.sample(), {}


@pytest.mark.parametrize(
    ("shape", "told"), [((96, 96), 1), ((4, 48, 48, 3), 1), ((48, 48, 3), 0), ((128,), 0), ((5, 9), 0)]
)
def test_pictures_that_enter_dense_layers_are_told(shape: tuple[int, ...], told: int):
    env = functools.partial(Picture, *shape)
    notes = notes_on(make_plan(resolve(Config(env=env, steps=200_000))))
    assert [("enters dense layers" in note) and (str(shape) in note) for note in notes] == [True] * told
    assert notes_on(make_plan(resolve(Config(env=env, steps=200_000, model=ModelConfig(encoder="mlp"))))) == []


class ManyCategories(gymnasium.Env):
    def __init__(self, observations: int, actions: int) -> None:
        self.observation_space, self.action_space = spaces.Discrete(observations), spaces.Discrete(actions)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return 0, {}

    def step(self, action):
        return 0, 0.0, False, False, {}


@pytest.mark.parametrize(
    ("observations", "actions", "parts"),
    [
        (10_000, 10_000, ()),
        (10_001, 2, ("observations have 10,001 categories", "nn.Embedding", "MultiDiscrete")),
        (2, 10_001, ("actions have 10,001 categories", "MultiDiscrete")),
    ],
)
def test_very_many_categories_are_told_with_what_is_faster(observations: int, actions: int, parts: tuple) -> None:
    kwargs = {"observations": observations, "actions": actions}
    plan = make_plan(resolve(Config(env=ManyCategories, env_kwargs=kwargs, model=ModelConfig(hidden=(8,)))))
    notes = [note for note in notes_on(plan) if "categories" in note]
    assert len(notes) == bool(parts)
    assert all(part in notes[0] for part in parts)


@pytest.mark.parametrize(("display", "times"), [("plain", 1), ("none", 0)])
def test_a_run_says_it_once_at_its_start(display: str, times: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    train(
        config_for(tmp_path, "CartPole-v1", steps=256, serial=True, log=LogConfig(display=display, tensorboard=False))
    )
    assert capsys.readouterr().out.count("256 steps are only 2 updates") == times


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with a GPU, as far as planning asks for it."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("settings", "device", "reason"),
    [
        ({"env": "CartPole-v1"}, "cpu", "weights in dense layers, which a GPU would spend its time launching"),
        ({"env": Pixels}, "cuda", "observations have images"),
        ({"env": "CartPole-v1", "model": ModelConfig(core="lstm")}, "cuda", "more than dense layers"),
        ({"env": "CartPole-v1", "model": ModelConfig(hidden=(1024, 1024))}, "cuda", "weights in dense layers"),
    ],
    ids=["small", "images", "memory", "large"],
)
def test_a_device_that_is_left_open_is_chosen_by_the_model_and_told_with_its_reason(
    settings: dict, device: str, reason: str
) -> None:
    plan = make_plan(resolve(Config(**settings)))
    assert plan.config.device == device
    (note,) = [note for note in notes_on(plan) if "trains on" in note]
    assert reason in note and f"trains on {device}" in note and "--device" in note
    workers = plan.config.runtime.policy_workers
    assert workers == (1 if device == "cuda" or plan.config.workers == 1 else 0)


@pytest.mark.parametrize(
    ("named", "settings", "expected"),
    [
        ("cuda:1,cuda:2", {"workers": 3}, 2),
        ("cpu,cuda:1", {"workers": 3}, 2),
        ("cuda:1", {"workers": 3}, 1),
        ("cpu,cpu", {"workers": 3}, 0),
        ("cuda:1,cuda:2", {"serial": True}, 1),
        ("cuda:1,cuda:2", {"workers": 3, "policy_workers": 1}, 1),
    ],
)
@pytest.mark.usefixtures("gpu")
def test_each_gpu_that_is_named_for_inference_has_a_policy_worker(
    named: str, settings: dict, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    runtime = RuntimeConfig(inference_device=named, policy_workers=settings.pop("policy_workers", None))
    plan = make_plan(resolve(Config(env="CartPole-v1", runtime=runtime, **settings)))
    assert plan.config.runtime.policy_workers == expected
    if not plan.inline_inference and not plan.config.serial:
        used = {devices.inference_device(plan.config, worker) for worker in range(plan.policy_workers)}
        assert len(used) == expected


class Told(gymnasium.Env):
    """Says in words what is to be done."""

    observation_space = spaces.Dict({"place": spaces.Box(0.0, 1.0, (2,)), "task": spaces.Dict(mission=spaces.Text(9))})
    action_space = spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[dict, dict]:
        return {"place": np.zeros(2, np.float32), "task": {"mission": "go"}}, {}


def test_a_number_that_yaml_takes_for_text_is_told() -> None:
    kwargs = from_dict({"env": "CartPole-v1", "env_kwargs": {"sutton_barto_reward": "1e-3"}, "steps": 200_000})
    (note,) = notes_on(make_plan(resolve(kwargs)))
    assert note.startswith("env_kwargs.sutton_barto_reward is the text '1e-3': ") and "1.0e-3" in note


def test_text_that_is_left_out_is_told() -> None:
    notes = notes_on(make_plan(resolve(Config(env=Told))))
    assert "the policy does not see task/mission of the observation, which is text" in notes
    assert not [note for note in notes_on(make_plan(resolve(Config(env="CartPole-v1")))) if "text" in note]


class Grid(gymnasium.Env):
    """Without a number in it."""

    observation_space, action_space = spaces.Discrete(3), spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[int, dict]:
        return 0, {}


@pytest.mark.parametrize(
    ("settings", "note"),
    [
        ({"model": {"core_size": 64}}, "model.core_size 64 has no effect, since model.core is neither gru nor lstm"),
        ({"model": {"features": 256}}, "model.features 256 has no effect, since the observation has no image"),
        (
            {"model": {"normalize_images": True}},
            "model.normalize_images True has no effect, since the observation has no image of pixels",
        ),
        ({"env": Pixels, "model": {"hidden": (8,)}}, "since all parts of the observation are images"),
        ({"model": {"squash": "tanh"}}, "model.squash tanh has no effect, since actions are not continuous"),
        ({"env": Grid, "preset": "none", "model": {"normalize_obs": True}}, "the observation has no floats"),
        ({"optim": {"schedule": "constant", "hold": 0.5}}, "optim.schedule is constant, not linear"),
        ({"optim": {"target_kl": 0.02}}, "optim.schedule is linear, not adaptive_kl"),
        ({"algo": "impala", "loss": {"clip": 0.1}}, "algo is impala, whose loss has no clip"),
        ({"algo": "ppo", "loss": {"tv_limit": 0.2}}, "algo is ppo, not appo"),
        ({"algo": "ppo", "loss": {"rho_bar": 2.0}}, "loss.rho_bar 2.0 has no effect, since loss.estimator is GAE"),
        ({"algo": "ppo", "loss": {"rho_bar_pg": 2.0}}, "algo is ppo, which has no importance weights"),
        ({"loss": {"exploration": "kl"}}, "loss.exploration kl has no effect, since loss.entropy_coef is 0"),
        ({"epochs": 1, "optim": {"minibatches": 1}, "loss": {"value_clip": 0.2}}, "a batch has one update"),
    ],
)
def test_a_setting_that_has_no_effect_is_told(settings: dict, note: str) -> None:
    (told,) = notes_on(make_plan(resolve(Config(**{"env": "CartPole-v1"} | settings))))
    assert note in told


@pytest.mark.parametrize(
    "settings",
    [
        {"model": {"core": "lstm", "core_size": 64}},
        {"env": "Pendulum-v1", "model": {"squash": "tanh", "initial_log_std": -1.0}},
        {"env": Pixels, "model": {"features": 64}},
        {"optim": {"hold": 0.5}},
        {"algo": "ppo", "loss": {"clip": 0.1, "estimator": "vtrace", "c_bar": 2.0}},
        {"loss": {"exploration": "kl", "entropy_coef": 0.01}},
    ],
)
def test_a_setting_that_has_an_effect_is_not(settings: dict) -> None:
    assert notes_on(make_plan(resolve(Config(**{"env": "CartPole-v1"} | settings)))) == []


def test_a_whole_configuration_that_is_given_again_has_nothing_to_tell() -> None:
    plan = make_plan(resolve(Config(env="CartPole-v1")))
    assert notes_on(make_plan(resolve(from_dict(to_dict(plan.config))))) == []


class Bare(nn.Module):
    """A model with what it must have alone."""

    state_size = 0

    def __init__(self, observation, action, config) -> None:
        super().__init__()
        self.read = nn.Linear(4, 3)

    def forward(self, obs, state=None):
        return *self.unroll(obs, None), None

    def unroll(self, obs, first, state=None):
        answer = self.read(obs[0])
        return answer[..., :2], answer[..., 2]


def test_what_a_model_of_ones_own_leaves_undone_is_told() -> None:
    model = {"model": Bare, "normalize_obs": True}
    notes = notes_on(make_plan(resolve(Config(env="CartPole-v1", model=model))))
    assert ["observations are not normalised" in notes[0], "has no rescale_values" in notes[1]] == [True, True]
    off = {"model": model | {"normalize_obs": False}, "loss": {"normalize_returns": False}}
    assert notes_on(make_plan(resolve(Config(env="CartPole-v1", **off)))) == []


class Same:
    """A source of batches."""

    def __init__(self, fresh: int, config: Config) -> None:
        self.columns = fresh

    def __call__(self, fresh: Batch) -> Batch:
        return fresh


@pytest.mark.parametrize(("algo", "times"), [("ppo", 1), ("appo", 0)])
def test_older_samples_without_weights_are_told(algo: str, times: int) -> None:
    notes = notes_on(make_plan(resolve(Config(env="CartPole-v1", algo=algo, batch_source=Same))))
    assert ["batch_source" in note for note in notes] == [True] * times


def test_what_a_plan_decides_does_not_count_as_given_by_the_user() -> None:
    config = make_plan(resolve(Config(env="CartPole-v1", model=ModelConfig(hidden=(32,))))).config
    assert (given_names(config.model), given_names(config.runtime)) == ({"hidden"}, frozenset())


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_device_that_is_named_is_taken(device: str) -> None:
    plan = make_plan(resolve(Config(env="CartPole-v1", device=device)))
    assert plan.config.device == device
    assert not [note for note in notes_on(plan) if "trains on" in note]


def test_without_a_gpu_there_is_nothing_to_tell() -> None:
    plan = make_plan(resolve(Config(env="CartPole-v1")))
    assert not [note for note in notes_on(plan) if "trains on" in note]


@pytest.mark.usefixtures("gpu")
def test_tuning_tries_both_devices_where_it_was_left_open() -> None:
    plan = make_plan(resolve(Config(env="CartPole-v1")))
    search = tune._Search(plan, 100.0, lambda _: None)
    (other,) = search._values("device", 1)
    candidate = search._candidate("device", other)
    assert candidate["device"] == "cuda" and candidate["runtime.policy_workers"] == 1
    named = tune._Search(make_plan(resolve(Config(env="CartPole-v1", device="cpu"))), 100.0, lambda _: None)
    assert not [*named._values("device", 1)]


class Uniform(ActionDistribution):
    """Its divergence from the uniform policy is one of continuous actions, too."""

    def kl_from_uniform(self, params, mask=None):
        return params.square().mean(-1)


def test_the_device_is_refused_to_an_environment_that_cannot_be_there():
    with pytest.raises(ConfigError, match="env_backend is tensors, but CartPole-v1 is not made with num_envs and dev"):
        make_plan(resolve(Config(env="CartPole-v1", env_backend="tensors")))


def test_a_bonus_that_continuous_actions_do_not_get_is_refused():
    loss = LossConfig(entropy_coef=0.5, exploration="kl")
    with pytest.raises(ConfigError, match=r"loss\.exploration kl needs categorical actions"):
        make_plan(resolve(Config(env="Pendulum-v1", loss=loss)))
    make_plan(resolve(Config(env="CartPole-v1", loss=loss)))
    make_plan(resolve(Config(env="Pendulum-v1", loss=loss, model=ModelConfig(distribution=Uniform))))


def test_what_cannot_be_sent_to_worker_processes_is_told_before_anything_starts(tmp_path: Path):
    def make(level: object) -> gymnasium.Env:
        return gymnasium.make("CartPole-v1")

    shared = {"level": multiprocessing.Value("i", 0)}
    with pytest.raises(ConfigError, match=r"cannot be sent .*inheritance.*a file's name in place of a multiproc"):
        train(config_for(tmp_path, make, env_kwargs=shared))
    assert not (tmp_path / "run").exists()
    assert make_plan(resolve(config_for(tmp_path, make, env_kwargs=shared, serial=True))).config.serial


def test_a_daemonic_process_is_told_to_run_in_one_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setitem(multiprocessing.current_process()._config, "daemon", True)
    with pytest.raises(ConfigError, match=r"use serial \(--serial\)"):
        train(config_for(tmp_path, "CartPole-v1"))
    assert not (tmp_path / "run").exists()
    assert train(config_for(tmp_path, "CartPole-v1", serial=True, steps=256)).status == "completed"
