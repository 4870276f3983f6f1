"""A GPU that is too small, fails, or runs out of memory: told before a run, and survived within it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import gymnasium
import pytest
import torch
from environments import Pixels
from whole_runs import config_for, saved_steps, summary

from sfactory import train
from sfactory.config import Config, ModelConfig, OptimConfig, RuntimeConfig, devices, resolve
from sfactory.device_rollout import empty_batch
from sfactory.errors import ConfigError, RunFailed
from sfactory.model import build_model
from sfactory.model.actor_critic import ActorCritic
from sfactory.runtime import gpu_memory
from sfactory.runtime.device_errors import explained, is_device_error
from sfactory.runtime.planning import make_plan

GIB = 2**30


class FailingLearner(ActorCritic):
    """Runs out of memory at an update, as a GPU's allocator says it."""

    def unroll(self, *args):
        self.calls = getattr(self, "calls", 0) + 1
        if Path("/proc/self/comm").read_text().startswith("sf-learner") and self.calls > 12:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.\nGPU 0 has 3 GiB free.")
        return super().unroll(*args)


class FailingPolicy(ActorCritic):
    """Fails once in a policy worker."""

    def forward(self, *args):
        self.calls = getattr(self, "calls", 0) + 1
        marker = Path(os.environ["FAILED_ONCE"])
        if Path("/proc/self/comm").read_text().startswith("sf-policy") and self.calls > 60 and not marker.exists():
            marker.touch()
            raise RuntimeError("CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be ...")
        return super().forward(*args)


def test_a_learner_without_memory_ends_the_run_saved_and_says_what_to_lower(tmp_path: Path) -> None:
    config = config_for(
        tmp_path, "CartPole-v1", model=ModelConfig(model=FailingLearner), runtime=RuntimeConfig(kernels="off")
    )
    with pytest.raises(RunFailed) as caught:
        train(config)
    message = str(caught.value)
    for part in ("Tried to allocate 20.00 GiB", "Lower batch_size (now 128)", "optim.minibatches", "bfloat16"):
        assert part in message
    assert "Traceback" not in message and "GPU 0 has" not in message
    assert summary(tmp_path / "run")["status"] == "failed"
    assert saved_steps(tmp_path / "run") > 0


def test_a_policy_worker_whose_device_fails_is_lost_and_started_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FAILED_ONCE", str(tmp_path / "failed"))
    config = config_for(
        tmp_path, "CartPole-v1", model=ModelConfig(model=FailingPolicy), runtime=RuntimeConfig(kernels="off")
    )
    result = train(config)
    assert (tmp_path / "failed").exists()
    assert result.status == "completed" and result.env_steps >= config.steps


