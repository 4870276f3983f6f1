"""Every kernel agrees with what it stands for, and none is taken where it does not."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor, nn
from whole_runs import config_for

from sfactory import distributions, losses, train, vtrace
from sfactory.config import Config, LossConfig, ModelConfig, OptimConfig, RuntimeConfig
from sfactory.data.chunks import ChunkThreads
from sfactory.data.weights import FlatWeights
from sfactory.distributions import Sampler
from sfactory.kernels import REGISTRY, Kernel, Kernels
from sfactory.kernels.comparisons import Unwatched, Use
from sfactory.model import build_model, encoders
from sfactory.model.critic_units import CriticUnits
from sfactory.model.networks import TorchNetwork
from sfactory.objective import Objective
from sfactory.spaces import ActionSpec, ObservationSpec
from sfactory.telemetry.metrics import Report

pytestmark = pytest.mark.usefixtures("kernels_on")
CPU = torch.device("cpu")
ON_CPU = [kernel for kernel in REGISTRY if kernel.name != "fused loss"]  # scans, too: they are torch's operations
VECTOR, IMAGE = spaces.Box(-1, 1, (5,)), spaces.Box(0, 255, (4, 84, 84), np.uint8)
MIXED = spaces.Tuple((spaces.Discrete(4), spaces.Box(-1, 1, (2,)), spaces.Discrete(3)))
MODELS: dict[str, tuple[spaces.Space, dict[str, Any]]] = {
    "vector": (VECTOR, {}),
    "own critic": (VECTOR, {"shared_critic": False, "normalize_obs": True}),
    "dict": (spaces.Dict({"a": VECTOR, "b": spaces.Discrete(3)}), {}),
    "lstm": (VECTOR, {"core": "lstm", "core_size": 16}),
    "gru": (VECTOR, {"core": "gru", "core_size": 16}),
    "image": (IMAGE, {"features": 64}),
    "normalised image": (IMAGE, {"features": 64, "normalize_images": True}),
    "resnet": (IMAGE, {"features": 64, "encoder": "impala_resnet"}),
}


def model_of(name: str, action: spaces.Space = MIXED) -> nn.Module:
    observation, config = MODELS[name]
    torch.manual_seed(0)
    return build_model(ObservationSpec.from_space(observation), ActionSpec.from_space(action), ModelConfig(**config))


def chosen(model: nn.Module, config: Config, autocast: torch.dtype | None = None) -> Kernels:
    """All that a learner and a policy worker choose."""
    weights = FlatWeights(model, gradients=True)
    kernels = Kernels(config, model, CPU, autocast)
    network = kernels.network()
    objective = kernels.objective(CriticUnits(model, normalize=False))
    kernels.update(network, objective, weights, ChunkThreads(1), Unwatched())
    kernels.sampler(0)
    return kernels


@pytest.mark.parametrize("training", [True, False], ids=["training", "answers"])
@pytest.mark.parametrize("autocast", [None, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("kernel", ON_CPU, ids=[kernel.name for kernel in ON_CPU])
def test_a_kernel_agrees_with_what_it_stands_for(kernel: Kernel, autocast: torch.dtype | None, training: bool) -> None:
    fitting = 0
    for name in MODELS:
        use = Use(model_of(name), Config(env="x", epochs=2), autocast, training)
        if kernel.fits(use):
            fitting += 1
            assert kernel.disagreement(use) is None, name
    assert fitting or (autocast and kernel.name in ("dense network", "update"))


@pytest.mark.parametrize("algo", ["appo", "impala", "ppo"])
@pytest.mark.parametrize(
    "loss",
    [
        LossConfig(),
        LossConfig(exploration="kl", entropy_coef=0.3, normalize_advantage=False, value_clip=0.1),
        LossConfig(reward_scale=0.5, reward_clip=0.4, lam=0.8, normalize_returns=True, rho_bar=1.3, c_bar=0.7),
    ],
)
def test_a_whole_run_s_choice_is_taken_with_any_loss(algo: str, loss: LossConfig) -> None:
    choice = chosen(model_of("vector"), Config(env="x", epochs=2, algo=algo, loss=loss)).choice
    assert choice.taken == ["dense network", "objective", "update", "sampling"]
    assert not choice.refused


NESTED = spaces.Tuple((spaces.Discrete(5), spaces.Dict({"a": spaces.MultiBinary(3), "b": spaces.Box(-2, 2, (2,))})))


@pytest.mark.parametrize("algo", ["appo", "impala", "ppo"])
def test_the_objective_is_taken_whatever_the_action_space(algo: str) -> None:
    """Made-up policies whose ratios overflow would differ for the plain sums' sake."""
    (kernel,) = (kernel for kernel in REGISTRY if kernel.name == "objective")
    boxes = [spaces.Box(-1, 1, (n,)) for n in (*range(1, 30, 2), 22, 24, 28, 64)]
    for action in (*boxes, NESTED, spaces.MultiBinary(200), spaces.Tuple((spaces.Discrete(9), boxes[2]))):
        use = Use(model_of("vector", action), Config(env="x", algo=algo), None, True)
        assert kernel.disagreement(use) is None, action


