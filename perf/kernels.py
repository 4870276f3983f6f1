"""Times every compiled kernel against the same in NumPy and torch operations, on one thread, after checking that all of
them agree.

    python -m perf.kernels [--device cuda] [--only KERNEL ...] [--json FILE]

The implementations take turns, and the least mean time of a call counts. An item is what a kernel handles many of: a
sample of a segment, a row of a group, a picture, or an element. NumPy and torch versions: perf/plain.py, and those with
which the trainer works on a GPU.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import functools
import itertools
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from gymnasium import spaces
from rich.console import Console
from rich.table import Table

from perf import plain
from perf.fast_modules import exchange_all
from sfactory.config import LossConfig, ModelConfig
from sfactory.data.batch import Batch, Targets
from sfactory.data.weights import FlatWeights
from sfactory.distributions import ActionDistribution
from sfactory.envs.interface import Outcome, StepBuffers
from sfactory.envs.kernels.resampling import Resampler
from sfactory.envs.kernels.screens import ScreenStacks
from sfactory.envs.native.base import NativeGroup, random_streams
from sfactory.envs.native.cartpole import CartPole
from sfactory.envs.native.memory_grid import MemoryGrid
from sfactory.envs.native.pendulum import Pendulum
from sfactory.gae import gae_torch
from sfactory.kernels import lower_weights, recurrence, scans
from sfactory.kernels.convolution.pixel_blocks import BLOCK, pixel_blocks
from sfactory.kernels.dense_network import DenseNetwork
from sfactory.kernels.distributions import densities, density_gradients
from sfactory.kernels.losses import loss_and_gradients
from sfactory.kernels.objective import _vtrace
from sfactory.kernels.sampling import sample_rows
from sfactory.kernels.tanh import tanh_
from sfactory.losses import EXPLORATION, POLICY, SUMS, VALUE, chunk_loss, exploration_coef
from sfactory.model import NatureCNN, build_model, cores
from sfactory.model.networks import Network, TorchNetwork
from sfactory.model.precision import mixed_precision
from sfactory.spaces import ActionSpec, ObservationSpec
from sfactory.vtrace import unweighted_vtrace

SEGMENTS = ((32, 64), (32, 512), (128, 1024))
ROWS = (64, 1024)
PICTURES = ((120, 160), (240, 320))
POLICY_PICTURE = (72, 128)
DISCOUNTS = (0.99, 0.95)
STEPS_CHECKED = 300
UNITS = 128
REPEATS = 5
REPEAT_S = 0.05

Call = Callable[[], Sequence[Any]]
"""One call of an implementation; gives the arrays or tensors that must agree."""


@dataclass(frozen=True)
class Case:
    """A kernel at one size.

    Attributes:
        items: Handled by a call.
        versions: By implementation; they hold their own state, if any.
        calls: Whose results are compared.
        tolerance: Relative and absolute.
    """

    kernel: str
    size: str
    items: int
    versions: dict[str, Call]
    calls: int = 1
    tolerance: float = 1e-4

    def check(self) -> None:
        """Compare the results of all implementations with those of the first.

        Raises:
            AssertionError: Where they differ.
        """
        for number in range(self.calls):
            results = {name: [_array(part) for part in call()] for name, call in self.versions.items()}
            first, *others = results.values()
            for name, other in zip(list(results)[1:], others, strict=True):
                for i, (a, b) in enumerate(zip(first, other, strict=True)):
                    words = f"{self.kernel}, {self.size}: result {i} of call {number}, {name}"
                    np.testing.assert_allclose(
                        a.astype(float), b.astype(float), self.tolerance, self.tolerance, err_msg=words
                    )


@dataclass(frozen=True)
class Timing:
    """One row of the table."""

    kernel: str
    size: str
    implementation: str
    microseconds: float
    nanoseconds_per_item: float


def _array(part: Any) -> np.ndarray:
    return part.detach().cpu().numpy() if isinstance(part, torch.Tensor) else np.asarray(part)


def time_case(case: Case, device: torch.device) -> list[Timing]:
    """The least of several mean times of a call of each implementation, which take turns."""

    def mean_time(call: Call, calls: int) -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        for _ in range(calls):
            call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return (time.perf_counter() - start) / calls

    counts = {name: max(1, int(REPEAT_S / mean_time(call, 3))) for name, call in case.versions.items()}
    best = dict.fromkeys(case.versions, float("inf"))
    for _ in range(REPEATS):
        for name, call in case.versions.items():
            best[name] = min(best[name], mean_time(call, counts[name]))
    return [
        Timing(case.kernel, case.size, name, 1e6 * seconds, 1e9 * seconds / case.items)
        for name, seconds in best.items()
    ]


def _copy(arrays: Sequence[np.ndarray], device: torch.device) -> list[torch.Tensor]:
    """Tensors with memory of their own."""
    return [torch.tensor(array, device=device) for array in arrays]


def vtrace_compiled(
    log_weights: np.ndarray, rewards: np.ndarray, values: np.ndarray, bootstrap_value: np.ndarray, *others: Any
) -> tuple[np.ndarray, np.ndarray]:
    """The pass within the compiled objective, with the arguments of the NumPy version."""
    terminated, truncated, final_values, gamma, lam = others
    outcome = rewards, values, bootstrap_value, final_values, terminated, truncated
    vs, advantages = np.empty_like(values), np.empty_like(values)
    _vtrace(log_weights, *outcome, gamma, lam, 1.0, 1.0, vs, advantages)
    return vs, advantages


def gae_compiled(rewards: np.ndarray, *others: Any) -> tuple[np.ndarray, np.ndarray]:
    """The same with all weights 1."""
    returns, advantages = vtrace_compiled(np.zeros_like(rewards), rewards, *others)
    return advantages, returns


def estimators(device: torch.device) -> Iterator[Case]:
    """V-trace and GAE on random float32 segments with a few ends of episodes, as the learner calls them: V-trace's
    advantages are without their weight."""
    for steps, rows in SEGMENTS:
        rng = np.random.default_rng(0)
        ends = rng.random((steps, rows))
        log_ratios, rewards, values, final_values = rng.normal(0, 0.5, (4, steps, rows)).astype(np.float32)
        arrays = (log_ratios, rewards, values, values[0].copy(), ends < 0.01, ends > 0.99, final_values)
        tensors = _copy(arrays, device)
        for name, first, kernel, numpy_version, torch_version in (
            ("vtrace", 0, vtrace_compiled, plain.vtrace_numpy, lambda *inputs: unweighted_vtrace(*inputs, 1.0, 1.0)),
            ("gae", 1, gae_compiled, plain.gae_numpy, gae_torch),
        ):
            versions: dict[str, Call] = {
                "numba": functools.partial(kernel, *arrays[first:], *DISCOUNTS),
                "numpy": functools.partial(numpy_version, *arrays[first:], *DISCOUNTS),
                f"torch {device}": functools.partial(torch_version, *tensors[first:], *DISCOUNTS),
            }
            yield Case(name, f"{steps} x {rows}", steps * rows, versions)


def losses(device: torch.device) -> Iterator[Case]:
    """The loss of algo appo and its gradients; NumPy's without the sums for the statistics."""
    config = LossConfig(entropy_coef=0.01)
    for steps, rows in SEGMENTS:
        rng = np.random.default_rng(0)
        arrays = [*rng.normal(0, 0.3, (6, steps, rows)).astype(np.float32), rng.random((steps, rows)) < 0.98]

        def compiled(arrays: list[np.ndarray]) -> Call:
            log_prob, value, exploration, advantages, returns, behaviour, valid = (
                array.reshape(-1) for array in arrays
            )
            samples = log_prob, value, exploration, advantages, returns, returns, behaviour, valid
            weights = config.clip, config.value_clip, config.value_coef, exploration_coef(config)
            gradients, sums = np.empty((3, *arrays[0].shape), np.float32), np.empty(SUMS)

            def call() -> Sequence[Any]:
                settings = True, *map(float, weights)
                loss_and_gradients(*samples, float(valid.sum()), *settings, *gradients.reshape(3, -1), sums)
                parts = sums[[POLICY, VALUE, EXPLORATION]] / valid.sum()
                return parts @ (1.0, *weights[2:]), *gradients

            return call

        def with_torch(tensors: list[torch.Tensor]) -> Call:
            inputs = tuple(tensor.requires_grad_() for tensor in tensors[:3])
            advantages, returns, behaviour, valid = tensors[3:]
            targets = Targets(advantages, returns, returns, behaviour, torch.zeros_like(behaviour), valid)

            def call() -> Sequence[torch.Tensor]:
                value = chunk_loss(config, True, *inputs, targets, valid.sum())[0]
                return value, *torch.autograd.grad(value, inputs)

            return call

        versions: dict[str, Call] = {
            "numba": compiled(arrays),
            "numpy": functools.partial(plain.loss_numpy, config, *arrays),
            f"torch {device}": with_torch(_copy(arrays, device)),
        }
        yield Case("loss and gradients", f"{steps} x {rows}", steps * rows, versions)