@pytest.mark.parametrize(
    ("error", "part"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried 1 GiB"), "too little memory"),
        (torch.AcceleratorError("CUDA error: misaligned address"), "failed: CUDA error: misaligned address"),
        (RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"), "CUDNN_STATUS_EXECUTION_FAILED"),
    ],
    ids=["memory", "driver", "library"],
)
def test_errors_of_a_device_are_explained(error: Exception, part: str) -> None:
    told = explained(error, Config(env="x"))
    assert isinstance(told, RunFailed) and part in str(told) and "saved" in str(told)


@pytest.mark.parametrize("error", [ValueError("CUDA error"), RuntimeError("shapes do not match")])
def test_errors_of_a_program_stay_what_they_are(error: Exception) -> None:
    assert not is_device_error(error)
    assert explained(error, Config(env="x")) is error


# What is asked of a GPU before a run


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The driver's program, which says what it is told to, and keeps what it was asked."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    def say(text: str) -> Path:
        program, asked = tmp_path / "nvidia-smi", tmp_path / "asked"
        program.write_text(f"#!/bin/sh\necho \"$@\" >> {asked}\necho '{text}'\n")
        program.chmod(0o755)
        return asked

    return say


def test_the_driver_is_asked_about_the_device_in_question_without_a_context(driver, monkeypatch) -> None:
    asked = driver("1024, 81559, 9.0")
    state = devices.gpu_state(torch.device("cuda", 1))
    assert state == (1024 << 20, 81559 << 20, (9, 0))
    assert "-i 1 " in asked.read_text()
    assert devices.computes_bfloat16(torch.device("cuda", 1))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,GPU-5")
    driver("1024, 81559, 7.5")
    assert not devices.computes_bfloat16(torch.device("cuda", 1))
    assert "-i GPU-5 " in asked.read_text()
    assert not torch.cuda.is_initialized()
    driver("[N/A], 81559, ?")
    assert devices.gpu_state(torch.device("cuda", 0)) is None


def test_of_different_gpus_no_number_is_taken_for_the_one_that_cuda_gives(driver, monkeypatch) -> None:
    program = driver("").with_name("nvidia-smi")
    program.write_text(
        "#!/bin/sh\ncase \"$*\" in *query-gpu=name*) printf 'GT 1030\\nH100\\n';; "
        "*'-i 0 '*) echo '1900, 2048, 6.1';; *) echo '80000, 81559, 9.0';; esac\n"
    )
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert devices.gpu_state(torch.device("cuda", 0)) is None, "CUDA begins with the fastest"
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    assert devices.gpu_state(torch.device("cuda", 0)) == (1900 << 20, 2048 << 20, (6, 1))
    monkeypatch.delenv("CUDA_DEVICE_ORDER")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-5")
    assert devices.gpu_state(torch.device("cuda", 0)) == (80000 << 20, 81559 << 20, (9, 0))


def test_a_batch_that_does_not_fit_is_refused_with_the_largest_that_does(driver) -> None:
    driver("3000, 81559, 9.0")
    config = resolve(
        Config(env=Pixels, preset="none", device="cuda", envs_per_worker=64, rollout=32, batch_size=32768, workers=2)
    )
    with pytest.raises(ConfigError) as caught:
        make_plan(config)
    (problem,) = caught.value.problems
    assert "batch_size 32768 needs about" in problem and "2.9 GiB of 79.6 GiB are free" in problem
    largest = int(problem.partition("the largest that fits is ")[2].partition(".")[0])
    assert 1024 <= largest < 32768 and largest % 1024 == 0
    fitting = resolve(
        Config(env=Pixels, preset="none", device="cuda", envs_per_worker=64, rollout=32, batch_size=largest, workers=2)
    )
    assert make_plan(fitting).config.device == "cuda"
    driver("100, 81559, 9.0")
    with pytest.raises(ConfigError, match="not even one segment fits"):
        make_plan(fitting)


def test_more_minibatches_need_less_of_a_gpu(driver) -> None:
    driver("80000, 81559, 9.0")
    plans = [
        make_plan(resolve(Config(env=Pixels, preset="none", device="cuda", optim=OptimConfig(minibatches=count))))
        for count in (1, 4)
    ]
    model = build_model(plans[0].env.observation, plans[0].env.action, plans[0].config.model)
    one, four = (gpu_memory.gpu_bytes(plan, model, plan.config.batch_size) for plan in plans)
    saved, passing = gpu_memory.saved_bytes(model), gpu_memory.passing_bytes(model)
    assert saved > 4 * (32 * 20 * 20 + 64 * 9 * 9 + 64 * 7 * 7), "the layers' outputs in float32"
    assert passing == 4 * (84 * 84 * 4 + 32 * 20 * 20), "what the first convolution takes in and gives out"
    assert saved > passing > saved / 4, "the targets of four minibatches come from one pass over them all"
    assert one - four == pytest.approx(0.5 * (saved - passing) * plans[0].config.batch_size)


@pytest.mark.parametrize(("backend", "batches"), [("tensors", 1), ("vector", 2)])
def test_environments_on_the_device_fill_one_batch_there_and_others_two_by_turns(
    backend: str, batches: int, driver
) -> None:
    driver("80000, 81559, 9.0")
    sizes = {"envs_per_worker": 64, "rollout": 16, "batch_size": 1024, "workers": 1, "precision": "float32"}
    plan = make_plan(resolve(Config(env="sfactory/TensorCartPole", env_backend=backend, device="cuda", **sizes)))
    model = build_model(plan.env.observation, plan.env.action, plan.config.model)
    activations = 1024 * gpu_memory.activation_bytes(model, plan.config.optim.minibatches)
    found = gpu_memory.gpu_bytes(plan, model, 1024) - gpu_memory.gpu_bytes(plan, model, 0) - activations
    held = empty_batch(plan.env, model.state_size, 16, 64, torch.device("cpu")).tensors().values()
    assert found == pytest.approx(batches * sum(tensor.nbytes for tensor in held), rel=0.2), "slots hold values, too"


@pytest.mark.parametrize(("core", "vectors"), [("lstm", 8), ("gru", 6)])
def test_a_core_takes_what_its_scan_saves_on_a_gpu(core: str, vectors: int) -> None:
    env = make_plan(resolve(Config(env="CartPole-v1", preset="none", device="cpu"))).env
    small, large = (
        gpu_memory.saved_bytes(build_model(env.observation, env.action, ModelConfig(core=core, core_size=size)))
        for size in (128, 256)
    )
    assert large - small == 4 * vectors * 128


def test_float32_is_float32_on_a_gpu_even_where_a_container_sets_tf32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    chosen = torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic
    try:
        torch.set_float32_matmul_precision("high")
        torch.backends.cudnn.allow_tf32 = True
        devices.prepare_device(torch.device("cuda", 0), Config(env="x"))
        assert torch.get_float32_matmul_precision() == "highest"
        assert not torch.backends.cudnn.allow_tf32 and not torch.backends.cuda.matmul.allow_tf32
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.allow_tf32 = before[1]
        torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = chosen


# torch.compile's cache


class Telling(Pixels):
    """Writes down the environment of its process."""

    observation_space = gymnasium.spaces.Box(-1, 1, (2,))

    def __init__(self, told: str) -> None:
        Path(told).write_text(json.dumps(dict(os.environ)))


@pytest.mark.parametrize("named", [True, False], ids=["named", "not named"])
def test_what_was_compiled_outlasts_a_run(named: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    if named:
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "compiled"))
    train(config_for(tmp_path, Telling, env_kwargs={"told": str(tmp_path / "told")}, steps=256))
    told = json.loads((tmp_path / "told").read_text())
    place = Path(told["TORCHINDUCTOR_CACHE_DIR"])
    assert place == tmp_path / "compiled" if named else not place.is_relative_to(told["TMPDIR"])
    assert not Path(told["TMPDIR"]).exists(), "where torch would have put it"
