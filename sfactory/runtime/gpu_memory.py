"""How much memory of the learner's GPU a run takes, estimated without touching it: a lower bound."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

from sfactory.config import devices
from sfactory.data.arena import arena_bytes, segment_fields
from sfactory.data.examples import example_batch
from sfactory.model.interface import Model
from sfactory.model.networks import Outputs, TorchNetwork

if TYPE_CHECKING:
    from sfactory.runtime.plan import Plan

CONTEXT_BYTES = 400 * 2**20
"""What a process takes of a GPU's memory before it computes there."""


def too_large_batch(plan: Plan, model: Model) -> str | None:
    """What is told of a run whose learner's GPU has too little free memory; None if it suffices, or nobody knows."""
    config, device = plan.config, devices.learner_device(plan.config)
    if device.type != "cuda" or plan.sample_only or (state := devices.gpu_state(device)) is None:
        return None
    needed, segment = gpu_bytes(plan, model, config.batch_size), config.rollout * plan.rows
    if needed <= state.free:
        return None
    fixed = gpu_bytes(plan, model, 0)
    unit = (needed - fixed) / (config.batch_size // segment)
    fitting = int(max(0, state.free - fixed) // unit) * segment
    remedy = f"the largest that fits is {fitting}" if fitting else "not even one segment fits; make the model smaller"
    minibatches = config.optim.minibatches
    helps = activation_bytes(model, minibatches + 1) < activation_bytes(model, minibatches)
    return (
        f"batch_size {config.batch_size} needs about {needed / 2**30:.1f} GiB on {device}, of which "
        f"{state.free / 2**30:.1f} GiB of {state.total / 2**30:.1f} GiB are free; {remedy}. "
        f"{'More optim.minibatches or --precision bfloat16 need' if helps else '--precision bfloat16 needs'} less of it"
    )


def saved_bytes(model: Model) -> float:
    """Bytes of activations that a model of the CPU saves for the way back, for each sample, in float32."""
    from sfactory.kernels import scanned  # numba, which most runners do without

    found = dict[int, int]()
    own = {weights.data_ptr() for weights in model.state_dict().values()}

    def note(x: torch.Tensor) -> torch.Tensor:
        if x.data_ptr() not in own:
            found[x.data_ptr()] = max(x.nbytes, found.get(x.data_ptr(), 0))
        return x

    with scanned(model), torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        kept, samples = _example_pass(model)  # an address belongs to one tensor as long as it lives
        total = sum(found.values())
        del kept
    return total / samples


def passing_bytes(model: Model) -> float:
    """Bytes, for each sample, that a pass without a way back through a model of the CPU takes at its widest module, in
    float32."""
    widest = 0

    def note(module: nn.Module, inputs: tuple[object, ...], output: object) -> None:
        nonlocal widest
        if next(module.children(), None) is None:
            widest = max(widest, sum(x.numel() for x in (*inputs, output) if isinstance(x, torch.Tensor)))

    with torch.no_grad(), register_module_forward_hook(note):
        _, samples = _example_pass(model)
    return torch.float32.itemsize * widest / samples


def _example_pass(model: Model) -> tuple[Outputs, int]:
    """What a model of the CPU makes of an example batch, and its number of samples."""
    batch = example_batch(model.observation, model.action, model.state_size)
    network = TorchNetwork(model, torch.device("cpu"), None, compiled=False)
    with torch.random.fork_rng(devices=[]):
        return network.outputs(batch, batch.all_columns), batch.first.numel()


def activation_bytes(model: Model, minibatches: int) -> float:
    """Bytes of activations for each sample of a batch, in float32: of an update, which goes back through a minibatch,
    or of the pass over the whole batch that its targets come from."""
    return max(saved_bytes(model) / minibatches, passing_bytes(model))


def gpu_bytes(plan: Plan, model: Model, batch_size: int) -> float:
    """Bytes of the learner's GPU that a run takes at least: two staging buffers, or the one batch of environments that
    are there, activations, weights with gradients and optimizer, and a context for each process there."""
    config, device = plan.config, devices.learner_device(plan.config)
    segments = batch_size // (config.rollout * plan.rows)
    batch = arena_bytes(segment_fields(plan.env, model.state_size), segments, config.rollout, plan.rows)
    low = 1.0 if config.precision == "float32" else 0.5
    activations = low * activation_bytes(model, config.optim.minibatches) * batch_size
    weights = sum(tensor.nbytes for tensor in model.state_dict().values())
    there = sum(devices.inference_device(config, worker) == device for worker in range(plan.policy_workers))
    return (1 if plan.on_device else 2) * batch + activations + (5 + there) * weights + CONTEXT_BYTES * (1 + there)