KINDS = (("2 categories", (2,), 0, False), ("18 masked", (18,), 0, True), ("6 Gaussians", (), 6, False))
"""Name, categories of each component, Gaussians, and whether there is a mask."""


def densities_and_gradients(device: torch.device) -> Iterator[Case]:
    """Log-probabilities, entropies and the gradient of both."""
    for rows in ROWS:
        for name, sizes, dims, masked in KINDS:
            rng, logits, counts = np.random.default_rng(0), sum(sizes), np.array(sizes, np.int32)
            params = rng.normal(0, 1, (rows, logits + 2 * dims)).astype(np.float32)
            mask = rng.random((rows, logits)) < 0.7 if masked else np.zeros((0, 0), bool)
            mask[:, :1] = True
            actions = rng.integers(0, 1, (rows, len(sizes)), np.int32), rng.standard_normal((rows, dims), np.float32)
            weights = rng.standard_normal((2, rows), np.float32)
            of_categories = *np.empty((2, rows, logits), np.float32), np.empty((rows, len(sizes)), np.float32)
            out = (*np.empty((2, rows), np.float32), np.empty_like(params))

            def compiled(
                params=params,
                mask=mask,
                counts=counts,
                actions=actions,
                weights=weights,
                of_categories=of_categories,
                out=out,
            ) -> Sequence[np.ndarray]:
                densities(params, *actions, mask, counts, False, *of_categories, *out[:2])
                density_gradients(params, *actions, *of_categories, counts, False, *weights, out[2])
                return out

            def operations(
                tensors: list[torch.Tensor], sizes=sizes, dims=dims, masked=masked
            ) -> Sequence[torch.Tensor]:
                params, mask, categorical, continuous, weights = tensors
                space = spaces.MultiDiscrete(sizes) if sizes else spaces.Box(-1, 1, (dims,))
                distribution = ActionDistribution(ActionSpec.from_space(space))
                leaf = params.detach().requires_grad_()
                both = distribution.log_prob_and_entropy(leaf, categorical, continuous, mask if masked else None)
                return *both, *torch.autograd.grad(both, leaf, tuple(weights))

            given = mask if masked else None
            versions: dict[str, Call] = {
                "numba": compiled,
                "numpy": functools.partial(plain.densities_numpy, params, given, sizes, *actions, *weights),
                f"torch {device}": functools.partial(operations, _copy((params, mask, *actions, weights), device)),
            }
            yield Case(f"densities, {name}", f"{rows} rows", rows, versions)


