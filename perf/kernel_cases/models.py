"""Whole networks and their layers, forward and backward."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from gymnasium import spaces

from perf.fast_modules import exchange_all
from perf.kernel_cases.case import ROWS, Call, Case, copies
from sfactory.config import ModelConfig
from sfactory.data.batch import Batch
from sfactory.data.weights import FlatWeights
from sfactory.kernels import lower_weights, recurrence, scans
from sfactory.kernels.convolution.pixel_blocks import BLOCK, pixel_blocks
from sfactory.kernels.dense_network import DenseNetwork
from sfactory.kernels.tanh import tanh_
from sfactory.model import NatureCNN, build_model, cores
from sfactory.model.networks import Network, TorchNetwork
from sfactory.model.precision import mixed_precision
from sfactory.spaces import ActionSpec, ObservationSpec

UNITS = 128


def activations(device: torch.device) -> Iterator[Case]:
    """The hyperbolic tangent of a layer of 64, with a copy of its input before it in place."""
    for rows in (*ROWS, 16384):
        source = np.random.default_rng(0).normal(0, 2, (rows, 64)).astype(np.float32)
        (ours, theirs), out, (tensor, result) = (
            copies([source] * 2, torch.device("cpu")),
            np.empty_like(source),
            copies([source] * 2, device),
        )
        versions: dict[str, Call] = {
            "numba": lambda ours=ours, theirs=theirs: (tanh_(ours.copy_(theirs)),),
            "numpy": lambda source=source, out=out: (np.copyto(out, source), np.tanh(out, out=out))[1:],
            f"torch {device}": lambda tensor=tensor, result=result: (result.copy_(tensor).tanh_(),),
        }
        yield Case("tanh", f"{rows} x 64", rows * 64, versions)


def dense_networks(device: torch.device) -> Iterator[Case]:
    """All of an actor-critic of 4 inputs, two layers of 64 with tanh and 2 actions: a step, and training, forward and
    backward."""
    observation, action = ObservationSpec.from_space(spaces.Box(-1, 1, (4,))), ActionSpec.from_space(spaces.Discrete(2))
    for rows in (32, 128, 1024, 16384):
        models = [build_model(observation, action, ModelConfig()) for _ in range(2)]
        models[1].load_state_dict(models[0].state_dict())
        ours, theirs = models[0], models[1].to(device)
        weights, obs = (
            [FlatWeights(model, gradients=True).parameters for model in (ours, theirs)],
            torch.randn(1, rows, 4),
        )
        compiled, plain_network = DenseNetwork(ours), TorchNetwork(theirs, device, None, compiled=False)
        versions: dict[str, Call] = {
            "numba": functools.partial(compiled, (obs[0].numpy(),)),
            f"torch {device}": _step_of(theirs, obs[0].to(device)),
        }
        yield Case("2 x 64 tanh, step", f"{rows} rows", rows, versions, tolerance=1e-4)
        versions = {
            "numba": _training(compiled, weights[0], _batch_of(obs)),
            f"torch {device}": _training(plain_network, weights[1], _batch_of(obs.to(device))),
        }
        yield Case("2 x 64 tanh, training", f"{rows} rows", rows, versions, tolerance=1e-2)


def _step_of(model: torch.nn.Module, obs: torch.Tensor) -> Call:
    return torch.inference_mode()(lambda: model((obs,))[:2])


def _batch_of(obs: torch.Tensor) -> Batch:
    """Observations and nothing else."""
    none = torch.zeros(obs.shape[:2], device=obs.device)
    values = {field.name: none for field in dataclasses.fields(Batch)}
    return Batch(**values | {"obs": (obs,), "rnn_state": none[0, :, None]})


def _training(network: Network, weights: torch.Tensor, batch: Batch) -> Call:
    """Outputs, and the gradient of weights if that of every output is 1."""

    def call() -> Sequence[Any]:
        weights.grad.zero_()
        outputs = network.outputs(batch, batch.all_columns)
        network.backward(outputs, torch.ones_like(outputs.params), torch.ones_like(outputs.value), {})
        return outputs.params.detach(), weights.grad

    return call


def pixels_by_blocks(device: torch.device) -> Iterator[Case]:
    """Pictures of Atari as the first convolution takes them; their bits must agree."""
    for dtype, bits in ((torch.float32, torch.int32), (torch.bfloat16, torch.int16)):
        for rows in (32, 512):
            pixels = torch.randint(0, 256, (rows, 4, 84, 84), dtype=torch.uint8)
            theirs = pixels.to(device)

            def compiled(pixels=pixels, dtype=dtype, bits=bits) -> Sequence[torch.Tensor]:
                return (pixel_blocks(pixels, False, dtype).view(bits),)

            def plainly(pixels=theirs, dtype=dtype, bits=bits) -> Sequence[torch.Tensor]:
                return (F.pixel_unshuffle(pixels, BLOCK).to(dtype, memory_format=torch.channels_last).view(bits),)

            versions: dict[str, Call] = {"numba": compiled, f"torch {device}": plainly}
            yield Case(f"pixels by blocks, {str(dtype)[6:]}", f"{rows} rows", rows, versions, tolerance=0.0)


def convolutions(device: torch.device) -> Iterator[Case]:
    """A NatureCNN on pictures of Atari: forward, and forward and backward, over blocks of pixels and with ReLU in the
    same pass."""
    (leaf,) = ObservationSpec.from_space(spaces.Box(0, 255, (4, 84, 84), np.uint8)).leaves
    for dtype in (torch.float32, torch.bfloat16):
        for rows in (32, 512):
            ours = NatureCNN(leaf)
            theirs = copy.deepcopy(ours).to(device)
            lower_weights(exchange_all(ours), dtype)  # as a policy worker does before forward passes
            pixels = torch.randint(0, 256, (rows, *leaf.shape), dtype=torch.uint8)
            calls = ((ours, ours, pixels), (theirs, theirs, pixels.to(device)))
            for doing, make in (("forward", _features), ("training", _features_and_gradient)):
                names = ("numba", f"torch {device}")
                versions = {
                    name: make(module, call, x, dtype) for name, (module, call, x) in zip(names, calls, strict=True)
                }
                yield Case(f"NatureCNN, {str(dtype)[6:]}, {doing}", f"{rows} rows", rows, versions, tolerance=0.05)


def _features(
    module: torch.nn.Module, call: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, dtype: torch.dtype
) -> Call:
    @torch.inference_mode()
    def features() -> Sequence[torch.Tensor]:
        with mixed_precision(x.device.type, None if dtype == torch.float32 else dtype):
            return (call(x).float(),)

    return features


def _features_and_gradient(
    module: torch.nn.Module, call: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, dtype: torch.dtype
) -> Call:
    def training() -> Sequence[torch.Tensor]:
        with mixed_precision(x.device.type, None if dtype == torch.float32 else dtype):
            features = call(x).float()
        gradient = torch.cat(
            [part.flatten() for part in torch.autograd.grad(features.sum(), list(module.parameters()))]
        )
        return features.detach(), gradient / gradient.norm()

    return training


def recurrent_scans(device: torch.device) -> Iterator[Case]:
    """LSTM and GRU of 128 units, forward and backward over a segment, without the input's matrix product."""
    rng = np.random.default_rng(0)
    for kind, gates, parts, biased, ours, theirs in (
        ("LSTM", 4, 2, 0, recurrence.CompiledLSTMScan, scans.LSTMScan),
        ("GRU", 3, 1, 1, recurrence.CompiledGRUScan, scans.GRUScan),
    ):
        for rows in (64, 256):
            weights = [(gates * UNITS, UNITS), *[(gates * UNITS,)] * biased]
            floats = [rng.normal(0, 0.1, shape).astype(np.float32) for shape in ((32, rows, gates * UNITS), *weights)]
            keep = (rng.random((32, rows, 1)) > 0.02).astype(np.float32)
            inputs = [
                *floats,
                keep,
                *np.zeros((parts, rows, UNITS), np.float32),
                np.ones((32, rows, UNITS), np.float32),
            ]
            versions = {
                "numba": _unrolling(ours, *copies(inputs, torch.device("cpu"))),
                f"torch {device}": _unrolling(theirs, *copies(inputs, device)),
            }
            yield Case(f"{kind}, training", f"32 x {rows}", 32 * rows, versions, tolerance=1e-3)


