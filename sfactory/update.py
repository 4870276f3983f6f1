"""One update of the weights: the gradient of a minibatch's loss, clipped, and a step of Adam along it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from sfactory.config import Config
from sfactory.data.batch import Batch, Samples, Targets
from sfactory.data.chunks import ChunkThreads, Columns
from sfactory.data.plane import Laps
from sfactory.data.weights import FlatWeights
from sfactory.losses import COUNT
from sfactory.model.networks import Network, Outputs


class Loss(Protocol):
    """What an update needs of an objective; :class:`sfactory.objective.Objective` says more."""

    def evaluate_actions(self, outputs: Outputs, samples: Batch | Samples, columns: Columns) -> Any:
        """The present policy's densities of the actions that were taken."""

    def totals(self, densities: Any, targets: Targets, columns: Columns) -> Tensor:
        """What :meth:`gradients` has to know of all chunks of a minibatch, added up."""

    def gradients(
        self, densities: Any, samples: Batch | Samples, targets: Targets, columns: Columns, totals: Tensor
    ) -> Any:
        """The gradients of a chunk's share of the loss."""


class Chunk(NamedTuple):
    """Some columns after the forward pass: the network's outputs and what the objective makes of them."""

    columns: Columns
    outputs: Outputs
    densities: Any


class Update:
    """Updates on minibatches, each given by chunks of columns that threads share.

    Args:
        config: Configuration of the run.
        weights: Of the network's model, with gradients.
        threads: What the chunks are given to.
        watch: Stopwatch of the learner.

    Attributes:
        optimizer: Of the weights.
        skipped, skipped_in_a_row: int64 ``[]`` on the weights' device; updates that were not made because the gradient
            was not finite, in all and since the last that was made.
    """

    def __init__(
        self,
        config: Config,
        network: Network,
        objective: Loss,
        weights: FlatWeights,
        threads: ChunkThreads,
        watch: Laps,
    ) -> None:
        self._network, self._objective, self._threads, self._watch = network, objective, threads, watch
        self._gradient, optim = weights.gradient, config.optim
        self._max_norm = optim.max_grad_norm
        self.optimizer = Adam(weights.parameters, weights.gradient, optim.lr, optim.betas, optim.eps)
        device = weights.parameters.device
        self.skipped, self.skipped_in_a_row = (torch.zeros((), dtype=torch.int64, device=device) for _ in range(2))

    def __call__(self, samples: Samples, columns: Sequence[Columns]) -> Tensor:
        """One update on some columns of samples, given by chunks.

        Returns:
            float64 ``[SUMS + terms + 1]``: the sums of the loss, and the norm of its gradient.
        """
        return self.after(self.forward(samples, columns), samples, samples.targets)

    def after(self, chunks: Sequence[Chunk], samples: Batch | Samples, targets: Targets) -> Tensor:
        """As a call, from the forward pass on. The targets are those of all columns."""
        sums = self.gradient(chunks, samples, targets)
        row = torch.cat((sums, self.step(sums[COUNT]).double().reshape(1)))
        self._watch.lap("update")
        return row

    def forward(self, samples: Samples, columns: Sequence[Columns]) -> list[Chunk]:
        """The present policy on some columns."""
        self._network.refresh()

        def run(columns: Columns) -> Chunk:
            outputs = self._network.outputs(samples, columns)
            return Chunk(columns, outputs, self._objective.evaluate_actions(outputs, samples, columns))

        chunks = self._threads.map(run, columns)
        self._watch.lap("update")
        return chunks

    def gradient(self, chunks: Sequence[Chunk], samples: Batch | Samples, targets: Targets) -> Tensor:
        """Fill the parameters' ``grad``; gives the sums of the loss. The targets are those of all columns."""
        shares = [self._objective.totals(chunk.densities, targets, chunk.columns) for chunk in chunks]
        totals = shares[0] if len(shares) == 1 else torch.stack(shares).sum(0)
        self._gradient.zero_()

        def backward(chunk: Chunk) -> Tensor:
            gradients = self._objective.gradients(chunk.densities, samples, targets, chunk.columns, totals)
            self._network.backward(chunk.outputs, gradients.params, gradients.value, gradients.auxiliary)
            return gradients.sums

        sums = torch.stack(self._threads.map(backward, chunks)).sum(0)
        self._watch.lap("update")
        return sums

    def step(self, count: Tensor) -> Tensor:
        """Clip the gradient and step, without a sync: the optimizer divides by the scale, and skips where the norm is
        not finite, or where no sample is valid, since Adam's momentum would move the weights all the same.

        Args:
            count: Valid samples ``[]``.

        Returns:
            The norm.
        """
        norm = torch.linalg.vector_norm(self._gradient)
        divisor = (norm / self._max_norm).clamp(min=1.0) if self._max_norm > 0 else torch.ones_like(norm)
        skip = ~norm.isfinite()
        self.optimizer.step(divisor, (skip | (count == 0)).float())
        self.skipped += skip
        self.skipped_in_a_row.add_(1).mul_(skip)
        return norm