def sampling(device: torch.device) -> Iterator[Case]:
    """Actions and their log-probabilities: two categories, masked eighteen, and six Gaussians."""
    for rows in ROWS:
        for name, sizes, dims, masked in KINDS:
            rng, logits, counts = np.random.default_rng(0), sum(sizes), np.array(sizes, np.int32)
            params = rng.normal(0, 1, (rows, logits + 2 * dims)).astype(np.float32)
            mask = rng.random((rows, logits)) < 0.7
            mask[:, :1] = True
            uniforms, normals = (
                rng.random((rows, len(sizes)), np.float32),
                rng.standard_normal((rows, dims), np.float32),
            )
            arrays = (params, mask, uniforms, normals)
            out = (
                np.empty((rows, len(sizes)), np.int32),
                np.empty((rows, dims), np.float32),
                np.empty(rows, np.float32),
            )

            def compiled(arrays=arrays, counts=counts, masked=masked, out=out) -> Sequence[np.ndarray]:
                params, mask, uniforms, normals = arrays
                sample_rows(params, mask if masked else np.zeros((0, 0), bool), counts, uniforms, normals, *out)
                return out

            def operations(xp: Any, arrays: Sequence[Any], sizes=sizes, masked=masked) -> Sequence[Any]:
                params, mask, uniforms, normals = arrays
                return plain.sample_rows(xp, params, mask if masked else None, sizes, uniforms, normals)

            versions: dict[str, Call] = {
                "numba": compiled,
                "numpy": functools.partial(operations, np, arrays),
                f"torch {device}": functools.partial(operations, torch, _copy(arrays, device)),
            }
            yield Case(f"sample_rows, {name}", f"{rows} rows", rows, versions)