def test_the_only_update_of_a_batch_needs_no_kernel() -> None:
    assert "update" not in chosen(model_of("vector"), Config(env="x")).choice.taken


def test_kernels_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    off = Config(env="x", runtime=RuntimeConfig(kernels="off"))
    assert chosen(model_of("vector"), off).choice.taken == []
    monkeypatch.setenv("SFACTORY_KERNELS", "off")
    kernels = chosen(model_of("image"), Config(env="x"))
    assert kernels.choice.taken == []
    monkeypatch.setenv("SFACTORY_KERNELS", "-sampling,-dense network")
    assert chosen(model_of("vector"), Config(env="x")).choice.taken == ["linear layers", "tanh", "objective"]
    monkeypatch.setenv("SFACTORY_KERNELS", "off")
    assert type(kernels.network()) is TorchNetwork
    assert type(kernels.objective(CriticUnits(model_of("vector"), False))) is Objective
    assert type(kernels.sampler(0)) is Sampler


def test_a_model_for_torch_compile_stays_as_it_is() -> None:
    model = model_of("image")
    chosen(model, Config(env="x", optim=OptimConfig(compile=True)))
    assert type(model.actor.encoders[0]) is encoders.NatureCNN


_SURROGATE = losses.policy_loss_ppo


def dual_clip(log_ratio: Tensor, advantages: Tensor, clip: float) -> Tensor:
    """Ye et al. 2020: where an advantage is negative, the loss is at most 3 times its size."""
    loss = _SURROGATE(log_ratio, advantages, clip)
    return torch.where(advantages < 0, torch.minimum(loss, -3 * advantages), loss)


def huber(error: Tensor, change: Tensor | None = None, clip: float = 0.0) -> Tensor:
    return nn.functional.huber_loss(error, torch.zeros_like(error), reduction="none", delta=10.0)


EDITS = {
    "no policy loss": (losses, "policy_loss_ppo", lambda log_ratio, advantages, clip: advantages * 0),
    "dual clip": (losses, "policy_loss_ppo", dual_clip),
    "absolute value loss": (losses, "value_loss", lambda error, change=None, clip=0.0: error.abs()),
    "Huber's value loss": (losses, "value_loss", huber),
    "no value clipping": (losses, "value_loss", lambda error, change=None, clip=0.0: 0.5 * error.square()),
    "temporal_difference": (vtrace, "temporal_difference", lambda r, v, *_: r - v),
}


@pytest.mark.parametrize(
    "action",
    [MIXED, spaces.Discrete(2), spaces.Box(-1, 1, (1,)), spaces.Box(-1, 1, (17,)), spaces.MultiBinary(64)],
    ids=["mixed", "discrete", "box", "large box", "many bits"],
)  # fmt: skip
@pytest.mark.parametrize("edit", EDITS)
def test_an_edited_loss_is_what_runs(edit: str, action: spaces.Space, monkeypatch: pytest.MonkeyPatch) -> None:
    module, name, edited = EDITS[edit]
    config = Config(env="x", loss=LossConfig(value_clip=0.2))
    assert "objective" in chosen(model_of("vector", action), config).choice.taken
    monkeypatch.setattr(module, name, edited)
    choice = chosen(model_of("vector", action), config).choice
    assert "objective" not in choice.taken
    assert "its numbers are not those of sfactory" in choice.refused["objective"]


def test_an_edited_loss_is_what_runs_for_pictures_in_low_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(losses, "policy_loss_ppo", dual_clip)
    assert "objective" in chosen(model_of("image"), Config(env="x"), torch.bfloat16).choice.refused


def test_an_edited_distribution_is_what_acts_and_trains() -> None:
    sample = distributions.ActionDistribution.sample

    def cold(self, params, mask=None, generator=None):
        return sample(self, params * 2, mask, generator)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distributions.ActionDistribution, "sample", cold)
        assert chosen(model_of("vector"), Config(env="x")).choice.refused.keys() == {"sampling"}

    class Own(distributions.ActionDistribution):
        pass

    model = model_of("vector")
    model.distribution = Own(model.action)
    assert chosen(model, Config(env="x")).choice.taken == ["dense network"]