class Adam:
    """Adam (Kingma & Ba 2015, algorithm 1), the fused kernel of torch, over one flat parameter vector.

    ``torch.optim.Adam`` imports torch's compiler when it is made: a second of start-up and 150 MB in every learner that
    never compiles.

    Args:
        parameter: float32 ``[size]``.
        gradient: Of the parameter, which stays in place.
        lr: Learning rate; may be changed between steps, also to a float64 tensor ``[]`` on the parameter's device.
        betas: Decays of the first and second moment; may be changed, as may `eps`.
        eps: Added to the root of the second moment.

    Attributes:
        rate: Unset, or a float32 tensor ``[]`` on the parameter's device that steps read in place of `lr`, so that
            recorded steps follow it; :meth:`update_rate` sets it.
    """

    def __init__(self, parameter: Tensor, gradient: Tensor, lr: float, betas: tuple[float, float], eps: float) -> None:
        self.lr: float | Tensor = lr
        self.rate: Tensor | None = None
        self.betas, self.eps = betas, eps
        self._parameter, self._gradient = parameter, gradient
        self._first, self._second = (
            torch.zeros_like(parameter, requires_grad=False),
            torch.zeros_like(parameter, requires_grad=False),
        )
        self._steps = torch.zeros((), dtype=torch.float32, device=parameter.device)

    @torch.no_grad()
    def update_rate(self) -> None:
        """Let `rate` be what `lr` is, without waiting for the device."""
        if self.rate is None:
            self.rate = torch.empty((), dtype=torch.float32, device=self._parameter.device)
        if isinstance(self.lr, Tensor):
            self.rate.copy_(self.lr)
        else:
            self.rate.fill_(self.lr)

    @torch.no_grad()
    def step(self, gradient_divisor: Tensor, skip: Tensor) -> None:
        """One step along the parameter's gradient.

        Args:
            gradient_divisor: float32 ``[]``; the gradient is divided by it.
            skip: float32 ``[]``; 1: nothing changes, 0: the step is made.
        """
        self._steps += 1 - skip
        lr: Any = self.lr if self.rate is None else self.rate
        lr = lr.float() if isinstance(lr, Tensor) and lr.is_cuda else lr  # what the kernels take
        torch._fused_adam_(
            [self._parameter], [self._gradient], [self._first], [self._second], [], [self._steps],
            lr=lr, beta1=self.betas[0], beta2=self.betas[1], weight_decay=0.0, eps=self.eps, amsgrad=False,
            maximize=False,
            grad_scale=gradient_divisor, found_inf=skip,
        )  # fmt: skip

    def state_dict(self) -> dict[str, Any]:
        """Moments and number of steps; the settings are not part of it."""
        return {"first": self._first, "second": self._second, "steps": self._steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, tensor in self.state_dict().items():
            tensor.copy_(state[name])
