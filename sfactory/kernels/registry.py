"""The table of kernels: what each stands for, when it fits, and how far it may be from that."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import nn

from sfactory.distributions import ActionDistribution, Sampler
from sfactory.kernels.comparisons import (
    Use,
    dense_differences,
    fused_differences,
    module_differences,
    objective_differences,
    sampler_differences,
    update_differences,
)
from sfactory.kernels.dense_network import DenseNetwork
from sfactory.kernels.fused_loss import FusedObjective, triton_is_there
from sfactory.kernels.modules import (
    BlockPixelConv,
    FastGRUCore,
    FastLSTMCore,
    FastNatureCNN,
    FastTanh,
    LoweredDense,
    ScannedGRUCore,
    ScannedLSTMCore,
    modules_of,
)
from sfactory.kernels.objective import CompiledObjective
from sfactory.kernels.pixels import FastPixelNormalizer
from sfactory.kernels.sampling import CompiledSampler
from sfactory.kernels.update import CompiledUpdate
from sfactory.model.cores import GRUCore, LSTMCore
from sfactory.model.encoders import NatureCNN
from sfactory.model.layers import Dense, PixelConv
from sfactory.model.networks import TorchNetwork
from sfactory.model.normalizer import PixelNormalizer
from sfactory.objective import ESTIMATORS, Objective
from sfactory.update import Update


@dataclass(frozen=True)
class Kernel:
    """One accelerator.

    Attributes:
        name: As users read it.
        plain: The callable that it stands for.
        fast: What takes its place.
        fits: Whether it can.
        differences: Relative differences on a small chunk, of which none may be above the tolerance.
        tolerance: In float32.
        decision: Page of docs/decisions that says what it brings on which machine; ``python -m perf.gains``
            measures that for whole runs.
        low_tolerance: Tolerance under autocast, whose own rounding error is this large. None: the kernel always
            computes in float32.
        device: Type of the device where the model has to compute, on which both are compared; None: any.
    """

    name: str
    plain: type
    fast: type
    fits: Callable[[Use], bool]
    differences: Callable[[Use], list[float]]
    tolerance: float
    decision: str
    low_tolerance: float | None = None
    device: str | None = "cpu"

    def disagreement(self, use: Use) -> str | None:
        """Why it cannot stand for the plain callable, or None if it gives the same numbers."""
        limit = self.tolerance if use.autocast is None or self.low_tolerance is None else self.low_tolerance
        worst = max(self.differences(use), default=0.0)
        if worst <= limit:
            return None
        return f"its numbers are not those of {self.plain.__module__}.{self.plain.__qualname__} (off by {worst:.1g})"


def _samples_as_built_in(use: Use) -> bool:
    return type(use.model.distribution) is ActionDistribution


def _learns_as_built_in(use: Use) -> bool:
    loss = use.config.loss
    return _samples_as_built_in(use) and loss.terms == "none" and loss.estimator in ("auto", *ESTIMATORS)


def _can_fuse(use: Use) -> bool:
    return _learns_as_built_in(use) and triton_is_there()


def _updates_as_built_in(use: Use) -> bool:
    """Where a batch has one update, that goes back through the pass that its targets come from."""
    return use.config.updates_per_batch > 1 and _has_dense_network(use) and _learns_as_built_in(use)


def _has_dense_network(use: Use) -> bool:
    return DenseNetwork.fits(use.model, use.autocast)


def _module_kernel(
    name: str, plain: type, fast: type, decision: str, tolerance: float = 1e-4, device: str = "cpu"
) -> Kernel:
    """A kernel that stands for a class of modules."""

    def fits(use: Use) -> bool:
        return bool(modules_of(use.model, plain))

    differences = partial(module_differences, plain, fast)
    return Kernel(name, plain, fast, fits, differences, tolerance, decision, low_tolerance=0.3, device=device)


DENSE_NETWORK = Kernel("dense network", TorchNetwork, DenseNetwork, _has_dense_network, dense_differences, 1e-4, "005")
UPDATE = Kernel("update", Update, CompiledUpdate, _updates_as_built_in, update_differences, 1e-4, "005")
SAMPLER = Kernel(
    "sampling", Sampler, CompiledSampler, _samples_as_built_in, sampler_differences, 1e-4, "006", device=None
)
OBJECTIVES = (
    Kernel("objective", Objective, CompiledObjective, _learns_as_built_in, objective_differences, 1e-4, "006"),
    Kernel("fused loss", Objective, FusedObjective, _can_fuse, fused_differences, 1e-4, "023", device="cuda"),
)
"""A learner takes the first that fits."""
MODULES = (
    _module_kernel("pixels", PixelNormalizer, FastPixelNormalizer, "038"),
    _module_kernel("convolutions", NatureCNN, FastNatureCNN, "009", 1e-3),
    _module_kernel("first convolution", PixelConv, BlockPixelConv, "010", 1e-3),
    _module_kernel("LSTM", LSTMCore, FastLSTMCore, "007"),
    _module_kernel("GRU", GRUCore, FastGRUCore, "007"),
    _module_kernel("linear layers", Dense, LoweredDense, "008"),
    _module_kernel("tanh", nn.Tanh, FastTanh, "005"),
)
"""Modules that are exchanged one kind after the other."""
SCANS = (
    _module_kernel("LSTM scan", LSTMCore, ScannedLSTMCore, "007", device="cuda"),
    _module_kernel("GRU scan", GRUCore, ScannedGRUCore, "007", device="cuda"),
)
"""The same for what trains on a GPU, whether torch.compile follows or not."""
REGISTRY = (DENSE_NETWORK, *OBJECTIVES, UPDATE, SAMPLER, *MODULES, *SCANS)
