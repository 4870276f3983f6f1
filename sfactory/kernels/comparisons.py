"""How a kernel is compared with what it stands for: both are run on a small chunk of made-up experience."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from sfactory.config import Config
from sfactory.data.batch import Samples, Targets
from sfactory.data.chunks import ChunkThreads
from sfactory.data.examples import example_batch
from sfactory.data.weights import FlatWeights
from sfactory.distributions import Sampler
from sfactory.kernels.dense_network import DenseNetwork
from sfactory.kernels.fused_loss import FusedObjective
from sfactory.kernels.lowered import lower_weights
from sfactory.kernels.modules import exchanged, modules_of
from sfactory.kernels.objective import CompiledObjective
from sfactory.kernels.sampling import CompiledSampler
from sfactory.kernels.update import CompiledUpdate
from sfactory.losses import COUNT
from sfactory.model.critic_units import CriticUnits
from sfactory.model.interface import Model
from sfactory.model.networks import Network, Outputs, TorchNetwork
from sfactory.model.normalizer import ValueUnit
from sfactory.model.precision import mixed_precision
from sfactory.objective import Objective
from sfactory.spaces import ActionSpec
from sfactory.update import Update

_CPU = torch.device("cpu")


class Use(NamedTuple):
    """What a kernel is wanted for.

    Attributes:
        model: Of the run, on the CPU; for what is meant for GPUs, there.
        config: Of the run.
        autocast: torch dtype to compute in, or None for float32.
        training: Gradients are needed; else answers to observations.
    """

    model: Model
    config: Config
    autocast: torch.dtype | None
    training: bool


def _device_of(model: Model) -> torch.device:
    return next(model.parameters()).device


def relative_difference(found: Tensor, expected: Tensor) -> float:
    """Norm of the difference by that of what is expected; infinite where one is not finite and the other is."""
    found, expected = (
        torch.nan_to_num(x.detach().double(), nan=1e30, posinf=2e30, neginf=-2e30) for x in (found, expected)
    )
    if found.shape != expected.shape:
        return math.inf
    return float((found - expected).norm() / expected.norm().clamp(min=1e-12)) if found.numel() else 0.0


def _relative_differences(found: Sequence[Tensor], expected: Sequence[Tensor]) -> list[float]:
    return [relative_difference(*pair) for pair in zip(found, expected, strict=True)]


# Networks


def _passes(network: Network, use: Use) -> list[Tensor]:
    """What a network gives on a small chunk, and the gradient of its parameters."""
    model, gradients = use.model, []
    batch = example_batch(model.observation, model.action, model.state_size).to(_device_of(model))
    for parameter in model.parameters():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        gradients.append(parameter.grad.zero_())
    network.refresh()
    outputs = network.outputs(batch, batch.all_columns)
    found = [outputs.params.detach().clone(), outputs.value.detach().clone()]
    generator = torch.Generator().manual_seed(1)
    of_params, of_value = (torch.randn(x.shape, generator=generator).to(x.device) for x in found)
    network.backward(outputs, of_params, of_value, {})
    found.append(torch.cat([gradient.flatten() for gradient in gradients]))
    for gradient in gradients:
        gradient.zero_()
    return found


def _answers(model: Model, autocast: torch.dtype | None) -> list[Tensor]:
    """What a model answers to a few observations."""
    batch = example_batch(model.observation, model.action, model.state_size)
    state = batch.rnn_state if model.state_size else None
    with torch.inference_mode(), mixed_precision("cpu", autocast):
        params, value, after = model(tuple(leaf[0] for leaf in batch.obs), state)
    return [params, value] if after is None else [params, value, after]


def dense_differences(use: Use) -> list[float]:
    network = DenseNetwork(use.model)
    if use.training:
        plain = _passes(plain_network(use.model), use)
        return _relative_differences(_passes(network, use), plain)
    batch = example_batch(use.model.observation, use.model.action, 0)
    found = network(tuple(leaf[0].numpy() for leaf in batch.obs))
    return _relative_differences([torch.from_numpy(x) for x in found], _answers(use.model, None))


def module_differences(plain: type, fast: type, use: Use) -> list[float]:
    """Of a model with and without another class for its modules of a class."""
    modules = modules_of(use.model, plain)
    if use.training:
        network = TorchNetwork(use.model, _device_of(use.model), use.autocast, compiled=False)
        expected = _passes(network, use)
        with exchanged(modules, fast):
            return _relative_differences(_passes(network, use), expected)
    expected = _answers(use.model, use.autocast)
    with exchanged(modules, fast):
        lower_weights(use.model, use.autocast)
        found = _answers(use.model, use.autocast)
        lower_weights(use.model, None)
    return _relative_differences(found, expected)


# Objective and sampling


class _Critic(Model):
    """As much of a model as the critic's units need."""

    def __init__(self) -> None:
        super().__init__()
        self.unit = ValueUnit()


def _objective_numbers(kind: type[Objective], use: Use) -> list[Tensor]:
    """Estimates, targets, gradients and sums of a small chunk."""
    model, device = use.model, _device_of(use.model)
    batch = example_batch(model.observation, model.action, 0, masked=True).to(device)
    units = CriticUnits(_Critic().to(device), use.config.loss.normalize_returns)
    units.update(torch.linspace(-3, 8, 50, device=device), torch.ones(50, dtype=torch.bool, device=device))
    objective, columns = kind(use.config, model.distribution, units), batch.all_columns
    params, value, moved, noise = (x.to(device) for x in _made_up_outputs(model.action, batch.first.shape))
    behaviour = model.distribution.log_prob(params[:-1], *batch.actions(columns)) + noise
    batch = dataclasses.replace(batch, log_prob=behaviour)
    generator = torch.Generator().manual_seed(3)
    estimates = objective.estimate(objective.evaluate_actions(Outputs(params, value), batch, columns), batch, columns)
    targets, _ = objective.targets([estimates])
    found = [x.float() for x in estimates]
    cases = [(moved, targets, 0.0), (moved, targets, 1e3)]  # near the behaviour policy, and far from it
    cases += [(params[:-1], _far_targets(targets, generator), 0.0) for _ in range(4)]
    for output, held, shift in cases:
        samples = batch.samples(held, single=False)
        densities = objective.evaluate_actions(Outputs(output, value[:-1]), samples, columns)
        totals = objective.totals(densities, held, columns)
        weighed = totals * totals.new_tensor((1.0, shift))
        gradients = objective.gradients(densities, samples, held, columns, weighed)
        found += [totals, gradients.params, gradients.value, gradients.sums]
    return found