@pytest.mark.parametrize(
    ("name", "method", "kernel"),
    [("vector", "forward", "dense network"), ("image", "forward", "convolutions"), ("lstm", "_step", "LSTM")],
)
def test_an_edited_module_is_what_runs(name: str, method: str, kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(name)
    kind = type(model.actor.core or model.actor.encoders[0])
    unedited = getattr(kind, method)
    monkeypatch.setattr(kind, method, lambda self, *inputs: unedited(self, *inputs) * 1.1)
    kernels = Kernels(Config(env="x"), model, CPU, None)
    assert kernels.dense_network() is None
    kernels.optimize()
    assert kernel in kernels.choice.refused
    assert type(model.actor.core or model.actor.encoders[0]) is kind


@pytest.mark.parametrize("core", ["lstm", "gru"])
def test_an_edited_cell_is_what_acts_and_trains(core: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(core)
    kind, name = type(model.actor.core), core.upper()
    unedited = kind._step

    def forgetful(self, projected: Tensor, weight: Tensor, layer: int, state: Tensor) -> Tensor:
        return unedited(self, projected, weight, layer, 0.9 * state)

    monkeypatch.setattr(kind, "_step", forgetful)
    kernels = Kernels(Config(env="x"), model, CPU, None)
    kernels.network()
    assert name in kernels.choice.refused and type(model.actor.core) is kind
    (scan,) = (kernel for kernel in REGISTRY if kernel.name == f"{name} scan")
    assert scan.disagreement(Use(model, Config(env="x"), None, True)) is not None


@pytest.mark.parametrize("fast", [True, False], ids=["kernels", "plain"])
@pytest.mark.parametrize("core", ["lstm", "gru"])
def test_what_a_policy_worker_and_a_learner_compute_of_a_core_agrees(core: str, fast: bool) -> None:
    config = Config(env="x", runtime=RuntimeConfig(kernels="auto" if fast else "off"))
    acting, training = model_of(core).actor.core, model_of(core)
    kernels = Kernels(config, training, CPU, None)
    kernels.network()
    assert (core.upper() in kernels.choice.taken) == fast
    x, first = torch.randn(6, 3, acting.weight_ih_l0.shape[1]), torch.rand(6, 3) < 0.3
    state, outputs = torch.randn(3, acting.state_size), []
    start = state.clone()
    with torch.inference_mode():
        for inputs, begins in zip(x, first, strict=True):
            output, state = acting(inputs, state * ~begins.unsqueeze(1))
            outputs.append(output)
    torch.testing.assert_close(training.actor.core.unroll(x, first, start), torch.stack(outputs), rtol=1e-5, atol=1e-5)


def test_scans_are_taken_on_a_gpu_alone_and_whatever_compiles_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    for compiled in (False, True):
        config, model = Config(env="x", optim=OptimConfig(compile=compiled)), model_of("lstm")
        kernels = Kernels(config, model, torch.device("cuda"), None)
        with monkeypatch.context() as patch:
            patch.setattr(torch, "compile", lambda function: function)
            kernels.network()
        assert kernels.choice.taken == ["LSTM scan"]
        assert type(model.actor.core).__name__ == "ScannedLSTMCore"
    off = Kernels(Config(env="x", runtime=RuntimeConfig(kernels="off")), model_of("lstm"), torch.device("cuda"), None)
    off.network()
    assert not off.choice.taken


def test_a_kernel_that_fails_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(use: Use) -> list[float]:
        raise SystemError("cannot be compiled here")

    kernels = Kernels(Config(env="x"), model_of("vector"), CPU, None)
    kernel = dataclasses.replace(REGISTRY[0], differences=broken)
    assert not kernels._takes(kernel, training=True)
    assert kernels.choice.refused == {"dense network": "it failed: SystemError: cannot be compiled here"}


def test_checking_leaves_no_trace_in_the_model() -> None:
    model = model_of("own critic")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    chosen(model, Config(env="x"))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(not parameter.grad.any() for parameter in model.parameters())


def test_a_run_on_the_cpu_trains_with_what_losses_py_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(losses, "policy_loss_ppo", lambda log_ratio, advantages, clip: advantages * 0)
    reports: list[Report] = []
    result = train(config_for(tmp_path, "CartPole-v1", serial=True), [reports.append])
    assert "objective" not in result.kernels["learner"]
    assert reports[-1].policy_loss == 0.0
    assert reports[-1].value_loss > 0.0


@pytest.mark.parametrize("kernel", REGISTRY, ids=[kernel.name for kernel in REGISTRY])
def test_a_kernel_names_the_page_that_says_what_it_brings(kernel: Kernel) -> None:
    decisions = Path(__file__).parents[2] / "docs" / "decisions"
    assert len(list(decisions.glob(f"{kernel.decision}-*.md"))) == 1
