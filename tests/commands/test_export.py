"""Exported policies compute what the policy computes, without sfactory; the folder for the Hub is complete."""

from __future__ import annotations

import base64
import io
import json
import shutil
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
import yaml
from commands import Command
from examples.distribution import Beta
from gymnasium import spaces
from gymnasium.vector.utils import batch_space
from short_runs import begun_run, favour, short_run
from torch import Tensor, nn

from sfactory import Config, ModelConfig, load_policy
from sfactory.commands import main
from sfactory.commands.export import FORMATS, export, export_folder
from sfactory.commands.export.formats import largest_difference, onnx_file, torch_file
from sfactory.commands.export.portable import PortablePolicy, given_dtype
from sfactory.commands.runs import list_runs
from sfactory.envs.interface import EnvSpec
from sfactory.errors import ConfigError, SfactoryError
from sfactory.model import ActorCritic, build_model
from sfactory.player import Player
from sfactory.policy import Policy, load_snapshot
from sfactory.spaces import ActionSpec, ObservationSpec

onnxruntime = pytest.importorskip("onnxruntime")

OBSERVATIONS, STEPS = 1000, 20
PATIENCE_S = 150.0
FLAT = spaces.Box(-3, 3, (6,))
MIXED = spaces.Dict({
    "speed": spaces.Box(-np.inf, np.inf, (3,), np.float64),
    "gear": spaces.Discrete(5, start=-1),
    "dials": spaces.Tuple((spaces.MultiDiscrete([3, 4]), spaces.MultiBinary(4))),
})  # fmt: skip
MASKED = spaces.Dict({"place": spaces.Box(-1, 1, (2,)), "action_mask": spaces.MultiBinary(7)})
HALF_OPEN = spaces.Box(np.array([-2, -np.inf, 0], np.float32), np.array([2, 1, np.inf], np.float32))
TWO_LAYERS = ModelConfig(core="lstm", core_size=8, core_layers=2, normalize_obs=True)


class Own(ActorCritic):
    """A whole model of a user's."""

    def __init__(self, observation, action, config) -> None:
        super().__init__(observation, action, config)
        self.gain = nn.Parameter(torch.tensor(3.0))

    def forward(self, obs, state=None):
        params, value, state = super().forward(obs, state)
        return params * self.gain, value.sinh(), state

    def unroll(self, obs, first, state=None):
        params, value = super().unroll(obs, first, state)
        return params * self.gain, value.sinh()


CASES: dict[str, tuple[spaces.Space, spaces.Space, ModelConfig]] = {
    "flat": (FLAT, spaces.Discrete(4), ModelConfig(normalize_obs=True)),
    "image": (spaces.Box(0, 255, (12, 12, 3), np.uint8), spaces.Discrete(3, start=2), ModelConfig(features=16)),
    "grid": (spaces.Box(0, 9, (7, 7, 2), np.uint8), spaces.Discrete(3), ModelConfig(features=16)),
    "dict": (MIXED, spaces.MultiDiscrete([3, 2, 5]), ModelConfig(normalize_obs=True)),
    "masks": (MASKED, spaces.Tuple((spaces.Discrete(4), spaces.Discrete(3))), ModelConfig()),
    "clip": (FLAT, spaces.Dict({"gas": HALF_OPEN, "horn": spaces.MultiBinary(2)}), ModelConfig(adaptive_std=True)),
    "tanh": (FLAT, spaces.Box(-2, 4, (2, 2), np.float64), ModelConfig(squash="tanh")),
    "lstm": (FLAT, spaces.Discrete(4), TWO_LAYERS),
    "gru": (MIXED, spaces.Box(-1, 1, (2,)), ModelConfig(core="gru", core_size=8, shared_critic=False)),
    "own model": (FLAT, spaces.Discrete(4), ModelConfig(model=Own)),
    "own distribution": (FLAT, spaces.Box(-2, 2, (2,)), ModelConfig(distribution=Beta)),
}