def recurrent_steps(device: torch.device) -> Iterator[Case]:
    """One step of LSTM and GRU of 128 units, after the matrix products."""
    rng = np.random.default_rng(0)
    for rows in ROWS:
        for kind, widths, ours, theirs in (
            ("LSTM", (4, 2), recurrence.lstm_step, cores.lstm_step),
            ("GRU", (3, 3, 1), recurrence.gru_step, cores.gru_step),
        ):
            inputs = [rng.standard_normal((rows, width * UNITS), np.float32) for width in widths]
            versions = {
                "numba": _stepping_once(ours, copies(inputs, torch.device("cpu"))),
                f"torch {device}": _stepping_once(theirs, copies(inputs, device)),
            }
            yield Case(f"{kind}, step", f"{rows} rows", rows, versions)


def _stepping_once(step: Callable[..., torch.Tensor], inputs: list[torch.Tensor]) -> Call:
    return lambda: (step(*inputs),)


def _unrolling(scan: type[torch.autograd.Function], *inputs: torch.Tensor) -> Call:
    """Outputs and all gradients of a scan; the last of the inputs is the gradient of its output, `keep` needs none."""
    *arguments, grad = inputs
    leaves = [x.requires_grad_() for x in arguments if x.shape[-1] != 1]

    def call() -> Sequence[Any]:
        out = scan.apply(*arguments)
        return out, *torch.autograd.grad(out, leaves, grad)

    return call