def resampling(device: torch.device) -> Iterator[Case]:
    """A picture of ViZDoom's to the size that a policy sees."""
    for source in PICTURES:
        image = np.random.default_rng(0).integers(0, 256, (*source, 3), np.uint8)
        out = np.empty((3, *POLICY_PICTURE), np.uint8)
        resampler = Resampler(image.shape, POLICY_PICTURE)
        matrices = [plain.area_matrix(a, b) for a, b in zip(source, POLICY_PICTURE, strict=True)]

        def compiled(resampler=resampler, image=image, out=out) -> Sequence[np.ndarray]:
            resampler(image, out)
            return (out,)

        versions: dict[str, Call] = {
            "numba": compiled,
            "numpy": functools.partial(plain.resample, np, image, *matrices),
            f"torch {device}": functools.partial(plain.resample, torch, *_copy((image, *matrices), device)),
        }
        yield Case("resample", f"{source[0]} x {source[1]}", 1, versions, tolerance=1.0)


def screens(device: torch.device) -> Iterator[Case]:
    """Two screens of an Atari game to the newest picture of its stack, with what a tenth, and all, of the lines
    change."""
    sides, small = (210, 160), (84, 84)
    matrices = [plain.area_matrix(a, b) for a, b in zip(sides, small, strict=True)]

    def whole(xp: Any, shown: Any, *others: Any, first: Iterator[int]) -> Sequence[Any]:
        number = next(first)
        return (plain.picture(xp, shown[[number % len(shown), (number + 1) % len(shown)]], *others),)

    for changing in (0.1, 1.0):
        console = plain.RecordedConsole(64, sides, changing, seed=0)
        stacks, out = ScreenStacks([console], 4, small), np.empty((4, *small), np.uint8)
        stacks.clear(0, out)

        def compiled(console=console, stacks=stacks, out=out) -> Sequence[np.ndarray]:
            for which in range(2):
                console.show(console.shown + 1)
                stacks.look(0, which)
            stacks.push(0, out)
            return (out[-1],)

        arrays = (console.screens, console.greys, *matrices)
        versions: dict[str, Call] = {
            "numba": compiled,
            "numpy": functools.partial(whole, np, *arrays, first=itertools.count(1, 2)),
            f"torch {device}": functools.partial(whole, torch, *_copy(arrays, device), first=itertools.count(1, 2)),
        }
        yield Case("screens", f"{changing:.0%} changing", 1, versions, calls=50, tolerance=1.0)


class CompiledEnvironments:
    """A native group with arrays of its own to write into."""

    def __init__(self, group: NativeGroup) -> None:
        rows, space = group.rows, group.observation_space
        self._group = group
        self._buffers = StepBuffers(
            (np.zeros((rows, *space.shape), space.dtype),), None, np.zeros(rows, bool), np.zeros(rows, bool)
        )
        self._outcome = Outcome(np.zeros(rows, np.float32), np.zeros(rows, bool), np.zeros(rows, bool))

    def step(self, categorical: np.ndarray, continuous: np.ndarray) -> tuple[np.ndarray, ...]:
        self._group.step(categorical, continuous, self._outcome, self._buffers)
        reward, terminated, truncated = self._outcome
        obs = self._buffers.obs[0].reshape(self._group.rows, -1)
        return obs, reward, self._buffers.first, terminated, truncated, self._buffers.active


