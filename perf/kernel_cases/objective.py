"""What the learner's objective and the drawing of actions are made of."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from gymnasium import spaces

from perf import plain
from perf.kernel_cases.case import ROWS, Call, Case, copies
from sfactory.config import LossConfig
from sfactory.data.batch import Targets
from sfactory.distributions import ActionDistribution
from sfactory.gae import gae_torch
from sfactory.kernels.distributions import densities, density_gradients
from sfactory.kernels.losses import loss_and_gradients
from sfactory.kernels.objective import _vtrace
from sfactory.kernels.sampling import sample_rows
from sfactory.losses import EXPLORATION, POLICY, SUMS, VALUE, chunk_loss, exploration_coef
from sfactory.spaces import ActionSpec
from sfactory.vtrace import unweighted_vtrace

SEGMENTS = ((32, 64), (32, 512), (128, 1024))
DISCOUNTS = (0.99, 0.95)
KINDS = (("2 categories", (2,), 0, False), ("18 masked", (18,), 0, True), ("6 Gaussians", (), 6, False))
"""Name, categories of each component, Gaussians, and whether there is a mask."""


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
        tensors = copies(arrays, device)
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
            f"torch {device}": with_torch(copies(arrays, device)),
        }
        yield Case("loss and gradients", f"{steps} x {rows}", steps * rows, versions)


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
                f"torch {device}": functools.partial(operations, copies((params, mask, *actions, weights), device)),
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
                f"torch {device}": functools.partial(operations, torch, copies(arrays, device)),
            }
            yield Case(f"sample_rows, {name}", f"{rows} rows", rows, versions)