def _made_up_outputs(action: ActionSpec, shape: torch.Size) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns parameters and values ``[T+1, B]``; parameters ``[T, B]`` with a perturbation that is scaled by
    1/sqrt(action dimensions) to keep ratios comparable; and noise for the behaviour log-probability."""
    generator = torch.Generator().manual_seed(2)
    params = torch.randn(*shape, action.logits + 2 * action.continuous, generator=generator)
    params[..., action.logits + action.continuous :] *= 0.5  # log standard deviations
    value = torch.randn(shape, generator=generator)
    step = 0.3 / math.sqrt(len(action.sizes) + action.continuous)
    moved = params[:-1] + step * torch.randn(params[:-1].shape, generator=generator)
    return params, value, moved, torch.randn(moved.shape[:-1], generator=generator)


def _far_targets(targets: Targets, generator: torch.Generator) -> Targets:
    """Targets far from the policy and its values: an edited loss may differ from the built-in one there alone."""

    def moved(x: Tensor, by: float) -> Tensor:
        return x + by * torch.randn(x.shape, generator=generator).to(x.device)

    old_log_prob, old_values = moved(targets.old_log_prob, 2.0), moved(targets.old_values, 1.0)
    returns = moved(targets.returns, 20.0)
    return dataclasses.replace(targets, old_log_prob=old_log_prob, old_values=old_values, returns=returns)


def objective_differences(use: Use) -> list[float]:
    return _relative_differences(_objective_numbers(CompiledObjective, use), _objective_numbers(Objective, use))


def fused_differences(use: Use) -> list[float]:
    return _relative_differences(_objective_numbers(FusedObjective, use), _objective_numbers(Objective, use))


def _draws(kind: type[Sampler], use: Use) -> list[Tensor]:
    """Actions for made-up parameters, with and without a mask."""
    action, distribution = use.model.action, use.model.distribution
    generator, rows = torch.Generator().manual_seed(3), 32
    sampler = kind(distribution, seed=4)
    found: list[Tensor] = []
    mask = torch.rand(rows, action.logits, generator=generator) < 0.6
    for allowed in (None, mask) if action.sizes else (None,):
        params = torch.randn(rows, distribution.width, generator=generator)
        out = (
            torch.zeros(rows, len(action.sizes), dtype=torch.int32),
            torch.zeros(rows, action.continuous),
            torch.zeros(rows),
        )
        sampler(params.numpy(), None if allowed is None else allowed.numpy(), *(tensor.numpy() for tensor in out))
        found += out
    return found


def sampler_differences(use: Use) -> list[float]:
    return _relative_differences(_draws(CompiledSampler, use), _draws(Sampler, use))


# Updates


class Unwatched:
    """A stopwatch that nobody reads."""

    def lap(self, phase: str) -> None:
        pass


def plain_network(model: Model) -> Network:
    """A model by autograd in float32 on the CPU."""
    return TorchNetwork(model, _CPU, None, compiled=False)


def update_parts(
    kind: type[Update], network: Callable[[Model], Network], objective: type[Objective], use: Use
) -> tuple[Update, FlatWeights, Samples]:
    """An update of a copy of a model, and a small chunk for it."""
    model = copy.deepcopy(use.model)
    weights, units = FlatWeights(model, gradients=True), CriticUnits(model, use.config.loss.normalize_returns)
    batch = example_batch(model.observation, model.action, 0, masked=True)
    own_network, own_objective = network(model), objective(use.config, model.distribution, units)
    update = kind(use.config, own_network, own_objective, weights, ChunkThreads(1), Unwatched())
    outputs = own_network.outputs(batch, batch.all_columns)
    densities = own_objective.evaluate_actions(outputs, batch, batch.all_columns)
    targets, _ = own_objective.targets([own_objective.estimate(densities, batch, batch.all_columns)])
    return update, weights, batch.samples(targets, single=True)


def update_differences(use: Use) -> list[float]:
    """Of the gradient and its sums, and of the step that follows from the fast one's gradient: where a gradient is near
    0, Adam's first step is that of its sign."""

    update, weights, samples = update_parts(CompiledUpdate, DenseNetwork, CompiledObjective, use)
    plain, expected, others = update_parts(Update, plain_network, Objective, use)
    found = []
    for columns in (torch.arange(0, 12, 2), torch.arange(1, 12, 2)):
        before = weights.parameters.detach().clone()
        row, gradient = update(samples, [columns]), weights.gradient
        expected.parameters.detach().copy_(before)
        sums = plain.gradient(plain.forward(others, [columns]), others, others.targets)
        found += [relative_difference(row[:-1], sums), relative_difference(gradient, expected.gradient)]
        expected.gradient.copy_(gradient)
        norm = plain.step(sums[COUNT])
        change, same = weights.parameters.detach() - before, expected.parameters.detach() - before
        found += [relative_difference(row[-1], norm), relative_difference(change, same)]
    return found
