"""Which kernels a worker takes, and why it does not take others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from sfactory.config import Config
from sfactory.data.chunks import ChunkThreads
from sfactory.data.plane import Laps
from sfactory.data.weights import FlatWeights
from sfactory.distributions import Sampler
from sfactory.kernels.comparisons import Use
from sfactory.kernels.dense_network import DenseNetwork
from sfactory.kernels.modules import exchange, modules_of
from sfactory.kernels.objective import CompiledObjective
from sfactory.kernels.registry import (
    DENSE_NETWORK,
    MODULES,
    OBJECTIVES,
    SAMPLER,
    SCANS,
    UPDATE,
    Kernel,
)
from sfactory.kernels.sampling import CompiledSampler
from sfactory.kernels.update import CompiledUpdate
from sfactory.model.critic_units import CriticUnits
from sfactory.model.interface import Model
from sfactory.model.networks import Network, TorchNetwork
from sfactory.objective import Objective
from sfactory.update import Update


@dataclass(frozen=True)
class Choice:
    """The kernels of a kind of worker.

    Attributes:
        taken: Names of the kernels that it runs with.
        refused: Why others that would fit are not taken, by name.
    """

    taken: list[str] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)


@contextmanager
def _evaluation_mode(model: Model) -> Iterator[None]:
    """Without dropout, and with the running moments of batch normalisation as they are."""
    before = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in before:
            module.training = training


class Kernels:
    """Chooses between plain callables and kernels for one worker.

    Args:
        config: Configuration of the run; ``runtime.kernels`` off: everything is plain.
        model: The model of the run.
        device: Where the model computes.
        autocast: torch dtype to compute in, or None for float32.

    Attributes:
        config, device, autocast: As given.
        choice: What has been taken so far.
    """

    def __init__(self, config: Config, model: Model, device: torch.device, autocast: torch.dtype | None) -> None:
        self.config, self._model, self.device, self.autocast = config, model, device, autocast
        self.choice = Choice()

    def network(self) -> Network:
        """What the learner runs the model with."""
        compiled = self.config.optim.compile
        if not compiled:
            if self._takes(DENSE_NETWORK, training=True):
                return DenseNetwork(self._model)
            self.optimize(training=True)
        self._exchange(SCANS, training=True)
        return TorchNetwork(self._model, self.device, self.autocast, compiled)

    def dense_network(self) -> DenseNetwork | None:
        """What a policy worker runs a small model with, if it fits; the weights have to stay where they lie."""
        return DenseNetwork(self._model) if self._takes(DENSE_NETWORK, training=False) else None

    def optimize(self, training: bool = False) -> None:
        """Exchange a model's modules for fast ones."""
        self._exchange(MODULES, training)

    def objective(self, units: CriticUnits) -> Objective:
        """Targets and loss of the learner."""
        kind = next((kernel.fast for kernel in OBJECTIVES if self._takes(kernel, training=True)), Objective)
        return kind(self.config, self._model.distribution, units)

    def update(
        self, network: Network, objective: Objective, weights: FlatWeights, threads: ChunkThreads, watch: Laps
    ) -> Update:
        """What makes the learner's updates of them."""
        if isinstance(network, DenseNetwork) and isinstance(objective, CompiledObjective) and self._takes(UPDATE, True):
            return CompiledUpdate(self.config, network, objective, weights, threads, watch)
        return Update(self.config, network, objective, weights, threads, watch)

    def sampler(self, seed: int) -> Sampler:
        """What draws a policy worker's actions, on the host whatever the device."""
        kind = CompiledSampler if self._takes(SAMPLER, training=False) else Sampler
        return kind(self._model.distribution, seed)

    def _exchange(self, kernels: Sequence[Kernel], training: bool) -> None:
        for kernel in kernels:
            if self._takes(kernel, training):
                exchange(modules_of(self._model, kernel.plain), kernel.fast)

    def _takes(self, kernel: Kernel, training: bool) -> bool:
        """Whether a kernel fits and agrees with what it stands for; keeps account of that."""
        use = Use(self._model, self.config, self.autocast, training)
        meant = kernel.device in (None, self.device.type) and self.config.takes_kernel(kernel.name)
        if not (meant and kernel.fits(use)):
            return False
        try:
            with _evaluation_mode(self._model):
                reason = kernel.disagreement(use)
        except Exception as error:
            reason = f"it failed: {type(error).__name__}: {error}"
        if reason is None:
            self.choice.taken.append(kernel.name)
        else:
            self.choice.refused[kernel.name] = reason
        return reason is None