def policy_of(observation: spaces.Space, action: spaces.Space, config: ModelConfig) -> Policy:
    """With random weights that make large differences between actions, moments, and a unit of values."""
    torch.manual_seed(1)
    seen, done = ObservationSpec.from_space(observation), ActionSpec.from_space(action, config.squash)
    model = build_model(seen, done, config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.startswith("policy"):
                parameter.mul_(60).add_(0.3 * torch.randn_like(parameter))
        for name, buffer in model.named_buffers():
            if name.startswith(("normalizer.mean", "normalizer.var")):
                buffer.add_(torch.rand_like(buffer))
        model.unit.mean.fill_(-7.0)
        model.unit.std.fill_(2.5)
    spec = EnvSpec(seen, done, masked=seen.mask_path is not None)
    return Policy(spec, model, torch.device("cpu"))


def observations(space: spaces.Space, seed: int) -> Any:
    """A step's observations of all rows, as a vector environment gives them."""
    batch = batch_space(space, OBSERVATIONS // STEPS)
    batch.seed(seed)
    found = batch.sample()
    if isinstance(space, spaces.Dict) and "action_mask" in space.spaces:
        found["action_mask"][:, [0, 4]] = 1  # some action is allowed in each component
    return found


def by_name(policy: Policy, batch: Any, state: Tensor | None, state_size: int) -> dict[str, Tensor]:
    """The inputs of an exported file."""
    inputs = {}
    for leaf, value in zip(policy.spec.observation.leaves, policy.spec.observation.values(batch), strict=True):
        inputs[leaf.name] = torch.from_numpy(np.asarray(value).astype(given_dtype(leaf)))
    if policy.spec.masked:
        inputs["action_mask"] = torch.from_numpy(batch["action_mask"].astype(bool))
    if state_size:
        inputs["state"] = torch.zeros(OBSERVATIONS // STEPS, state_size) if state is None else state
    return inputs


def parts_of(action: Any, name: str = "action") -> Iterator[tuple[str, np.ndarray]]:
    if isinstance(action, dict):
        for key, value in action.items():
            yield from parts_of(value, f"{name}/{key}")
    elif isinstance(action, tuple):
        for index, value in enumerate(action):
            yield from parts_of(value, f"{name}/{index}")
    else:
        yield name, np.asarray(action)


@pytest.mark.parametrize("case", CASES)
def test_files_give_the_policys_actions_for_1000_observations(case: str) -> None:
    policy = policy_of(*CASES[case])
    portable = PortablePolicy(policy)
    played = {"onnx": onnx_file(portable, {"env": "test"})[1], "torch": torch_file(portable, {"env": "test"})[1]}
    for play in played.values():
        assert largest_difference(portable, play) < 1e-4
    memory: dict[str, Tensor | None] = dict.fromkeys((*played, "policy"))
    chosen = []
    for step in range(STEPS):
        batch = observations(CASES[case][0], step)
        expected, memory["policy"] = policy.act_batch(batch, memory["policy"])
        chosen.append(dict(parts_of(expected)))
        for name, play in played.items():
            outputs = play(by_name(policy, batch, memory[name], portable.state_size))
            memory[name] = outputs.get("next_state")
            for part, action in parts_of(expected):
                found = outputs[part].numpy()
                assert (found.dtype, found.shape) == (action.dtype, action.shape)
                np.testing.assert_allclose(found, action, rtol=1e-4, atol=1e-5)
            assert outputs["value"].shape == (OBSERVATIONS // STEPS,)
        if portable.state_size:
            torch.testing.assert_close(memory["onnx"], memory["policy"], rtol=1e-4, atol=1e-5)
    for part in chosen[0]:
        assert len(np.unique(np.concatenate([actions[part].ravel() for actions in chosen]))) > 1


def spoilt(name: str, spoil: Any) -> Any:
    """A file of a policy with memory, whose output of a name is another one."""

    def play(inputs: Any) -> dict[str, Tensor]:
        outputs = portable(inputs)
        return outputs | {name: spoil(outputs[name])}

    portable = PortablePolicy(policy_of(*CASES["lstm"]))
    return portable, play


@pytest.mark.parametrize("name", ["action", "params", "value", "next_state"])
@pytest.mark.parametrize("spoil", [lambda x: x + 1, lambda x: torch.full_like(x.float(), torch.nan), lambda x: x[:-1]])
def test_a_file_that_computes_something_else_is_found_out(name: str, spoil: Any) -> None:
    with pytest.raises(SfactoryError, match="other figures than the policy"):
        largest_difference(*spoilt(name, spoil))


def test_figures_that_are_nan_in_both_differ_in_nothing() -> None:
    portable, play = spoilt("value", lambda value: value)
    portable.model.unit.mean.fill_(torch.nan)
    assert largest_difference(portable, play) == 0.0


def test_a_wrong_file_does_not_take_the_place_of_a_good_one(
    cartpole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (out := tmp_path / "policy.pt2").write_bytes(b"a good one")

    def make_wrong(policy: PortablePolicy, about: Any) -> Any:
        return b"wrong", lambda inputs: policy(inputs) | {"value": torch.zeros(len(inputs["obs"]))}

    monkeypatch.setitem(FORMATS, "torch", ("policy.pt2", make_wrong))
    with pytest.raises(SfactoryError, match="other figures"):
        export(cartpole, "torch", out)
    assert out.read_bytes() == b"a good one"
    with pytest.raises(SfactoryError, match="other figures"):
        export(cartpole, "torch", tmp_path / "new" / "policy.pt2")
    assert not (tmp_path / "new").exists()


def test_observations_to_compare_on_are_from_the_space() -> None:
    far = np.finfo(np.float64).max
    space = spaces.Dict({
        "warm": spaces.Box(np.array([200, -np.inf]), np.array([300, 5]), (2,), np.float64),
        "wide": spaces.Tuple((spaces.Box(-far, far, (1,), np.float64),)),
        "count": spaces.Box(1000, 5000, (1,), np.int64),
    })  # fmt: skip
    drawn = PortablePolicy(policy_of(space, spaces.Discrete(2), ModelConfig())).examples(64)
    assert 200 <= drawn["obs/warm"][:, 0].min() < drawn["obs/warm"][:, 0].max() <= 300
    assert drawn["obs/count"].min() >= 1000 and drawn["obs/count"].max() <= 5000
    assert drawn["obs/wide/0"].abs().max() < 10


def test_values_are_in_units_of_return() -> None:
    policy = policy_of(*CASES["flat"])
    obs = FLAT.sample()[None]
    outputs = onnx_file(PortablePolicy(policy), {})[1]({"obs": torch.from_numpy(obs)})
    with torch.no_grad():
        own = policy.model((torch.from_numpy(obs),), None)[1]
    torch.testing.assert_close(outputs["value"], own * 2.5 - 7.0)


def test_the_file_says_what_it_takes_and_gives() -> None:
    session = onnxruntime.InferenceSession(onnx_file(PortablePolicy(policy_of(*CASES["gru"])), {"env": "Boat-v0"})[0])
    assert {entry.name: entry.type for entry in session.get_inputs()} == {
        "obs/speed": "tensor(float)", "obs/gear": "tensor(int64)", "obs/dials/0": "tensor(int64)",
        "obs/dials/1": "tensor(uint8)", "state": "tensor(float)",
    }  # fmt: skip
    assert [entry.name for entry in session.get_outputs()] == ["action", "params", "value", "next_state"]
    assert {entry.shape[0] for entry in (*session.get_inputs(), *session.get_outputs())} == {"batch"}
    assert session.get_modelmeta().custom_metadata_map["env"] == "Boat-v0"


@pytest.fixture(scope="module")
def cartpole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = short_run(tmp_path_factory.mktemp("export") / "run", "CartPole-v1")
    favour(run, category=0, episode_return=50.0)
    favour(run, category=1, episode_return=9.0)
    return run


def test_a_file_of_another_name_brings_no_warning(cartpole: Path, tmp_path: Path) -> None:
    command = ["-m", "sfactory.commands.export", str(cartpole), "--format", "torch", "--out", str(tmp_path / "a.bin")]
    with Command(*command) as done:
        assert done.wait(PATIENCE_S) == 0
    assert not done.errors
    assert torch.export.load(io.BytesIO((tmp_path / "a.bin").read_bytes())).module()


@pytest.mark.parametrize(("format", "name"), [("onnx", "policy.onnx"), ("torch", "policy.pt2")])
def test_the_command_writes_a_file_that_needs_no_sfactory(
    cartpole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], format: str, name: str
) -> None:
    assert main(["export", str(cartpole), "--format", format]) == 0
    assert "largest difference" in capsys.readouterr().out
    assert (cartpole / "export" / name).exists()
    out = tmp_path / "deep" / "best"
    assert main(["export", str(cartpole), "--format", format, "--best", "--out", str(out)]) == 0
    obs = np.zeros((3, 4), np.float32)
    if format == "onnx":
        latest, best = (
            onnxruntime.InferenceSession(str(path)).run(["action"], {"obs": obs})[0]
            for path in (cartpole / "export" / name, out)
        )
    else:
        latest, best = (
            torch.export.load(str(path)).module()({"obs": torch.from_numpy(obs)})["action"]
            for path in (cartpole / "export" / name, out)
        )
    assert latest.tolist() == [1, 1, 1] and best.tolist() == [0, 0, 0]


class Branching(ActorCritic):
    """Looks at values in Python, which no trace can follow."""

    def forward(self, obs, state=None):
        params, value, state = super().forward(obs, state)
        return (params if float(value.sum()) < 1e9 else -params), value, state


def test_a_model_that_cannot_be_traced_is_told(tmp_path: Path) -> None:
    run = short_run(tmp_path / "run", "CartPole-v1", model=ModelConfig(model=Branching))
    with pytest.raises(ConfigError, match=r"cannot be traced by torch\.export"):
        export(run, "torch", model=ModelConfig(model=Branching))


def test_a_missing_package_is_named(cartpole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(ConfigError, match=r'pip install -e "\.\[onnx\]"'):
        export(cartpole)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["/nowhere"], "holds no run"),
        (["RUN", "--push", "me/policy"], "--push: only with --format hf, a folder for the Hugging Face Hub; this is"),
        (["RUN", "--format", "hf", "--private"], "--private: only with --push OWNER/NAME"),
        (["RUN", "--format", "torch", "--episodes", "0", "--private"], "--episodes, --private: only with --format hf"),
        (["RUN", "--format", "hf", "--episodes", "-1"], "episodes is -1; it must be 0 or more"),
        (["RUN", "--format", "hf", "--video", "/nowhere.mp4"], "which is no file"),
        (["RUN", "--format", "hf", "--out", "RUN"], "the folder that is exported; name another one"),
        (["RUN", "--format", "hf", "--out", __file__], "writes a folder, and"),
        (["RUN", "--format", "torch", "--out", "RUN"], "writes a file, and"),
        (["RUN", "--out", "policy.pt2"], "policy.pt2 is the name of a file for --format torch, and this is --form"),
        (["RUN", "--out", f"{__file__}/deep/policy.onnx"], f"{__file__} is a file; name another place with --out"),
    ],
)
def test_mistakes_are_answered(
    cartpole: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main(["export", *(str(cartpole) if word == "RUN" else word for word in arguments)]) == 2
    assert message in capsys.readouterr().err


def test_unknown_formats_are_answered_in_python(cartpole: Path) -> None:
    for format in ("onxx", "hf"):
        with pytest.raises(ConfigError, match=f"format is '{format}'; use onnx or torch, or export_folder"):
            export(cartpole, format)  # type: ignore[arg-type]


def test_a_place_that_cannot_be_written_to_is_told_first(
    cartpole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sfactory.commands.export.is_writable", lambda folder: False)
    with pytest.raises(ConfigError, match=f"{tmp_path} cannot be written to; name another place with --out"):
        export_folder(cartpole, tmp_path / "deep" / "hub", episodes=1_000_000)
    assert not list(tmp_path.iterdir())


def test_a_push_without_its_package_is_told_first(
    cartpole: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    arguments = ["export", str(cartpole), "--format", "hf", "--episodes", "1000000", "--push", "me/policy"]
    assert main(arguments) == 2
    assert "--push needs huggingface_hub" in capsys.readouterr().err


def test_weights_evaluation_and_card_are_of_one_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = short_run(tmp_path / "run", "CartPole-v1")
    favour(run, category=0)
    steps, play = load_snapshot(run, "latest").env_steps, Player.play

    def play_while_the_run_goes_on(*args: Any, **options: Any) -> Any:
        favour(run, category=1)
        return play(*args, **options)

    monkeypatch.setattr(Player, "play", play_while_the_run_goes_on)
    out, _, _ = export_folder(run, tmp_path / "hub", episodes=2)
    assert load_snapshot(run, "latest").env_steps == steps + 1
    assert load_policy(out).act(np.zeros(4, np.float32))[0] == 0
    assert f"for {steps:,} env steps" in (out / "README.md").read_text()


class Masked(gym.Env):
    """Gives its mask in the info, and no episode ends."""

    observation_space, action_space = spaces.Box(-1, 1, (2,)), spaces.Discrete(3)

    def reset(self, *, seed=None, options=None):
        return np.zeros(2, np.float32), {"action_mask": np.ones(3, bool)}

    def step(self, action):
        return np.zeros(2, np.float32), 0.0, False, False, {"action_mask": np.ones(3, bool)}


def test_a_card_passes_masks_and_tells_no_return_that_is_not_known(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, out = short_run(tmp_path / "run", Masked), tmp_path / "hub"
    assert main(["export", str(run), "--format", "hf", "--episodes", "0", "--out", str(out)]) == 0
    assert "its return is not known" in capsys.readouterr().out
    card = (out / "README.md").read_text()
    assert 'policy.act(observation, state, action_mask=info["action_mask"])' in card
    assert "model-index" not in card and "unknown" not in card and "env steps.\n" in card


def test_the_video_of_another_export_is_not_shown(cartpole: Path, tmp_path: Path) -> None:
    run = shutil.copytree(cartpole, tmp_path / "run")
    shutil.rmtree(run / "videos", ignore_errors=True)
    (other := tmp_path / "other.mp4").write_bytes(b"another policy")
    assert "An episode" in (export_folder(run, episodes=0, video=other)[0] / "README.md").read_text()
    assert "An episode" not in (export_folder(run, tmp_path / "hub", episodes=0)[0] / "README.md").read_text()


def test_the_folder_for_the_hub_is_complete(cartpole: Path) -> None:
    huggingface_hub = pytest.importorskip("huggingface_hub")
    (cartpole / "videos").mkdir()
    (cartpole / "videos" / "episode_000.mp4").write_bytes(b"a video")
    out = cartpole / "export" / "huggingface"
    for _ in range(2):  # also over itself, whose video is none of the run's
        assert main(["export", str(cartpole), "--format", "hf", "--best", "--episodes", "3", "--out", str(out)]) == 0
    names = sorted(path.name.partition(".")[2] if path.parent != out else path.name for path in out.rglob("*.*"))
    assert names == sorted(
        ["README.md", "config.yaml", "curve.png", "replay.mp4", "spaces.json", "json", "safetensors"]
    )
    card = huggingface_hub.ModelCard.load(out / "README.md")
    [result] = card.data.eval_results
    assert (card.data.library_name, result.dataset_name, result.metric_type) == (
        "sfactory",
        "CartPole-v1",
        "mean_reward",
    )
    mean, _, deviation = result.metric_value.partition(" +/- ")
    assert 8 <= float(mean) < 11 and float(deviation) < 2  # always to the left
    assert {"reinforcement-learning", "sfactory", "CartPole-v1"} <= set(card.data.tags)
    assert yaml.safe_load((out / "config.yaml").read_text())["run"] == ""
    assert load_policy(out).act(np.zeros(4, np.float32))[0] == 0
    assert main(["train", "--env", "CartPole-v1", "--run", str(out), "--steps", "100000"]) == 2


def test_a_folder_for_the_hub_is_no_run_that_was_killed(
    cartpole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "hub"
    arguments = ["export", str(cartpole), "--format", "hf", "--best", "--episodes", "0", "--out", str(out)]
    assert main(arguments) == 0
    settings = ["--steps", "1000000", "--serial", "--preset", "none", "--device", "cpu"]
    assert main(["train", "--env", "CartPole-v1", "--run", str(out), *settings]) == 2
    assert "holds an exported policy" in capsys.readouterr().err
    [found] = list_runs(out)
    steps = load_snapshot(out, "latest").env_steps
    assert (found.status, found.env_steps, found.episode_return) == ("exported", steps, 50.0)
    assert main(["status", str(out)]) == 0
    assert f"{out}: exported  {steps:,} env steps, return 50" in capsys.readouterr().out
    assert main(["report", str(out), "--episodes", "1000000"]) == 2
    assert "holds an exported policy and no reports of a run" in capsys.readouterr().err
    assert not (out / "report.html").exists()
    assert main(arguments) == 0, "also after the refusals"


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("holds", ["a project", "a run", "a run begun in an export", "a model of others"])
def test_a_folder_that_holds_something_else_is_left_as_it_is(
    cartpole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], holds: str
) -> None:
    out = tmp_path / "project"
    arguments = ["export", str(cartpole), "--format", "hf", "--out", str(out)]
    if holds == "a project":
        shutil.copytree(cartpole / "checkpoints", out / "checkpoints")
        for name in ("README.md", "config.yaml", "replay.mp4"):
            (out / name).write_text("mine")
    elif holds == "a run":
        shutil.copytree(cartpole, out)
        (out / "README.md").write_text("---\nlibrary_name: sfactory\n---\n")
    else:
        assert main([*arguments, "--episodes", "0"]) == 0
        if holds == "a run begun in an export":
            with begun_run(Config(env="CartPole-v1", run=str(out), overwrite=True)):
                pass
        else:
            (out / "README.md").write_text("---\nlibrary_name: stable-baselines3\n---\n")
    before = tree(out)
    assert main([*arguments, "--episodes", "1000000"]) == 2, "told before the evaluation"
    assert "holds no model card of an export" in capsys.readouterr().err
    assert tree(out) == before


def test_an_export_is_not_exported_onto_itself(
    cartpole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, link = tmp_path / "hub", tmp_path / "link"
    assert main(["export", str(cartpole), "--format", "hf", "--episodes", "0", "--out", str(out)]) == 0
    link.symlink_to(out)
    before = tree(out)
    for same in (out, link):
        assert main(["export", str(out), "--format", "hf", "--episodes", "1000000", "--out", str(same)]) == 2
        assert f"out is {same}, the folder that is exported" in capsys.readouterr().err
    assert tree(out) == before


def test_the_video_of_the_folder_itself_may_be_shown(cartpole: Path, tmp_path: Path) -> None:
    arguments = ["export", str(cartpole), "--format", "hf", "--episodes", "0", "--out", str(tmp_path / "hub")]
    assert main(arguments) == 0
    video = tmp_path / "hub" / "replay.mp4"
    video.write_bytes(b"a good episode")
    assert main([*arguments, "--video", str(video)]) == 0
    assert video.read_bytes() == b"a good episode" and "An episode" in (tmp_path / "hub" / "README.md").read_text()


def test_a_class_of_the_users_goes_into_a_folder_for_the_hub(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = ModelConfig(model=Own)
    run = short_run(tmp_path / "run", "CartPole-v1", model=own)
    assert main(["export", str(run), "--format", "hf"]) == 2
    assert "or sfactory.commands.export's export or export_folder, in Python" in capsys.readouterr().err
    out, score, _ = export_folder(run, episodes=2, model=own)
    assert "mean of 2 evaluation episodes" in str(score)
    obs = np.array([0.0, 0.1, 0.05, -0.1], np.float32)
    assert load_policy(out, model=own).act(obs)[0] == load_policy(run, model=own).act(obs)[0]
    card = (out / "README.md").read_text()
    assert "load_policy(snapshot_download('OWNER/NAME'), model=ModelConfig(model=...))" in card
    assert "Not in this folder is the code of `<Own>`." in card


def test_a_wrong_video_is_told_before_the_evaluation(
    cartpole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["export", str(cartpole), "--format", "hf", "--out", str(tmp_path / "hub")]
    assert main([*arguments, "--episodes", "1000000", "--video", "/nowhere.mp4"]) == 2
    assert "which is no file" in capsys.readouterr().err


class Fixed(Own):
    """Does not correct its last layer when the unit of returns moves."""

    rescale_values = None


@pytest.mark.parametrize("own", [{}, {"model": Fixed}], ids=["built-in", "own model"])
def test_the_folders_weights_give_values_in_units_of_return(tmp_path: Path, own: dict[str, Any]) -> None:
    from sfactory import LossConfig

    model = ModelConfig(normalize_obs=True, core="lstm", core_size=4, **own)
    run = short_run(tmp_path / "run", "CartPole-v1", loss=LossConfig(normalize_returns=True), model=model)
    policy = load_policy(run, model=model)
    assert float(policy.model.unit.std) != 1.0
    inputs = PortablePolicy(policy).examples(5)
    with torch.no_grad():
        expected = PortablePolicy(policy)(inputs)
    out, _, _ = export_folder(run, episodes=0, model=model)
    with torch.no_grad():
        found = PortablePolicy(load_policy(out, model=model))(inputs)
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor)


def test_without_matplotlib_there_is_no_curve(
    cartpole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["export", str(cartpole), "--format", "hf", "--episodes", "0", "--out", str(tmp_path / "hub")]) == 0
    assert "no curve: plot needs matplotlib" in capsys.readouterr().out
    assert not (tmp_path / "hub" / "curve.png").exists()


class FakeHub(BaseHTTPRequestHandler):
    """Answers what an upload of small files asks, and keeps what it was given."""

    files: dict[str, bytes]
    calls: list[str]

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.calls.append(self.path)
        address = f"http://{self.headers['Host']}/me/policy"
        if self.path == "/api/repos/create":
            answer: dict[str, Any] = {"url": address}
        elif "/preupload/" in self.path:
            wanted = [entry["path"] for entry in json.loads(body)["files"]]
            answer = {"files": [{"path": path, "uploadMode": "regular", "shouldIgnore": False} for path in wanted]}
        elif "/commit/" not in self.path:  # the card's header is to be looked at
            answer = {"errors": [], "warnings": []}
        else:
            for line in body.splitlines():
                entry = json.loads(line)
                if entry["key"] == "file":
                    self.files[entry["value"]["path"]] = base64.b64decode(entry["value"]["content"])
            answer = {"commitUrl": f"{address}/commit/1", "commitOid": "1", "success": True}
        self._answer(answer)

    def do_GET(self) -> None:
        self._answer({"id": "me/policy", "sha": "0", "siblings": []})

    def _answer(self, answer: dict[str, Any]) -> None:
        data = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args: object) -> None:
        pass


def test_push_uploads_the_whole_folder(
    cartpole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("huggingface_hub")
    FakeHub.files, FakeHub.calls = {}, []
    server = ThreadingHTTPServer(("127.0.0.1", 0), FakeHub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", address)
    monkeypatch.setenv("HF_TOKEN", "hf_of_a_test")
    arguments = ["export", str(cartpole), "--format", "hf", "--episodes", "0", "--out", str(tmp_path / "hub")]
    try:
        assert main([*arguments, "--push", "me/policy"]) == 0
    finally:
        server.shutdown()
        server.server_close()
    local = {str(path.relative_to(tmp_path / "hub")): path for path in (tmp_path / "hub").rglob("*") if path.is_file()}
    assert {name: path.read_bytes() for name, path in local.items()} == FakeHub.files
    assert FakeHub.calls[0] == "/api/repos/create"
    assert "me/policy" in capsys.readouterr().out
    assert "snapshot_download('me/policy')" in FakeHub.files["README.md"].decode()
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    assert main([*arguments, "--push", "me/policy"]) == 1
    assert "is complete, but cannot be uploaded to me/policy" in capsys.readouterr().err