def environments(device: torch.device) -> Iterator[Case]:
    """One step of every row under random actions; episodes begin and end as they do."""
    views = np.ascontiguousarray(MemoryGrid([0])._views)
    views_of = {np: views, torch: torch.tensor(views, device=device)}
    for rows in ROWS:
        for name, kind, version in (
            ("CartPole", CartPole, plain.PlainCartPole),
            ("Pendulum", Pendulum, plain.PlainPendulum),
            ("MemoryGrid", MemoryGrid, lambda xp, random: plain.PlainMemoryGrid(xp, random, views_of[xp])),
        ):
            random = random_streams(range(rows)).view(np.int64)
            rng = np.random.default_rng(0)
            categorical, continuous = (
                rng.integers(0, 2, (64, rows, 1), np.int32),
                rng.normal(0, 1, (64, rows, 1)).astype(np.float32),
            )
            actions = (continuous if kind is Pendulum else categorical)[..., 0]
            versions: dict[str, Call] = {
                "numba": _stepping(CompiledEnvironments(kind(range(rows))).step, categorical, continuous),
                "numpy": _stepping(version(np, random.copy()).step, actions),
                f"torch {device}": _stepping(
                    version(torch, torch.tensor(random, device=device)).step, *_copy([actions], device)
                ),
            }
            yield Case(f"{name}, step", f"{rows} rows", rows, versions, calls=STEPS_CHECKED)


def _stepping(step: Callable[..., Sequence[Any]], *actions: Any) -> Call:
    """Calls `step` with the actions of one step after the other, again and again."""
    count = 0

    def call() -> Sequence[Any]:
        nonlocal count
        count += 1
        return step(*(each[count % len(each)] for each in actions))

    return call


def activations(device: torch.device) -> Iterator[Case]:
    """The hyperbolic tangent of a layer of 64, with a copy of its input before it in place."""
    for rows in (*ROWS, 16384):
        source = np.random.default_rng(0).normal(0, 2, (rows, 64)).astype(np.float32)
        (ours, theirs), out, (tensor, result) = (
            _copy([source] * 2, torch.device("cpu")),
            np.empty_like(source),
            _copy([source] * 2, device),
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
                "numba": _unrolling(ours, *_copy(inputs, torch.device("cpu"))),
                f"torch {device}": _unrolling(theirs, *_copy(inputs, device)),
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
                "numba": _stepping_once(ours, _copy(inputs, torch.device("cpu"))),
                f"torch {device}": _stepping_once(theirs, _copy(inputs, device)),
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


FAMILIES = (
    estimators,
    losses,
    densities_and_gradients,
    sampling,
    resampling,
    screens,
    environments,
    activations,
    pixels_by_blocks,
    dense_networks,
    convolutions,
    recurrent_scans,
    recurrent_steps,
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", type=torch.device, help="device of the torch implementations")
    parser.add_argument("--only", nargs="+", help="kernels whose names begin so")
    parser.add_argument("--json", type=Path, help="write the timings to this file")
    args = parser.parse_args()
    torch.set_num_threads(1)
    table = Table("kernel", "size", "implementation", "us a call", "ns an item", "x numba")
    timings: list[Timing] = []
    for case in (case for family in FAMILIES for case in family(args.device)):
        if args.only and not case.kernel.startswith(tuple(args.only)):
            continue
        case.check()
        best = time_case(case, args.device)
        timings += best
        for timing in best:
            times = (f"{timing.microseconds:.1f}", f"{timing.nanoseconds_per_item:.1f}")
            table.add_row(
                timing.kernel,
                timing.size,
                timing.implementation,
                *times,
                f"{timing.microseconds / best[0].microseconds:.1f}",
            )
    Console().print(table)
    if args.json:
        args.json.write_text(json.dumps([asdict(timing) for timing in timings], indent=1))


if __name__ == "__main__":
    main()
