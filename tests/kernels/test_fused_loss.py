"""The loss as one Triton kernel, run by Triton's interpreter, against the one of tensor operations."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from test_objective import LOSSES, SPACES, Critic, gradients_of, make_batch, outputs_of, targets_of
from torch import nn

from sfactory import losses
from sfactory.config import Config, LossConfig, ModelConfig, RuntimeConfig
from sfactory.data.chunks import select_columns
from sfactory.distributions import ActionDistribution
from sfactory.kernels import Kernels
from sfactory.kernels.fused_loss import BLOCK, FusedObjective, triton_is_there
from sfactory.model import build_model
from sfactory.model.critic_units import CriticUnits
from sfactory.objective import Objective
from sfactory.spaces import ActionSpec, ObservationSpec

CUDA = torch.device("cuda")


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton on the CPU, where it is installed."""
    if not triton_is_there():
        pytest.skip("needs triton, which comes with torch for CUDA")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    importlib.reload(importlib.import_module("sfactory.kernels.triton_loss"))


def found_by(kind: type[Objective], algo: str, loss: LossConfig, space: str, columns, width: int = 9) -> list:
    """Gradients and sums of a minibatch of a policy that has moved on, and the same with what is not valid spoiled."""
    action = ActionSpec.from_space(SPACES[space])
    batch, old = make_batch(action, masked=space != "box", width=width), outputs_of(action, width)
    units = CriticUnits(Critic(), loss.normalize_returns)
    units.update(torch.linspace(-3, 8, 50), torch.ones(50, dtype=torch.bool))
    objective = kind(Config(env="x", algo=algo, loss=loss), ActionDistribution(action), units)
    targets = targets_of(objective, *old, batch)
    noise = torch.Generator().manual_seed(6)
    params, value = (select_columns(x, columns, 1) for x in old)
    params, value = (x + 0.1 * torch.randn(x.shape, generator=noise) for x in (params, value))
    samples = batch.samples(targets, single=False)
    first = gradients_of(objective, params[:-1], value[:-1], samples, targets, columns)
    targets.advantages[~targets.valid] = torch.nan
    targets.returns[~targets.valid] = torch.inf
    return [*first, *gradients_of(objective, params, value, batch, targets, columns)]


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("columns", [slice(2, 8), torch.tensor([7, 0, 4, 5, 8, 1])], ids=["slice", "indices"])
@pytest.mark.parametrize("space", SPACES)
@pytest.mark.parametrize(("algo", "loss"), LOSSES.values(), ids=LOSSES)
def test_gradients_and_sums_are_those_of_tensor_operations(algo: str, loss: LossConfig, space: str, columns) -> None:
    fused, plain = (found_by(kind, algo, loss, space, columns) for kind in (FusedObjective, Objective))
    assert len(fused) == 6
    for ours, wanted in zip(fused, plain, strict=True):
        torch.testing.assert_close(ours.double(), wanted.double(), rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("interpreted")
def test_several_programs_add_up() -> None:
    width = BLOCK // 3  # with 7 steps more than two programs
    arguments = "appo", LossConfig(tv_limit=0.0), "discrete", slice(0, width), width
    for ours, wanted in zip(*(found_by(kind, *arguments) for kind in (FusedObjective, Objective)), strict=True):
        torch.testing.assert_close(ours.double(), wanted.double(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("capability", [80, 90])
def test_the_kernel_compiles_for_gpus(capability: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To machine code, which needs no GPU."""
    if not triton_is_there():
        pytest.skip("needs triton, which comes with torch for CUDA")
    from triton import compile as compiled
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    kernel = importlib.reload(importlib.import_module("sfactory.kernels.triton_loss")).loss_and_gradients
    constants = {"SURROGATE": True, "BOUNDS_SHIFT": True, "CLIPS_VALUES": True, "SUMS": losses.SUMS, "BLOCK": BLOCK}
    kinds = {"valid": "*u8", "totals": "*fp64", "sums": "*fp64", "count": "i32"}
    kinds |= dict.fromkeys(("clip", "value_clip", "value_coef", "exploration_coef", "tv_limit"), "fp32")
    kinds |= dict.fromkeys(constants, "constexpr")
    signature = {name: kinds.get(name, "*fp32") for name in kernel.arg_names}
    places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    found = compiled(ASTSource(kernel, signature, places), target=GPUTarget("cuda", capability, 32))
    assert found.asm["cubin"]


def test_the_kernel_is_launched_where_its_tensors_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not on the process's current device, which another worker of the same process may have chosen."""
    current: list[torch.Tensor] = []
    seen: list[torch.Tensor] = []

    @contextlib.contextmanager
    def device_of(tensor: torch.Tensor) -> Iterator[None]:
        current.append(tensor)
        yield
        current.pop()

    def launch(log_prob: torch.Tensor, *_: object) -> None:
        seen.append(current[-1])

    launches = {(programs,): launch for programs in range(9)}
    kernels = SimpleNamespace(loss_and_gradients=launches)
    monkeypatch.setitem(sys.modules, "sfactory.kernels.triton_loss", kernels)
    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    found_by(FusedObjective, "appo", LossConfig(), "discrete", slice(0, 6))
    assert len(seen) == 2 and not current


def chosen(kernels: str = "auto") -> Kernels:
    """What a learner on a GPU would choose, its model on the CPU."""
    action = ActionSpec.from_space(SPACES["mixed"])
    model: nn.Module = build_model(ObservationSpec.from_space(SPACES["box"]), action, ModelConfig())
    made = Kernels(Config(env="x", runtime=RuntimeConfig(kernels=kernels)), model, CUDA, None)
    made.kind = type(made.objective(CriticUnits(model, normalize=False)))
    return made


@pytest.mark.usefixtures("interpreted", "kernels_on")
def test_a_gpu_takes_it_where_it_gives_the_same_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    assert chosen().kind is FusedObjective and chosen().choice.taken == ["fused loss"]
    assert chosen("off").kind is Objective
    plain = losses.policy_loss_ppo
    monkeypatch.setattr(losses, "policy_loss_ppo", lambda *args: 1.5 * plain(*args))
    edited = chosen()
    assert edited.kind is Objective and "its numbers are not those" in edited.choice.refused["fused loss"]


@pytest.mark.usefixtures("kernels_on")
def test_without_triton_the_loss_is_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sfactory.kernels.registry.triton_is_there", lambda: False)
    assert chosen().kind is Objective and not chosen().choice.refused
